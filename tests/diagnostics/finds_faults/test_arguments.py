"""Reports check the arguments and the loss of a function first, because not all faults are caused by float16."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from workloads import draw

import jax_lossscale as jls
from jax_lossscale.diagnostics import autocast_report, compare_gradients, find_precision, range_report

pytestmark = pytest.mark.ci

PARAMS = {"kernel": draw(8, 4, scale=0.3)}
X = draw(32, 8, seed=1)
NAN, INF = jnp.nan, jnp.inf


def loss_fn(params, batch, mask=None):
    y = (batch @ params["kernel"]).sum(0)
    return jnp.mean((y if mask is None else y + mask) ** 2)


def warned(*args, **kwargs):
    with pytest.warns(UserWarning, match="not finite even with all matmuls in float32") as warnings:
        report = find_precision(loss_fn, *args, **kwargs)
    assert (report.policy, report.loss_scale, report.errors) == (jls.PrecisionPolicy(), None, None)
    return str(warnings[0].message)


TEXTS = {
    "compare_gradients": lambda *args, **kwargs: compare_gradients(jls.autocast(loss_fn), *args, **kwargs).verdict,
    "range_report": lambda *args, **kwargs: repr(range_report(jls.autocast(loss_fn), *args, **kwargs)),
    "autocast_report": lambda *args, **kwargs: repr(autocast_report(loss_fn, *args, **kwargs)),
    "find_precision": warned,
}
FAULTS = {
    "NaN in the batch": (
        (PARAMS, X.at[5, 5].set(NAN).at[7, 1].set(INF).at[9, 1].set(NAN)),
        {},
        "`batch` contains 2 NaNs, the first at [5, 5].",
    ),
    "one NaN": ((PARAMS, X.at[2, 3].set(NAN)), {}, "`batch` contains 1 NaN, at [2, 3]."),
    "a parameter": (({"kernel": PARAMS["kernel"].at[1, 0].set(NAN)}, X), {}, "`params['kernel']` contains 1 NaN"),
    "a keyword": ((PARAMS, X), {"mask": jnp.full(4, NAN)}, "`mask` contains 4 NaNs, the first at [0]."),
}


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize(("args", "kwargs", "said"), FAULTS.values(), ids=FAULTS)
def test_nan_in_the_arguments_is_reported_first(kind, args, kwargs, said):
    text = TEXTS[kind](*args, **kwargs)
    assert said in text
    assert "stay in range" not in text
    if kind == "compare_gradients":
        assert "Therefore, the " in text
        assert "not finite in float32 either." in text


@pytest.mark.slow
def test_infinite_argument_is_reported_only_if_the_result_is_not_finite():
    infinite = (PARAMS, X.at[5, 5].set(INF))
    assert "`batch` contains 1 infinity, at [5, 5]." in TEXTS["compare_gradients"](*infinite)
    assert "`batch` contains 1 infinity" in TEXTS["range_report"](*infinite)
    assert "`batch` contains 1 infinity" in warned(*infinite)
    assert range_report(jls.autocast(lambda p, x: jnp.mean((x @ p["kernel"]) ** 2)), *infinite).arguments  # no NaN

    def masked(params, batch, mask):
        return -jnp.mean(jax.nn.log_softmax(batch @ params["kernel"] + mask)[:, 0])

    args = PARAMS, X, jnp.array([[0.0, 0.0, -INF, -INF]])
    assert compare_gradients(jls.autocast(masked), *args, loss_scales=[2.0**8]).cause == "none"
    assert "mask" not in repr(range_report(jls.autocast(masked), *args))


@pytest.mark.parametrize("size", [3e3, 1e5])
def test_float16_is_not_blamed_for_a_diverged_training(size):
    params = {"kernel": jnp.full((8, 4), size)}
    verdict = compare_gradients(jls.autocast(loss_fn), params, X).verdict
    loss = float(loss_fn(params, X))
    sentence = f"The loss is {loss:.2g} in float32 as well. If the loss has become this large during training, training"
    assert sentence in verdict
    overflows = size > 65504
    assert verdict.startswith(sentence) == overflows  # This sentence comes first if training is impossible.
    assert "Check the learning rate and the sign of the loss." in verdict
    assert ("Keep the matmul in float32 with `jls.keep_float32`" in verdict) == overflows
    reaches = "`params['kernel']` reaches 1e+05, but the largest finite float16 number is 65504."
    assert (reaches in verdict) == overflows


def test_float16_is_blamed_for_an_overflow_with_a_small_float32_loss():
    def fun(params, x):
        y = 1000 * (x.astype(jnp.float16) @ params["kernel"].astype(jnp.float16))
        return 1e-6 * jnp.mean(jnp.square(y).astype(jnp.float32))

    verdict = compare_gradients(fun, PARAMS, X).verdict
    assert "learning rate" not in verdict
    assert ", but the largest finite float16 number is 65504." in verdict


def test_large_argument_that_is_not_cast_is_not_reported():
    def loss(params, batch):
        far = jnp.mean((1e5 * batch["x"] @ params["kernel"]) ** 2)
        return 1e-10 * far + 1e-6 * jnp.sum(batch["time"])

    params, batch = {**PARAMS, "unused": jnp.full(3, 1e5)}, {"x": X, "time": jnp.full(4, 1.7e9)}
    verdict = compare_gradients(jls.autocast(loss), params, batch).verdict
    assert "but the largest finite float16 number is 65504." in verdict
    assert "time" not in verdict
    assert "unused" not in verdict


# An infinite error is not printed as a percentage.


def infinite_at_every_scale(params, x):
    y = x.astype(jnp.float16) @ params["kernel"].astype(jnp.float16)
    return jnp.sum(jnp.tanh(y * jnp.float16(6e4) * 8).astype(jnp.float32))


@pytest.mark.parametrize("fun", [infinite_at_every_scale, jls.autocast(lambda p, x: 1e20 * loss_fn(p, x))])
def test_infinite_error_is_not_printed_as_a_percentage(fun):
    for scales in (None, [2.0**100]):
        assert "inf%" not in repr(compare_gradients(fun, PARAMS, X, loss_scales=scales))


# Arguments of all reports.

REPORTS = {
    "autocast_report": autocast_report,
    "compare_gradients": compare_gradients,
    "find_precision": find_precision,
    "range_report": range_report,
}


@pytest.mark.parametrize("name", REPORTS)
def test_options_and_keyword_arguments_are_passed_on(name):
    def fun(x, params, *, power, label, dates):
        assert (type(power), label, type(dates)) == (int, "a", np.ndarray)
        return jnp.mean((x @ params["kernel"]) ** power), {"x": x, "label": label, "dates": dates}

    dates = np.zeros(2, "datetime64[s]")
    options = {"argnums": (0, -1), "has_aux": True, "power": 2, "label": "a", "dates": dates}
    takes_float32 = name in ("autocast_report", "find_precision")
    params = {**PARAMS, "n": 3.0}  # Python numbers are not parameters.
    report = REPORTS[name](fun if takes_float32 else jls.autocast(fun), X, params, **options)
    if name == "find_precision":
        assert report.errors[1] < 0.01
    else:
        assert (report.summary.matmuls, report.summary.half_matmuls) == (3, 3)  # two of them in the backward pass
    if name == "compare_gradients":
        assert {leaf.path for leaf in report} == {"[0]", "[1]['kernel']"}


@pytest.mark.parametrize(
    ("report", "sentence"),
    [
        (compare_gradients, "The float32 reference also computes these operations in half precision: pure_callback."),
        (range_report, "Not evaluated in float32: pure_callback."),
    ],
)
def test_opaque_operations_are_listed(report, sentence):
    def fun(w):
        factor = jax.pure_callback(lambda: np.float16(2), jax.ShapeDtypeStruct((), jnp.float16))
        return jnp.sum((w.astype(jnp.float16) * factor).astype(jnp.float32))

    found = report(fun, jnp.full(2, 60000.0))
    assert found.opaque_operations == ("pure_callback",)
    assert sentence in repr(found)


# Invalid arguments. The error contains the argument, the value and a suggestion.

FLOATING = "must be a real floating dtype, got int32"
NUMBERS = "must be a sequence of positive finite numbers, got"
BATCH = jax.vmap(jls.FixedLossScale)(jnp.ones(2))
REFUSED = [
    ("autocast_report", {"policy": "float32"}, "policy=...)` must be"),
    ("autocast_report", {"has_aux": 1}, "has_aux=...)` must be"),
    ("autocast_report", {"argnums": "w"}, "argnums=...)` must be"),
    ("compare_gradients", {"dtype": jnp.int32}, f"dtype=...)` {FLOATING}"),
    ("compare_gradients", {"loss_scales": []}, f"loss_scales=...)` {NUMBERS} []"),
    ("compare_gradients", {"loss_scales": [INF]}, f"loss_scales=...)` {NUMBERS} [inf]"),
    # The value 1e39 is infinite in float32.
    ("compare_gradients", {"loss_scales": [1e39]}, f"loss_scales=...)` {NUMBERS} [1e+39]"),
    *(
        (
            report,
            {"argnums": 1, "fun": lambda w, x: jnp.sum(w["kernel"])},
            "argnums=1)` selects no floating-point or complex argument",
        )
        for report in ("compare_gradients", "find_precision")
    ),
    *((report, {"argnums": ()}, "argnums=())` selects no floating-point or complex argument") for report in REPORTS),
    ("find_precision", {"dtype": jnp.float32}, "dtype=...)` must be float16 or bfloat16, got float32"),
    ("find_precision", {"tolerance": "small"}, "tolerance=...)` must be a number between 0 and 1, got 'small'"),
    ("find_precision", {"batches": [X[:3]]}, "batches=...)` must be a sequence of values with the structure"),
    ("find_precision", {"batches": []}, "batches=...)` must be a sequence of values with the structure"),
    ("range_report", {"dtype": jnp.int32}, f"dtype=...)` {FLOATING}"),
    ("range_report", {"loss_scale": 0.0}, "loss_scale=...)` must be one positive finite number, got 0.0"),
    ("range_report", {"loss_scale": BATCH}, "loss_scale=...)` must be one positive finite number, got Array([1."),
]


@pytest.mark.parametrize(("report", "options", "words"), REFUSED)
def test_invalid_arguments_raise_an_error(report, options, words):
    fun, batch = options.get("fun", loss_fn), {} if "fun" in options else X
    options = {name: value for name, value in options.items() if name != "fun"}
    with pytest.raises(ValueError, match=re.escape(f"`{report}({words}")):
        REPORTS[report](fun, PARAMS, batch, **options)


@pytest.mark.parametrize("report", REPORTS)
def test_option_with_the_name_of_a_parameter_raises_an_error(report):
    for option in inspect.signature(REPORTS[report]).parameters.values():
        if option.kind is option.KEYWORD_ONLY:
            fun = eval(f"lambda params, batch, {option.name}=0: loss_fn(params, batch)")
            for function in (fun, functools.partial(fun, **{option.name: 0})):
                with pytest.raises(ValueError, match=rf"`{report}\({option.name}=.* `lambda \*args: fun\(\*args, "):
                    REPORTS[report](function, PARAMS, X, **{option.name: option.default})


@pytest.mark.parametrize("report", REPORTS)
def test_parameter_that_is_set_by_position_can_have_the_name_of_an_option(report):
    def fun(params, batch, dtype):
        return loss_fn(params, batch) if dtype == 2 else jnp.nan

    found = REPORTS[report](fun, PARAMS, X, 2, dtype=jnp.float16)
    assert str(found) == str(REPORTS[report](loss_fn, PARAMS, X))


@pytest.mark.parametrize("report", sorted({*REPORTS} - {"autocast_report"}))
def test_report_inside_jit_raises_an_error(report):
    with pytest.raises(ValueError, match=rf"`{report}.*outside of `jax\.jit`"):
        jax.jit(lambda params: REPORTS[report](loss_fn, params, X) and params)(PARAMS)
