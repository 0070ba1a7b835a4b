"""`explain` describes the state of a run in plain sentences."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from any_jax import enable_x64
from kinds import with_rule_state
from samples import GOOD, INF, NAN, PARAMS, recorded
from sentences import statements_of

import jax_lossscale as jls
from jax_lossscale.diagnostics import Explanation, explain, nonfinite_report

pytestmark = pytest.mark.ci

NAN_GRADS, INF_GRADS, NAN_LOSS = ([1.0, NAN], 1.0, False), ([INF, 1.0], 1.0, False), ([1.0, 1.0], NAN, False)
NO_GRADS = ([0.0, 0.0], 1.0, False)
CONDITION = ([1.0, 1.0], 1.0, True)
HIGH_FLOOR = jls.DynamicLossScale(2.0**10, min_loss_scale=2.0**10)
BELOW_ONE = jls.DynamicLossScale(2.0**-4, min_loss_scale=2.0**-10)
SKIPPING, SHORT = jls.FixedLossScale(8.0, skip_nonfinite=True), jls.DynamicLossScale(2.0**15, 9)
LARGE_GRADS, HUGE_GRADS, BOTH = ([4096.0, -8192.0], 1.0, False), ([1.0, 1e38], 1.0, False), ([INF, NAN], 1.0, False)
LOW = jls.AutoLossScale(2.0)
GIVEN_UP = with_rule_state(
    jls.AutoLossScale(), log2_peak=np.float32(0), log2_margin=np.float32(1), log2_allowance=np.float32(-6)
)
NAN_AT, INF_AT = (f"there was {what} in the gradients, first in ['kernel']" for what in ("a NaN", "an infinity"))
TENTH = [INF_GRADS, *[GOOD] * 9] * 10


def every_fifth(step):
    return [step, *[GOOD] * 4] * 20


AT_FLOOR = "skipped in a row | not recorded | no lower | other | a lower floor | shared"
NANS, HIGH, TWO = every_fifth(NAN_GRADS), jls.DynamicLossScale(2.0**30), jls.DynamicLossScale(2.0)
EXPLAINED = {
    # Each entry contains the loss scale, whether bad steps are recorded, the steps, the names of the printed lines, and
    # the attribute `cause`.
    "a healthy run": ("dynamic", True, [GOOD] * 3, "question", None),
    "before the first step": ("auto", True, [], "", None),
    "no loss scale": (None, False, [GOOD], "", None),
    "a condition without a loss scale": (None, False, [CONDITION, GOOD], "", "skip_if"),
    "measured": (jls.AutoLossScale(64.0), False, [LARGE_GRADS], "largest", None),
    "measured, and all zero": ("auto", True, [GOOD, NO_GRADS], "all zero", "zero_gradients"),
    "all zero, not measured": ("dynamic", True, [NO_GRADS], "question", None),
    "all zero after an overflow": ("auto", True, [INF_GRADS, NO_GRADS], "bad step ago | all zero", "zero_gradients"),
    "measured, and not finite": ("auto", True, [GOOD, INF_GRADS], "skipped | an overflow", "infinity"),
    "a scale that is too low": (LOW, False, [GOOD], "largest | room", None),
    "never scaled": (jls.AutoLossScale(2.0**60), True, [GOOD] * 20, "largest | not scaled", "unscaled"),
    "never scaled, at first": (jls.AutoLossScale(2.0**60), False, [GOOD] * 19, "largest | room | question", None),
    "a fixed scale": (2.0**60, False, [GOOD], "question", None),
    "a fixed scale of 1": (1.0, False, [GOOD], "", None),
    "a fixed scale is always at its floor": (SKIPPING, False, [NAN_GRADS, GOOD], "", None),
    "not lowered to its floor": (jls.DynamicLossScale(1.0), False, [CONDITION, GOOD], "", None),
    "long ago": ("dynamic", True, [NAN_GRADS, GOOD, GOOD], "bad step ago | unknown", "nan"),
    "an infinity long ago": ("dynamic", True, [INF_GRADS, GOOD, GOOD], "bad step ago | scale is lower", "infinity"),
    "long ago, not recorded": ("dynamic", False, [NAN_GRADS, GOOD], "", None),
    "a NaN that no lower scale can fix": (SKIPPING, True, [NAN_GRADS, GOOD], "bad step ago | perhaps the batch", "nan"),
    "unscaling overflows": (BELOW_ONE, True, [HUGE_GRADS, GOOD], "bad step ago | scale is lower", "infinity"),
    "an infinity in one leaf, a NaN in the next": ("dynamic", True, [BOTH], "skipped | an overflow", "infinity"),
    "a NaN at every scale": (HIGH, True, [NAN_GRADS] * 17, "skipped in a row | other | shared", "nan"),
    "a NaN at every scale, not recorded": (TWO, False, [NAN_GRADS] * 16, AT_FLOOR, "gradients"),
    "started too high": (HIGH, True, [INF_GRADS] * 16, "skipped in a row | shared", "infinity"),
    "at the floor": ("dynamic", True, [INF_GRADS] * 15, "skipped in a row | no lower | a lower floor", "infinity"),
    "one step above the floor": ("dynamic", True, [INF_GRADS] * 14, "skipped in a row | an overflow", "infinity"),
    "not yet too high": (HIGH, True, [INF_GRADS] * 15, "skipped in a row | an overflow", "infinity"),
    "at a floor that is high": (HIGH_FLOOR, True, [INF_GRADS], "skipped | no lower | a lower floor", "infinity"),
    "often": (SHORT, True, TENTH, "bad step ago | often | rarer", "infinity"),
    "often, not recorded": (SHORT, False, TENTH, "often | not recorded | rarer", "many_skips"),
    "often, after the automatic scale has given up": (
        GIVEN_UP,
        False,
        [NAN_GRADS, *[GOOD] * 19] * 20,
        "often | not the scale | log the batches | largest | room",
        "many_skips",
    ),
    "often, under a fixed scale": (8.0, False, every_fifth(CONDITION), "often | loss or skip_if | loss", "many_skips"),
    "often on condition": ("dynamic", True, every_fifth(CONDITION), "bad step ago | often | skip_if", "skip_if"),
    "a loss": ("dynamic", True, every_fifth(NAN_LOSS), "bad step ago | one loss | often | loss", "loss"),
    "often, a NaN at the floor": (TWO, True, NANS, "bad step ago | perhaps the batch | at the floor | often", "nan"),
    "often, a NaN at the floor, not recorded": (
        TWO,
        False,
        NANS,
        "at the floor | not recorded | often | rarer | log the batches",
        "lower_bound",
    ),
}


@pytest.mark.parametrize(("loss_scale", "record", "steps", "expected", "cause"), EXPLAINED.values(), ids=EXPLAINED)
def test_lines_and_cause(loss_scale, record, steps, expected, cause):
    state = recorded(jls.loss_scaled(optax.sgd(0.1), loss_scale, record_bad_steps=record), PARAMS, steps)
    text = explain(state, PARAMS)
    assert (statements_of(text), text.cause) == (expected, cause)
    assert explain(state, {"bias": jnp.float32(NAN), "kernel": jnp.float32(1.0)}).cause == "params"
    assert cause is None or f'``"{cause}"``' in explain.__doc__


@pytest.mark.parametrize(
    ("loss_scale", "last_bad", "skipped", "steps", "recommends"),
    [
        ("auto", None, 5, 2000, True),
        ("auto", None, 5, 2500, False),
        ("auto", None, 4, 1000, False),
        ("auto", INF_GRADS, 5, 2000, True),
        ("auto", CONDITION, 5, 2000, False),
        ("auto", NAN_LOSS, 5, 2000, False),
        (jls.FixedLossScale(8.0, skip_nonfinite=True), NAN_GRADS, 5, 2000, False),  # This batch is already examined.
        ("dynamic", None, 5, 1900, True),
        ("dynamic", None, 5, 2100, False),  # The growth of the scale costs 1 step in 2,000.
        ("dynamic", INF_GRADS, 5, 1900, False),  # One of the steps lowered the initial scale.
        ("dynamic", INF_GRADS, 6, 1900, True),
        (8.0, None, 50, 2000, False),
    ],
)
def test_logging_batches_is_suggested_after_many_skipped_steps(loss_scale, last_bad, skipped, steps, recommends):
    tx = jls.loss_scaled(optax.sgd(0.1), loss_scale, record_bad_steps=last_bad is not None)
    state = recorded(tx, PARAMS, ([last_bad] if last_bad else []) + [GOOD] * 20)
    state = state._replace(applied_steps=jnp.int32(steps - skipped), skipped_steps=jnp.int32(skipped))
    assert ("log the batches" in statements_of(explain(state))) == recommends
    if recommends:
        assert f"{100 * skipped / steps:.2g}% of all steps were skipped." in str(explain(state))


@pytest.mark.parametrize(
    ("loss_scale", "steps", "sentence"),
    [
        (10.0, [GOOD], "The loss scale is 10 (FixedLossScale)."),
        (10.0, [GOOD], "Of 1 step, 1 was applied and 0 were skipped."),
        (None, [GOOD], "There is no loss scale, and the gradients are not checked (NoOpLossScale)."),
        (jls.AutoLossScale(64.0), [LARGE_GRADS], "The largest gradient of the last step was 128."),
        (
            LOW,
            [GOOD],
            "The largest gradient would not overflow in float16 even if the loss scale were 2^8 times larger.",
        ),
        ("dynamic", [NAN_GRADS, GOOD, GOOD], "The loss scale is 2^14 = 16384 (DynamicLossScale)."),
        ("dynamic", [NAN_GRADS, *[GOOD] * 2], f"The last non-finite or skipped step was 2 steps ago: {NAN_AT}."),
        (BELOW_ONE, [HUGE_GRADS, GOOD], f"The last non-finite or skipped step was 1 step ago: {INF_AT}."),
        (jls.DynamicLossScale(1.0), every_fifth(NAN_GRADS), "20% of all steps were skipped."),
        ("dynamic", [([1.0, INF], 1.0, False)] * 2, f"The last 2 steps were skipped, the last one because {INF_AT}."),
    ],
)
def test_numbers_in_the_lines(loss_scale, steps, sentence):
    state = recorded(jls.loss_scaled(optax.sgd(0.1), loss_scale, record_bad_steps=True), PARAMS, steps)
    assert sentence in explain(state, PARAMS).sentences


# All kinds of loss scales, with and without a record, after one step with each cause.

KINDS = {
    "dynamic": "dynamic",
    "floor": jls.DynamicLossScale(1.0),
    "skipping": jls.FixedLossScale(8.0, skip_nonfinite=True),
    "fixed": 8.0,
    "none": None,
}
CAUSES = {
    "NaN": {"kernel": NAN},
    "inf": {"kernel": INF},
    "loss": {"value": NAN},
    "loss and NaN": {"value": NAN, "kernel": NAN},
    "condition": {"skip_if": True},
    "condition and NaN": {"skip_if": True, "kernel": NAN},
}
UNKNOWN = "there was a NaN or an infinity in its gradients, or `grads_finite` was false"
EXPECTED = {
    # Each entry contains the printed lines, the reason for the non-finite or skipped step, and the attribute `cause`.
    "a NaN": ("skipped | perhaps an overflow", NAN_AT, "nan"),
    "a NaN, at the floor": ("skipped | no lower | other", NAN_AT, "nan"),
    "a NaN, fixed": ("skipped | other", NAN_AT, "nan"),
    "an infinity": ("skipped | an overflow", INF_AT, "infinity"),
    "an infinity, at the floor": ("skipped | no lower | a lower floor", INF_AT, "infinity"),
    "an infinity, fixed": ("skipped | a fixed scale", INF_AT, "infinity"),
    "the loss": ("skipped | loss", "its loss was not finite", "loss"),
    "the condition": ("skipped | skip_if", "`skip_if` was true", "skip_if"),
    "perhaps": ("skipped | not recorded | perhaps an overflow", UNKNOWN, "gradients"),
    "perhaps, at the floor": ("skipped | not recorded | no lower | other | a lower floor", UNKNOWN, "gradients"),
    "perhaps, fixed": ("skipped | not recorded | other", UNKNOWN, "gradients"),
    "applied": ("applied | parameters | not skipped", NAN_AT, "params"),
    "applied, an infinity": ("applied | parameters | not skipped", INF_AT, "params"),
    "perhaps applied": ("applied | parameters | not skipped", UNKNOWN, "params"),
    "the parameters": ("parameters | not skipped", None, "params"),
    "nothing": ("", None, None),
}
RECORDED = """
                  | dynamic       | floor                     | skipping            | fixed                | none
