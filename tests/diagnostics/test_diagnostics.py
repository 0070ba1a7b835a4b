"""What the gradients do: reports of what is not finite, histograms of the range, explanations, simulations."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_lossscale as jls
from jax_lossscale.diagnostics import (
    explain,
    exponent_histogram,
    first_nonfinite,
    leaf_path,
    nonfinite_report,
    simulate,
    suggest_loss_scale,
    underflow_fraction,
)

NAN, INF = np.nan, np.inf
FLOATS = ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"]


@pytest.fixture(params=[False, True], ids=["32 bits", "64 bits"])
def x64(request):
    with jax.enable_x64(request.param):
        yield request.param


def random_bits(dtype, number=4096, seed=0):
    """Numbers of every kind that the dtype has: random bits, and the ends of its range."""
    dtype = np.dtype(dtype)
    info = ml_dtypes.finfo(dtype)
    bits = np.random.default_rng(seed).integers(0, 256, number * dtype.itemsize, dtype=np.uint8)
    ends = np.array([0.0, info.smallest_subnormal, info.smallest_normal, info.max, NAN], np.float64).astype(dtype)
    values = np.concatenate([bits.view(dtype), ends, -ends])
    with np.errstate(invalid="ignore"):
        values[np.isnan(values)] = NAN  # a quiet one: numpy warns of others
    return values


# What is not finite.

GRADS = {
    "block1": {"bias": [0.0, 1.0], "kernel": [[1.0, -2.0], [3.0, 4.0]]},
    "block3": {"kernel": [[1.0, 7.0, -INF], [INF, NAN, INF]]},
    "head": [NAN, NAN],
    "steps": 3,
}


def as_arrays(tree):
    return jax.tree.map(jnp.asarray, tree, is_leaf=lambda node: isinstance(node, list))


def test_the_report_tells_each_leaf_the_worst_first():
    report = nonfinite_report(as_arrays(GRADS))
    assert [(leaf.path, leaf.nan, leaf.posinf, leaf.neginf, leaf.largest_finite) for leaf in report] == [
        ("['head']", 2, 0, 0, None),
        ("['block3']['kernel']", 1, 2, 1, 7.0),
        ("['block1']['kernel']", 0, 0, 0, 4.0),
        ("['block1']['bias']", 0, 0, 0, 1.0),
    ]
    assert [leaf.first_bad_index for leaf in report] == [(0,), (0, 2), None, None]
    assert [leaf.share for leaf in report] == [1.0, 4 / 6, 0.0, 0.0]
    assert (report[1].shape, report[1].dtype, report[1].nonfinite) == ((2, 3), "float32", 4)
    assert report.bad == report[:2]
    assert len(report) == 4


def test_the_report_prints_as_a_table_of_the_bad_leaves():
    text = str(nonfinite_report(as_arrays(GRADS)))
    title, headings, *rows = text.splitlines()
    assert title == "2 of 4 leaves are not finite."
    assert headings.split() == "leaf dtype shape NaN +inf -inf share largest finite first at".split()
    assert [row.split()[0] for row in rows] == ["['head']", "['block3']['kernel']"]
    assert rows[1].split()[-7:] == ["1", "2", "1", "66.67%", "7", "[0,", "2]"]
    assert rows[0].index("float32") == rows[1].index("float32") == headings.index("dtype")


def test_in_a_notebook_the_report_is_a_table_whose_paths_are_escaped():
    html = nonfinite_report({"<script>": jnp.array([NAN]), "fine": jnp.ones(1)})._repr_html_()
    assert html.count("<tr>") == 2
    assert "&lt;script&gt;" in html
    assert "<script>" not in html
    assert "<table>" not in nonfinite_report({"fine": jnp.ones(1)})._repr_html_()


NOTHING_BAD = {
    "all finite": ({"a": [1.0, -8.0], "b": [3.0]}, "All 2 leaves are finite; the largest magnitude, 8, is in ['a']."),
    "empty leaves": ({"a": []}, "All 1 leaves are finite."),
    "no leaves": ({"a": 3}, "There are no inexact leaves."),
}


@pytest.mark.parametrize(("tree", "summary"), NOTHING_BAD.values(), ids=NOTHING_BAD)
def test_where_nothing_is_bad_the_report_says_so(tree, summary):
    assert str(nonfinite_report(as_arrays(tree))) == summary


def test_a_complex_number_counts_once_for_its_worst_part():
    values = np.array([complex(NAN, INF), complex(INF, -INF), complex(1, -INF), complex(3, -5)], np.complex64)
    (leaf,) = nonfinite_report(jnp.asarray(values))
    assert (leaf.nan, leaf.posinf, leaf.neginf, leaf.largest_finite) == (1, 1, 1, 5.0)


def test_the_report_is_for_the_host():
    with pytest.raises(ValueError, match="first_nonfinite"):
        jax.jit(nonfinite_report)(jnp.ones(2))


@settings(deadline=None, max_examples=40)
@given(
    npst.arrays(
        np.float32,
        npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
        elements=st.sampled_from([0.0, -1.5, 3e38, NAN, INF, -INF]),
    )
)
def test_the_report_agrees_with_numpy(values):
    (leaf,) = nonfinite_report([jnp.asarray(values)])
    bad = ~np.isfinite(values)
    assert (leaf.nan, leaf.posinf, leaf.neginf) == tuple(
        int(question(values).sum()) for question in (np.isnan, np.isposinf, np.isneginf)
    )
    finite = np.abs(values[~bad])
    assert leaf.largest_finite == (float(finite.max()) if finite.size else None)
    assert leaf.first_bad_index == (tuple(map(int, np.argwhere(bad)[0])) if bad.any() else None)


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_dtype_is_reported(x64, dtype):
    values = random_bits(dtype)
    with np.errstate(over="ignore"):
        wide = values.astype(np.float64 if x64 else np.float32)
        (leaf,) = nonfinite_report([jnp.asarray(values)])
    assert leaf.nan == np.isnan(wide).sum()
    assert leaf.posinf == np.isposinf(wide).sum()
    if x64 or dtype != "float64":
        assert leaf.largest_finite == np.abs(wide[np.isfinite(wide)]).max()


# The first bad leaf, inside jit.

FIRST = {
    "finite": ({"a": [1.0], "b": [2.0]}, -1, None),
    "the second": ({"a": [1.0], "b": [2.0, INF], "c": [NAN]}, 1, "['b']"),
    "integers are counted, not looked at": ({"a": 3, "b": [NAN]}, 1, "['b']"),
    "None is counted too": ({"a": None, "b": [NAN]}, 1, "['b']"),
    "nothing to look at": ({"a": 3}, -1, None),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(("tree", "index", "path"), FIRST.values(), ids=FIRST)
def test_the_first_bad_leaf_and_its_path(tree, index, path, compiled):
    tree = as_arrays(tree)
    found = (jax.jit(first_nonfinite) if compiled else first_nonfinite)(tree)
    assert (found, found.dtype, found.shape) == (index, jnp.int32, ())
    assert leaf_path(tree, found) == path


@pytest.mark.parametrize("index", [-2, 2])
def test_a_path_is_not_made_up(index):
    with pytest.raises(ValueError, match="structure of the gradients"):
        leaf_path({"a": 1, "b": 2}, index)


def test_under_shard_map_the_first_bad_leaf_of_any_device_is_agreed():
    mesh = jax.make_mesh((8,), ("shard",), axis_types=(AxisType.Auto,))
    values = np.ones((2, 8), np.float32)
    values[1, 3] = NAN
    find = jax.shard_map(
        lambda a, b: first_nonfinite([a, b], axis_name="shard"), mesh=mesh, in_specs=P("shard"), out_specs=P()
    )
    assert jax.jit(find)(*values) == 1


# Recorded in the state of the optimizer.

RECORDED = {
    # gradients, loss, skip_if: leaf, has_nan, value_finite
    "infinity": ([1.0, INF], 1.0, False, 1, False, True),
    "NaN": ([NAN, INF], 1.0, False, 0, True, True),
    "loss": ([1.0, 1.0], INF, False, -1, False, False),
    "loss and gradients": ([1.0, NAN], NAN, False, 1, True, False),
    "condition": ([1.0, 1.0], 1.0, True, -1, False, True),
}


def recorded(tx, params, steps):
    """The state after steps of (gradients, loss, skip_if)."""
    state = tx.init(params)
    step = jax.jit(lambda g, s, p, v, c: tx.update_and_apply(g, s, p, value=v, skip_if=c))
    for grads, value, skip_if in steps:
        grads = dict(zip(params, map(jnp.float32, grads), strict=True))
        params, state = step(grads, state, params, value, skip_if)
    return state


PARAMS = {"bias": jnp.float32(1.0), "kernel": jnp.float32(1.0)}
GOOD = ([1.0, 1.0], 1.0, False)


@pytest.mark.parametrize("skip", ["auto", "cond", "select"])
@pytest.mark.parametrize(
    ("grads", "value", "skip_if", "leaf", "has_nan", "value_finite"), RECORDED.values(), ids=RECORDED
)
def test_the_state_keeps_the_last_bad_step(grads, value, skip_if, leaf, has_nan, value_finite, skip):
    tx = jls.loss_scaled(optax.sgd(0.1), skip=skip, record_bad_steps=True)
    state = recorded(tx, PARAMS, [GOOD, (grads, value, skip_if), GOOD, GOOD])
    record = state.last_bad_step
    assert (record.step, record.leaf, record.has_nan, record.value_finite) == (1, leaf, has_nan, value_finite)
    assert jls.metrics(state)["last_bad_leaf"] == leaf


def test_steps_are_counted_whether_they_were_applied_or_not():
    bad = ([1.0, NAN], 1.0, False)
    state = recorded(jls.loss_scaled(optax.sgd(0.1), record_bad_steps=True), PARAMS, [bad, GOOD, bad, bad, GOOD])
    assert state.last_bad_step.step == 3


def test_before_the_first_bad_step_there_is_no_leaf_and_by_default_there_is_no_record():
    recording = recorded(jls.loss_scaled(optax.sgd(0.1), record_bad_steps=True), PARAMS, [GOOD])
    assert (recording.last_bad_step.step, recording.last_bad_step.leaf) == (-1, -1)
    silent = recorded(jls.loss_scaled(optax.sgd(0.1)), PARAMS, [GOOD])
    assert silent.last_bad_step is None
    assert "last_bad_leaf" not in jls.metrics(silent)


def test_a_bad_step_that_was_applied_is_recorded_too():
    state = recorded(jls.loss_scaled(optax.sgd(0.1), 8.0, record_bad_steps=True), PARAMS, [([1.0, NAN], 1.0, False)])
    assert (state.applied_steps, state.last_bad_step.leaf) == (1, 1)


def test_without_a_loss_scale_only_a_condition_is_a_bad_step():
    tx = jls.loss_scaled(optax.sgd(0.1), None, record_bad_steps=True)
    state = recorded(tx, PARAMS, [GOOD, ([1.0, 1.0], 1.0, True)])
    assert (state.last_bad_step.step, state.last_bad_step.leaf) == (1, -1)


def test_recording_compiles_once_and_goes_through_scan_and_vmap():
    tx = jls.loss_scaled(optax.sgd(0.1), record_bad_steps=True)
    grads = jnp.array([[1.0, 1.0, 1.0], [1.0, INF, 1.0]])  # two runs of three steps

    def run(grads):
        def step(carry, g):
            params, state = tx.update_and_apply({"w": g}, carry[1], carry[0])
            return (params, state), None

        params = {"w": jnp.float32(1.0)}
        return jax.lax.scan(step, (params, tx.init(params)), grads)[0][1]

    state = jax.jit(jax.vmap(run))(grads)
    assert state.last_bad_step.step.tolist() == [-1, 1]
    assert state.last_bad_step.leaf.tolist() == [-1, 0]


@pytest.mark.parametrize("check_vma", [True, False], ids=["check_vma", "no check"])
def test_under_shard_map_all_devices_record_the_same(check_vma):
    mesh = jax.make_mesh((8,), ("shard",), axis_types=(AxisType.Auto,))
    tx = jls.loss_scaled(optax.sgd(0.1), axis_name="shard", record_bad_steps=True)
    params = {"a": np.ones(8, np.float32), "b": np.ones(8, np.float32)}
    state = tx.init(params)
    specs = jax.tree.map(lambda leaf: P("shard") if leaf.ndim else P(), state)
    step = jax.shard_map(
        tx.update_and_apply,
        mesh=mesh,
        in_specs=(P("shard"), specs, P("shard")),
        out_specs=(P("shard"), specs),
        check_vma=check_vma,
    )
    grads = {**params, "b": np.array([1, 1, 1, 1, 1, NAN, 1, 1], np.float32)}
    _, state = jax.jit(step)(grads, state, params)
    assert (state.last_bad_step.leaf, state.last_bad_step.has_nan) == (1, True)


# The range.


def numpy_histogram(values):
    """By `numpy.frexp` in float64, which holds every number of the others as a normal one."""
    wide = values.astype(np.float64)
    finite = np.isfinite(wide)
    zero = wide == 0
    subnormal = finite & ~zero & (np.abs(wide) < float(ml_dtypes.finfo(values.dtype).smallest_normal))
    _, exponents = np.frexp(wide[finite & ~zero & ~subnormal])
    return np.unique(exponents - 1, return_counts=True), zero.sum(), subnormal.sum(), (~finite).sum()


def as_dictionary(histogram):
    return {int(e): int(n) for e, n in zip(histogram.exponents, np.asarray(histogram.counts), strict=True) if n}


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_histogram_agrees_with_numpy_in_every_dtype(dtype):
    with jax.enable_x64(dtype == "float64"):
        values = random_bits(dtype)
        histogram = jax.jit(exponent_histogram)(jnp.asarray(values))
        (exponents, counts), zeros, subnormals, nonfinite = numpy_histogram(values)
        assert as_dictionary(histogram) == dict(zip(exponents.tolist(), counts.tolist(), strict=True))
        assert (histogram.zeros, histogram.subnormals, histogram.nonfinite) == (zeros, subnormals, nonfinite)
        assert histogram.smallest_exponent == (-1022 if dtype == "float64" else -126)
        assert histogram.counts.dtype == jnp.uint32


def test_the_histogram_of_a_tree_is_the_sum_of_its_leaves():
    tree = {"a": jnp.array([1.0, 2.0, 0.0]), "b": {"c": jnp.array([1.5, INF], jnp.float16)}, "steps": jnp.arange(3)}
    whole = exponent_histogram(tree)
    assert (as_dictionary(whole), whole.zeros, whole.nonfinite) == ({0: 2, 1: 1}, 1, 1)
    leaves = exponent_histogram(tree, per_leaf=True)
    assert as_dictionary(leaves["a"]) == {0: 1, 1: 1}
    assert as_dictionary(leaves["b"]["c"]) == {0: 1}
    assert leaves["steps"] is None


def test_leaves_of_64_bits_and_of_16_share_one_histogram():
    with jax.enable_x64(True):
        tiny = {"a": jnp.array([1e-300, 1.0], jnp.float64), "b": jnp.array([1.0, 2**-24, INF], jnp.float16)}
        histogram = exponent_histogram(tiny)
        assert as_dictionary(histogram) == {-997: 1, 0: 2}
        assert (histogram.subnormals, histogram.nonfinite) == (1, 1)


def test_both_parts_of_a_complex_number_are_counted():
    histogram = exponent_histogram(jnp.array([1 + 4j, 0 - 1j], jnp.complex64))
    assert (as_dictionary(histogram), histogram.zeros) == ({0: 2, 2: 1}, 1)


def test_an_empty_tree_has_an_empty_histogram():
    histogram = exponent_histogram({"steps": 3})
    assert as_dictionary(histogram) == {}
    assert as_dictionary(exponent_histogram(jnp.zeros((0, 3)))) == {}


def test_more_numbers_than_can_be_counted_are_refused():
    leaf = jax.ShapeDtypeStruct((2**16, 2**15 + 1), jnp.float32)
    with pytest.raises(ValueError, match="per_leaf=True"):
        jax.eval_shape(lambda: exponent_histogram([jnp.zeros(leaf.shape), jnp.zeros(leaf.shape)]))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_on_a_mesh_nothing_is_gathered(axis_type):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(axis_type,) * 2)
    values = random_bits("float32", 4096 - 10).reshape(64, 64)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(values, NamedSharding(mesh, P("data", "model")))
        compiled = jax.jit(exponent_histogram).lower(sharded).compile()
        text = compiled.as_text()
        assert not any(f" {gather}" in text for gather in ("all-gather", "all-to-all", "collective-permute"))
        assert as_dictionary(compiled(sharded)) == as_dictionary(exponent_histogram(jnp.asarray(values)))
        assert underflow_fraction(sharded) == underflow_fraction(jnp.asarray(values))
        assert suggest_loss_scale(sharded) == suggest_loss_scale(jnp.asarray(values))
        assert nonfinite_report(sharded) == nonfinite_report(jnp.asarray(values))
        assert first_nonfinite([jnp.ones(2), sharded]) == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float32"])
def test_underflow_is_what_a_cast_by_numpy_does(dtype):
    target = np.dtype(dtype)
    info = ml_dtypes.finfo(target)
    step = float(info.smallest_subnormal)
    # Around the limits, ties among them, and everything else.
    near = np.array([step / 2, 3 * step / 2, float(info.smallest_normal) - step / 2, float(info.smallest_normal)])
    near = near.astype(np.float32)
    grads = np.concatenate(
        [near, np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(1)), [0.0, NAN, INF]]
    )
    grads = np.concatenate([grads, random_bits("float32")]).astype(np.float32)
    with np.errstate(over="ignore"):
        cast = np.abs(grads.astype(target).astype(np.float64))
    counted = np.isfinite(grads) & (grads != 0)
    zero = counted & (cast == 0)
    subnormal = counted & (cast > 0) & (cast < float(info.smallest_normal))
    found = jax.jit(underflow_fraction, static_argnums=1)(jnp.asarray(grads), dtype)
    assert found.zero == np.float32(zero.sum() / np.float32(counted.sum()))
    assert found.subnormal == np.float32(subnormal.sum() / np.float32(counted.sum()))
    assert dtype == "float32" or found.zero > 0


def test_zeros_are_not_lost_and_nothing_is_no_share():
    assert underflow_fraction(jnp.array([0.0, 0.0, 1e-9, 1.0])).zero == 0.5
    assert underflow_fraction(jnp.zeros(3)) == (0, 0)
    assert underflow_fraction(jnp.ones(2**25).at[0].set(1e-9)).zero == np.float32(2.0**-25)
    assert underflow_fraction({"steps": 3}) == (0, 0)


SUGGESTED = {
    # largest gradient, dtype, headroom: the scale
    "the top itself": (65504.0, "float16", 1, 1.0),
    "above the top": (1e6, "float16", 1, 1.0),
    "just half of it": (32752.0, "float16", 1, 2.0),
    "just above half": (32768.0, "float16", 1, 1.0),
    "headroom": (1.0, "float16", 8, 2.0**12),
    "an odd headroom": (1.0, "float16", 3, 2.0**14),
    "tiny": (1e-30, "float16", 1, 2.0**115),
    "too tiny for float32's range": (1e-37, "float16", 8, 2.0**127),
    "subnormal": (1e-42, "float16", 8, 2.0**127),
    "bfloat16": (2.0**100, "bfloat16", 1, 2.0**27),
    "float8": (1.0, "float8_e5m2", 1, 2.0**15),
}


@pytest.mark.parametrize(("largest", "dtype", "headroom", "scale"), SUGGESTED.values(), ids=SUGGESTED)
def test_the_suggested_scale_is_the_largest_that_leaves_headroom(largest, dtype, headroom, scale):
    grads = {"a": jnp.array([-largest, largest / 2, 0.0, NAN], jnp.float32)}
    suggestion = suggest_loss_scale(grads, dtype, headroom=headroom)
    assert suggestion.loss_scale == scale
    assert suggestion.largest.dtype == suggestion.loss_scale.dtype == jnp.float32
    top = float(ml_dtypes.finfo(dtype).max)
    assert scale == 1 or largest * scale * headroom <= top
    assert scale == 2.0**127 or 2 * largest * scale * headroom > top
    jls.FixedLossScale(suggestion.loss_scale)


def test_the_rescued_share_is_what_the_scale_saves():
    # Lost for good, rescued, rescued, safe, not to be lost.
    grads = jnp.array([1e-20, 1e-9, -2e-8, 0.5, 0.0], jnp.float32)
    suggestion = suggest_loss_scale(grads)
    assert (suggestion.loss_scale, suggestion.rescued) == (2.0**13, 0.5)
    lost = underflow_fraction(grads).zero, underflow_fraction(grads * suggestion.loss_scale).zero
    assert suggestion.rescued == lost[0] - lost[1]


def test_without_gradients_there_is_nothing_to_suggest():
    for grads in (jnp.zeros(3), {"steps": 3}, jnp.array([NAN, INF])):
        assert suggest_loss_scale(grads) == (1.0, 0.0, 0.0)


BAD_ARGUMENTS = {
    "dtype, underflow": (lambda: underflow_fraction(jnp.ones(2), jnp.int32), r"underflow_fraction\(dtype=...\)"),
    "dtype, suggestion": (lambda: suggest_loss_scale(jnp.ones(2), "complex64"), r"suggest_loss_scale\(dtype=...\)"),
    "headroom": (lambda: suggest_loss_scale(jnp.ones(2), headroom=0.5), "headroom.*0.5"),
    "no loss scale": (lambda: simulate(8.0, jnp.ones(2, bool)), "jls.get"),
    "no trace": (lambda: simulate(jls.get("dynamic")), "one of them"),
    "two traces": (lambda: simulate(jls.get("dynamic"), jnp.ones(2, bool), largest=jnp.ones(2)), "one of them"),
    "a trace of numbers": (lambda: simulate(jls.get("dynamic"), jnp.ones(2)), "must be booleans, got float32"),
    "magnitudes that are flags": (
        lambda: simulate(jls.get("dynamic"), largest=jnp.ones(2, bool)),
        "must be real numbers",
    ),
    "a scalar trace": (lambda: simulate(jls.get("dynamic"), jnp.array(True)), r"one dimension.*\(\)"),
    "dtype, simulation": (lambda: simulate(jls.get("dynamic"), largest=jnp.ones(2), dtype=int), "floating dtype"),
    "a batch of runs": (lambda: explain(jax.vmap(jls.loss_scaled(optax.sgd(0.1)).init)(jnp.ones(2))), "batch of runs"),
    "no state": (lambda: explain(optax.sgd(0.1).init(jnp.ones(2))), "explain"),
}


@pytest.mark.parametrize(("call", "message"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# A policy, replayed.


@settings(deadline=None, max_examples=20)
@given(st.lists(st.booleans(), min_size=1, max_size=60), st.integers(1, 5), st.integers(1, 3))
def test_a_simulation_is_the_loop(trace, period, hysteresis):
    loss_scale = jls.DynamicLossScale(2.0**4, period, hysteresis=hysteresis)
    replay = simulate(loss_scale, np.array(trace))
    for finite, scale, should_apply in zip(trace, replay.loss_scale, replay.should_apply, strict=True):
        assert (loss_scale(), finite) == (scale, should_apply)
        loss_scale = loss_scale.adjust(finite)
    assert replay.final == loss_scale


def test_what_overflows_follows_from_the_magnitudes():
    replay = simulate(jls.DynamicLossScale(2.0**16, 2), largest=jnp.array([1.0, 1.5, 0.5, 1.0, NAN, 0.5]))
    assert replay.grads_finite.tolist() == [False, True, True, False, False, True]
    assert replay.loss_scale.tolist() == [2.0**16, 2.0**15, 2.0**15, 2.0**16, 2.0**15, 2.0**14]


def test_a_scale_that_does_not_skip_applies_every_step():
    replay = simulate(jls.FixedLossScale(8.0), np.array([True, False]))
    assert replay.should_apply.tolist() == [True, True]
    assert replay.grads_finite.tolist() == [True, False]


# In plain sentences.

NAN_GRADS, INF_GRADS, NAN_LOSS = ([1.0, NAN], 1.0, False), ([INF, 1.0], 1.0, False), ([1.0, 1.0], NAN, False)
CONDITION = ([1.0, 1.0], 1.0, True)
EXPLAINED = {
    # loss scale, recorded, steps: what is said, and what is not
    "a healthy run": ("dynamic", True, [GOOD] * 3, ["2^15 = 32768", "Of 3 steps, 3 were applied"], ["last"]),
    "a scale that is no power of two": (10.0, False, [GOOD], ["The loss scale is 10 (FixedLossScale)"], ["2^"]),
    "long ago": (
        "dynamic",
        True,
        [NAN_GRADS, GOOD, GOOD],
        ["The last bad step was 3 steps ago", "['kernel']"],
        ["try"],
    ),
    "long ago, not recorded": ("dynamic", False, [NAN_GRADS, GOOD], ["Of 2 steps, 1 were applied"], ["last"]),
    "an overflow": (
        "dynamic",
        True,
        [INF_GRADS],
        ["an infinity in the gradients, first in ['bias']", "nothing to do"],
        [],
    ),
    "an overflow, not recorded": ("dynamic", False, [INF_GRADS], ["a NaN or an infinity", "nothing to do"], ["['"]),
    "a NaN at every scale": (
        jls.DynamicLossScale(2.0**30),
        True,
        [NAN_GRADS] * 17,
        ["The last 17 steps were skipped", "a NaN in the gradients, first in ['kernel']", "a NaN that stays is none"],
        ["cannot go lower"],
    ),
    "at the floor": ("dynamic", True, [INF_GRADS] * 15, ["cannot go lower", "`min_loss_scale`"], ["nothing to do"]),
    "at the floor, a NaN": ("dynamic", True, [NAN_GRADS] * 15, ["cannot go lower", "a NaN that stays is none"], []),
    "at the floor, not recorded": ("dynamic", False, [NAN_GRADS] * 15, ["cannot go lower", "nonfinite_report"], []),
    "one step above the floor": ("dynamic", True, [INF_GRADS] * 14, ["nothing to do"], ["cannot go lower"]),
    "a loss": ("dynamic", True, [NAN_LOSS], ["its loss was not finite", "forward pass"], ["cannot"]),
    "a loss and its gradients": (
        "dynamic",
        True,
        [([NAN, 1.0], NAN, False)],
        ["its loss was not finite", "forward pass"],
        ["nothing to do"],
    ),
    "a loss, not recorded": ("dynamic", False, [NAN_LOSS], ["its loss was not finite, or `skip_if` was true"], []),
    "a condition": ("dynamic", True, [CONDITION], ["`skip_if` was true", "condition of your own"], ["forward pass"]),
    "a scale that started too high": (
        jls.DynamicLossScale(2.0**60),
        True,
        [INF_GRADS] * 17,
        ["nothing to do"],
        ["almost without a scale"],
    ),
    "at a floor that is high": (
        jls.DynamicLossScale(2.0**10, min_loss_scale=2.0**10),
        True,
        [INF_GRADS],
        ["Allow a lower one"],
        ["almost"],
    ),
    "a fixed scale that skips": (
        jls.FixedLossScale(8.0, skip_nonfinite=True),
        True,
        [INF_GRADS],
        ["Take a smaller one"],
        ["min_loss_scale"],
    ),
    "an infinity in one leaf, a NaN in the next": (
        "dynamic",
        True,
        [([INF, NAN], 1.0, False)],
        ["an infinity in the gradients, first in ['bias']"],
        ["a NaN"],
    ),
    "unscaling overflows": (
        jls.DynamicLossScale(2.0**-4, min_loss_scale=2.0**-10),
        True,
        [([1.0, 1e38], 1.0, False), GOOD],
        ["2 steps ago: there was an infinity in the gradients, first in ['kernel']"],
        ["skip_if", "copies"],
    ),
    "often on condition": (
        "dynamic",
        True,
        [CONDITION, *[GOOD] * 4] * 20,
        ["20% of", "your own"],
        ["increment_period"],
    ),
    "a fixed scale that does not skip": (8.0, False, [NAN_GRADS], ["applied all the same", "checkpoint"], ["skipped:"]),
    "no loss scale": (None, False, [GOOD], ["not checked (NoOpLossScale)"], ["2^"]),
    "often, a NaN at the floor": (
        jls.DynamicLossScale(1.0),
        True,
        [NAN_GRADS, *[GOOD] * 4] * 20,
        ["20% of", "is none"],
        [],
    ),
    "often, a loss": ("dynamic", True, [NAN_LOSS, *[GOOD] * 4] * 20, ["20% of", "forward pass"], ["increment_period"]),
    "often": (jls.DynamicLossScale(2.0**15, 9), True, [INF_GRADS, *[GOOD] * 9] * 10, ["10% of all steps", "often"], []),
}


@pytest.mark.parametrize(("loss_scale", "record", "steps", "said", "unsaid"), EXPLAINED.values(), ids=EXPLAINED)
def test_explanations(loss_scale, record, steps, said, unsaid):
    state = recorded(jls.loss_scaled(optax.sgd(0.1), loss_scale, record_bad_steps=record), PARAMS, steps)
    text = explain(state, PARAMS)
    for phrase in said:
        assert phrase in text
    for phrase in unsaid:
        assert phrase not in text


def after_one_bad_step(grads):
    tx = jls.loss_scaled(optax.sgd(0.1), record_bad_steps=True)
    params = jax.tree.map(jnp.ones_like, grads)
    return tx.update_and_apply(grads, tx.init(params), params)[1]


def test_a_frozen_parameter_has_no_gradient_and_keeps_its_place():
    state = after_one_bad_step({"a": None, "b": jnp.array([NAN])})
    assert "first in ['b']" in explain(state, {"a": jnp.ones(3), "b": jnp.ones(1)})


def test_the_only_leaf_has_no_path():
    state = after_one_bad_step(jnp.array([NAN]))
    assert "first in the only leaf." in explain(state, jnp.ones(1))
    assert str(nonfinite_report(jnp.ones(1))).endswith("is in the only leaf.")


def test_a_tree_of_another_structure_is_refused():
    with pytest.raises(ValueError, match="has 3 leaves, but the gradients had 2"):
        explain(after_one_bad_step({"a": jnp.ones(1), "b": jnp.array([NAN])}), {"a": 1, "b": 2, "c": 3})


def test_a_traced_state_is_refused():
    state = jls.loss_scaled(optax.sgd(0.1)).init(PARAMS)
    with pytest.raises(ValueError, match="values that are traced"):
        jax.jit(lambda state: explain(state) and state)(state)


def test_without_parameters_the_leaf_is_a_number():
    state = recorded(jls.loss_scaled(optax.sgd(0.1), record_bad_steps=True), PARAMS, [NAN_GRADS])
    assert "first in leaf 1" in explain(state)


def test_copies_of_a_leaf_that_differ_are_told():
    """A fault of one device: the verdict reads every copy, looking for the leaf reads one."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    copies = NamedSharding(mesh, P(None, "model"))
    tx = jls.loss_scaled(optax.sgd(0.1), record_bad_steps=True)
    with jax.set_mesh(mesh):
        params = jax.device_put(np.ones((8, 8), np.float32), copies)
        shards = [np.array(shard.data) for shard in params.addressable_shards]
        shards[5][3, 1] = INF
        placed = [jax.device_put(data, device) for data, device in zip(shards, mesh.devices.flat, strict=True)]
        grads = jax.make_array_from_single_device_arrays(params.shape, copies, placed)
        _, state = jax.jit(tx.update_and_apply)(grads, tx.init(params), params)
        assert state.skipped_steps == 1
        assert "whose copies on several devices differ" in explain(state, params)