NaN               | a NaN         | a NaN, at the floor       | a NaN, fixed        | applied              | the parameters
inf               | an infinity   | an infinity, at the floor | an infinity, fixed  | applied, an infinity | the parameters
loss              | the loss      | the loss                  | the loss            | the loss             | nothing
loss and NaN      | the loss      | the loss                  | the loss            | the loss             | the parameters
condition         | the condition | the condition             | the condition       | the condition        | the condition
condition and NaN | a NaN         | a NaN, at the floor       | a NaN, fixed        | the condition        | the condition
"""  # noqa: E501
UNRECORDED = """
                    | dynamic           | floor                 | skipping              | fixed             | none
NaN                 | perhaps           | perhaps, at the floor | perhaps, fixed        | perhaps applied   | the parameters
inf                 | perhaps           | perhaps, at the floor | perhaps, fixed        | perhaps applied   | the parameters
loss                | the loss          | the loss              | the loss              | the loss          | nothing
loss and NaN        | the loss          | the loss              | the loss              | the loss          | the parameters
condition           | the condition     | the condition         | the condition         | the condition     | the condition
condition and NaN   | perhaps           | perhaps, at the floor | perhaps, fixed        | the condition     | the condition
"""  # noqa: E501


def cells(table):
    (_, *kinds), *rows = ([cell.strip() for cell in line.split("|")] for line in table.strip("\n").splitlines())
    return [(kind, cause, cell) for cause, *row in rows for kind, cell in zip(kinds, row, strict=True)]


def after(tx, kernel=1.0, value=1.0, skip_if=False):
    """Return the parameters and the state after one step."""
    grads = {"bias": jnp.float32(1.0), "kernel": jnp.float32(kernel)}
    expected = {"value": jnp.float32(value), "skip_if": jnp.array(skip_if)}
    return tx.update_and_apply(grads, tx.init(PARAMS), PARAMS, **expected)


@pytest.mark.parametrize(("table", "record"), [(RECORDED, True), (UNRECORDED, False)], ids=["recorded", "unrecorded"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_cause_is_explained(kind, table, record):
    tx = jls.loss_scaled(optax.sgd(0.1), KINDS[kind], record_bad_steps=record)
    causes = {cause: cell for column, cause, cell in cells(table) if column == kind}
    assert causes.keys() == CAUSES.keys()
    for cause, cell in causes.items():
        params, state = after(tx, **CAUSES[cause])
        expected, why, name = EXPECTED[cell]
        text = explain(state, params)
        assert (statements_of(text), text.cause) == (expected, name), cause
        of_step = f"The last step was skipped because {why}.", f"The last step was applied although {why}."
        assert why is None or text.sentences[2] in of_step, cause


def test_replaced_loss_scale_is_not_assumed_to_measure():
    tx = jls.loss_scaled(optax.sgd(0.1), "auto")
    state = recorded(tx, PARAMS, [GOOD])._replace(loss_scale=jls.DynamicLossScale())
    _, state = tx.update_and_apply(PARAMS, state, PARAMS)
    assert not [word for word in ("largest", "zero") if word in str(explain(state))]


def test_wrong_grads_finite_is_reported_instead_of_zero_gradients():
    tx = jls.loss_scaled(optax.sgd(0.1), "auto")
    _, state = tx.update_and_apply({**PARAMS, "kernel": jnp.float32(NAN)}, tx.init(PARAMS), PARAMS, grads_finite=True)
    assert (statements_of(explain(state)), explain(state).cause) == ("not measured", "not_measured")
    assert "`grads_finite=True` to `update`, that value was incorrect" in str(explain(state))


def test_compare_gradients_is_not_suggested_for_non_finite_parameters():
    tx = jls.loss_scaled(optax.sgd(0.1), "auto")
    lost = {"bias": jnp.float32(1.0), "kernel": jnp.float32(NAN)}
    assert "compare_gradients" not in str(explain(recorded(tx, PARAMS, [GOOD]), lost))


def test_parameters_are_assumed_lost_if_they_are_not_passed():
    for record in True, False:
        _, state = after(jls.loss_scaled(optax.sgd(0.1), 8.0, record_bad_steps=record), kernel=NAN)
        assert "\nThe parameters are probably no longer finite." in str(explain(state))
        assert "\nThe parameters are probably no longer finite." in str(explain(state, jax.eval_shape(lambda: PARAMS)))


def test_non_finite_parameters_are_the_only_explanation():
    """The parameters cause the non-finite loss, so the text does not blame the forward pass."""
    tx = jls.loss_scaled(optax.sgd(0.1), record_bad_steps=True)
    _, state = after(tx, kernel=NAN, value=NAN)
    text = str(explain(state, {"bias": jnp.float32(1.0), "kernel": jnp.float32(NAN)}))
    assert statements_of(text) == "skipped | parameters | initial"
    assert "Some parameters in ['kernel'] are not finite, so the loss cannot be finite either." in text
    assert "Some parameters in the only leaf are not finite" in str(explain(tx.init(PARAMS), jnp.array([NAN])))
    for other in 0.1, NAN, jax.ShapeDtypeStruct((), jnp.float32), jax.device_put(1.0, jax.devices()[1]):
        params = {"a": other, "b": jax.device_put(NAN, jax.devices()[0]), "c": jnp.float32(1)}
        assert "Some parameters in ['b'] are not finite" in str(explain(state, params))


def test_large_parameter_is_reported_if_steps_are_skipped():
    _, state = after(jls.loss_scaled(optax.sgd(0.1), record_bad_steps=True), kernel=INF)
    text = str(explain(state, {"bias": jnp.float32(1.0), "kernel": jnp.float32(300.0)}))
    assert statements_of(text).endswith(" | large")
    assert "\nThe largest parameter is 3e+02, in ['kernel'], and" in text
    with enable_x64(True):
        params = {"bias": jnp.array(1e200), "kernel": jnp.ones(())}
        assert "The largest parameter is 1e+200" in str(explain(state, params))


def test_harmless_applied_step_is_reported():
    _, state = after(jls.loss_scaled(optax.sgd(0.1), 8.0), kernel=NAN)
    assert statements_of(explain(state, PARAMS)) == "applied | finite"
    assert explain(state, PARAMS).cause == "gradients"


def test_record_of_an_earlier_step_is_not_used_for_the_last_step():
    tx = jls.loss_scaled(optax.sgd(0.1), record_bad_steps=True)
    _, state = after(tx, kernel=NAN)
    monitoring = state.monitoring
    silent = jls.loss_scaled(optax.sgd(0.1))
    state = state._replace(monitoring=monitoring._replace(last_bad_step=None))
    _, state = silent.update_and_apply(PARAMS, state, PARAMS, skip_if=jnp.array(True))
    assert explain(state._replace(monitoring=monitoring), PARAMS).cause == "skip_if"


def after_one_bad_step(grads):
    tx = jls.loss_scaled(optax.sgd(0.1), record_bad_steps=True)
    params = jax.tree.map(jnp.ones_like, grads)
    return tx.update_and_apply(grads, tx.init(params), params)[1]


def test_frozen_parameter_does_not_change_the_path_of_a_leaf():
    state = after_one_bad_step({"a": None, "b": jnp.array([NAN])})
    assert "first in ['b']" in str(explain(state, {"a": jnp.ones(3), "b": jnp.ones(1)}))


def test_only_leaf_is_reported_without_a_path():
    assert "first in the only leaf." in str(explain(after_one_bad_step(jnp.array([NAN])), jnp.ones(1)))
    assert str(nonfinite_report(jnp.ones(1))).endswith("is in the only leaf.")


def test_tree_with_a_different_structure_raises_an_error():
    with pytest.raises(ValueError, match=r"a tree of 1 leaves\. The state records a non-finite gradient of leaf 1\."):
        explain(after_one_bad_step({"a": jnp.ones(1), "b": jnp.array([NAN])}), {"a": 1})


def test_batch_of_runs_raises_an_error():
    with pytest.raises(ValueError, match="batch of runs"):
        explain(jax.vmap(jls.loss_scaled(optax.sgd(0.1)).init)(jnp.ones(2)))


def test_traced_state_raises_an_error():
    state = jls.loss_scaled(optax.sgd(0.1)).init(PARAMS)
    with pytest.raises(ValueError, match="traced values"):
        jax.jit(lambda state: explain(state) and state)(state)


@pytest.mark.parametrize("loss_scale", ["auto", "dynamic", jls.DynamicLossScale(1.0)])
def test_grads_finite_argument_is_reported_as_the_cause(loss_scale):
    tx = jls.loss_scaled(optax.sgd(0.1), loss_scale, record_bad_steps=True)
    params = jnp.ones(3)
    _, state = tx.update_and_apply(jnp.ones(3), tx.init(params), params, grads_finite=False)
    assert state.skipped_steps == 1
    assert "`grads_finite` was false, although all gradients were finite" in str(explain(state, params))
    assert (statements_of(explain(state)), explain(state).cause) == ("skipped | grads_finite", "grads_finite")
    _, state = tx.update_and_apply(jnp.ones(3), state, params)
    assert "bad step ago | grads_finite" in statements_of(explain(state))


# Whether the cause of an earlier NaN was the batch.


def with_grads(state, *steps):
    """Return the state after steps whose gradients are all equal to the given numbers."""
    tx = jls.loss_scaled(optax.sgd(0.0), record_bad_steps=True)
    step = jax.jit(lambda state, grad: tx.update({"w": jnp.full(3, grad)}, state, {"w": jnp.ones(3)})[1])
    for grad in steps:
        state = step(state, jnp.float32(grad) * state.loss_scale())
    return state


def new_state(loss_scale):
    return jls.loss_scaled(optax.sgd(0.0), loss_scale, record_bad_steps=True).init({"w": jnp.ones(3)})


def conclusion(state):
    (statement,) = {"the batch", "perhaps the batch", "unknown"} & set(statements_of(explain(state)).split(" | "))
    return statement


def test_the_batch_was_the_cause_only_if_a_later_step_had_the_same_scale_and_gradients():
    state = with_grads(new_state("auto"), *[1.9] * 20, NAN)
    assert conclusion(with_grads(state, *[1.9] * 700)) == "unknown"  # The scale is still lower by 1 bit.
    assert conclusion(with_grads(state, *[1.9] * 800)) == "the batch"
    smaller = with_grads(state, *[0.1] * 800)
    assert smaller.loss_scale() > smaller.monitoring.last_bad_step.loss_scale
    assert conclusion(smaller) == "unknown"
    # In the last step, the gradients are large enough, and then they become smaller again.
    assert conclusion(with_grads(smaller, 1.9)) == "the batch"
    assert conclusion(with_grads(smaller, 1.9, 0.1)) == "the batch"


def test_finite_gradients_of_the_bad_step_and_of_the_step_before_are_compared():
    tx = jls.loss_scaled(optax.sgd(0.0), record_bad_steps=True)
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    state = tx.init(params)._replace(loss_scale=jls.AutoLossScale(2.0**10))
    for a, b, largest in (1.0, 2.0, 0), (NAN, 4.0, 4), (NAN, 1.0, 4), (NAN, INF, 4), (0.5, 0.5, 4), (NAN, NAN, 0.5):
        grads = {"a": jnp.array([0.25, a]), "b": jnp.array([-b, 0.5 * b])}
        _, state = tx.update(state.loss_scale.scale(grads), state, params)
        assert state.monitoring.last_bad_step.largest == largest


def test_first_step_without_finite_gradients_cannot_be_compared():
    state = with_grads(new_state("auto"), NAN, *[1.0] * 20)
    assert state.monitoring.last_bad_step.largest == 0
    assert conclusion(state) == "perhaps the batch"


def test_step_must_have_used_the_scale_of_the_bad_step():
    state = with_grads(new_state(jls.DynamicLossScale(2.0**15, 10)), NAN, *[1.0] * 10)
    assert state.loss_scale() == state.monitoring.last_bad_step.loss_scale  # No step has used this scale.
    assert conclusion(state) == "unknown"
    assert conclusion(with_grads(state, 1.0)) == "perhaps the batch"


@pytest.mark.parametrize("kind", [jls.DynamicLossScale, jls.AutoLossScale])
def test_replaced_loss_scale_does_not_change_the_conclusion(kind):
    state = with_grads(new_state(kind(2.0**4)), 1.0, NAN, 1.0)
    replaced = state._replace(loss_scale=kind(2.0**10))
    assert conclusion(state) == conclusion(replaced) == "unknown"
    assert "the batch" in conclusion(with_grads(replaced, 1.0))


def test_largest_gradient_is_not_compared_if_the_new_loss_scale_does_not_measure_it():
    state = with_grads(new_state("auto"), 1.0, NAN)._replace(loss_scale=jls.DynamicLossScale())
    assert conclusion(with_grads(state, 1.0)) == "unknown"


def test_text_consists_of_the_sentences():
    state = recorded(jls.loss_scaled(optax.sgd(0.1)), PARAMS, [GOOD])
    explanation = explain(state)
    assert isinstance(explanation, Explanation)
    assert str(explanation) == repr(explanation) == "\n".join(explanation.sentences)
    assert explanation.sentences[0] == "The loss scale is 2^15 = 32768 (AutoLossScale)."
    assert explanation == explain(state)
    assert "32768" in explanation._repr_html_()


@pytest.mark.parametrize("operation", [iter, len, list, lambda e: "32768" in e, lambda e: e[0]])
def test_explanation_is_not_a_sequence(operation):
    with pytest.raises(TypeError, match="Explanation"):
        operation(explain(recorded(jls.loss_scaled(optax.sgd(0.1)), PARAMS, [GOOD])))


@pytest.mark.parametrize(
    ("inner", "params", "where"),
    [
        (optax.adam(0.1), PARAMS, "['kernel']"),
        (optax.chain(optax.clip(1.0), optax.sgd(0.1, momentum=0.9)), PARAMS, "['kernel']"),
        (optax.adam(0.1), {"kernel": jnp.float32(1.0)}, "['kernel']"),
        (optax.sgd(0.1), PARAMS, "leaf 1"),  # SGD has no moments.
        (optax.adam(0.1), jnp.float32(1.0), "the only leaf"),
        (optax.sgd(0.1), jnp.float32(1.0), "leaf 0"),
        (optax.adam(0.1), (PARAMS, {"kernel": 2 * jnp.ones(3)}), "[0]['kernel']"),
        # No part of the optimizer state has the structure of the parameters.
        (optax.masked(optax.adam(0.1), {"bias": False, "kernel": True}), PARAMS, "leaf 1"),
        (getattr(optax.contrib, "muon", optax.sgd)(0.1), {"bias": jnp.ones(2), "kernel": jnp.ones((2, 2))}, "leaf 1"),
        (
            optax.transforms.partition({"t": optax.adam(0.1), "f": optax.set_to_zero()}, {"bias": "f", "kernel": "t"}),
            PARAMS,
            "leaf 1",
        ),
        (optax.inject_hyperparams(optax.sgd)(0.1), {"kernel": jnp.float32(1.0)}, "leaf 0"),
    ],
)
def test_moments_of_the_optimizer_give_the_path_without_parameters(inner, params, where):
    tx = jls.loss_scaled(inner, record_bad_steps=True)
    grads = jax.tree.map_with_path(lambda path, leaf: leaf * (NAN if "bias" not in str(path) else 1), params)
    _, state = tx.update(grads, tx.init(params), params)
    assert f"there was a NaN in the gradients, first in {where}." in str(explain(state))
