"""Functions that read the optimizer state on the host: `metrics`, `raise_if_stuck`, `get_loss_scale` and `explain`."""

import jax
import jax.numpy as jnp
import optax
import pytest
import unscaled
from flax import nnx
from kinds import HalvingLossScale

import jax_lossscale as jls

PARAMS = {"kernel": jnp.asarray([[1.0, -2.0], [0.5, 3.0]]), "bias": jnp.asarray([0.25, -0.5])}
BAD_GRADS = {"kernel": jnp.asarray([[8.0, 16.0], [-4.0, 2.0]]), "bias": jnp.asarray([4.0, jnp.nan])}


def test_error_if_the_tree_has_several_loss_scaled_states():
    two = (jls.loss_scaled(optax.sgd(0.1)).init(PARAMS), {"b": jls.loss_scaled(optax.sgd(0.1)).init(PARAMS)})
    for reader in jls.get_loss_scale, jls.metrics, jls.raise_if_stuck:
        with pytest.raises(ValueError, match=r"got 2\..*\[1\]\['b'\]"):
            reader(two)


@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize("loss_scale", ["auto", "dynamic", 8.0, None])
def test_metrics_have_the_same_keys_shapes_and_dtypes_for_all_options(loss_scale, record):
    tx = jls.loss_scaled(optax.sgd(0.1), loss_scale, record_bad_steps=record)

    def step(state, grads):
        state = tx.update(grads, state, PARAMS)[1]
        return state, jls.metrics(state)

    steps = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), (tx.init(PARAMS), BAD_GRADS))
    history, batch = jax.lax.scan(step, tx.init(PARAMS), steps[1])[1], jls.metrics(steps[0])
    integers = "applied_steps", "skipped_steps", "consecutive_skips", "last_bad_leaf"
    dtypes = {"loss_scale": "float32", "grads_finite": "bool", "largest": "float32", **dict.fromkeys(integers, "int32")}
    assert {name: value.dtype.name for name, value in history.items()} == dtypes
    assert {value.shape for value in history.values()} == {(3,)} >= {value.shape for value in batch.values()} - {()}
    assert jnp.all(history["last_bad_leaf"] == (0 if record and loss_scale is not None else -1))
    assert jnp.all(jnp.isnan(history["largest"]))


def skipping(loss_scale, steps, record=False, after=None, **extra):
    """Return the state after a number of steps with nonfinite gradients."""
    tx = jls.loss_scaled(optax.sgd(0.1), loss_scale, record_bad_steps=record)
    state = after or tx.init(PARAMS)
    step = jax.jit(lambda state: tx.update_and_apply(BAD_GRADS, state, PARAMS, **extra)[1])
    for _ in range(steps):
        state = step(state)
    return state


def ensemble(*states):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)


STUCK = {
    "fresh": (lambda: skipping("dynamic", 0), None),
    "still decreasing": (lambda: skipping("dynamic", 12), None),
    "at the floor, fewer skips than patience": (lambda: skipping(jls.DynamicLossScale(2.0), 9), None),
    "auto, still decreasing": (lambda: skipping("auto", 3), None),
    "auto, at its floor": (lambda: skipping("auto", 10), "at its lower bound"),
    "at the floor": (
        lambda: skipping(jls.DynamicLossScale(1.0), 10),
        "last 10 steps were skipped at a loss scale of 1,.*`grads_finite` was false. To find the.*decrease `min",
    ),
    "at the floor, with hysteresis": (lambda: skipping(jls.DynamicLossScale(1.0, hysteresis=2), 10), "lower bound"),
    "hysteresis left": (lambda: skipping(jls.DynamicLossScale(8.0, hysteresis=50), 20), None),
    "fixed": (lambda: skipping(jls.FixedLossScale(8.0, skip_nonfinite=True), 10), "no other problem"),
    "10 NaN losses": (
        lambda: skipping("auto", 10, record=True, value=jnp.float32(jnp.nan)),
        "last 10 steps were skipped at a loss scale of 256, the last one because its loss was not finite. The loss "
        r"does not depend on the loss scale. `compare_gradients\(loss_fn, params, batch\)` shows",
    ),
    "10 NaN losses, not recorded": (
        lambda: skipping(jls.DynamicLossScale(hysteresis=2), 10, value=jnp.float32(jnp.nan)),
        "its loss was not finite",
    ),
    "9 NaN losses": (lambda: skipping("auto", 9, value=jnp.float32(jnp.nan)), None),
    "10 skipped steps, one with a finite loss": (
        lambda: skipping("auto", 9, after=skipping("auto", 1, skip_if=jnp.array(True)), value=jnp.float32(jnp.nan)),
        None,
    ),
    "10 skipped steps by a condition": (lambda: skipping("dynamic", 10, record=True, skip_if=jnp.array(True)), None),
    "1000 skipped steps": (
        lambda: skipping("dynamic", 1000, skip_if=jnp.array(True), value=1.0),
        "last 1000 steps were skipped at a loss scale of 1, the last one because there was a NaN or an infinity",
    ),
    "one member of an ensemble, at the floor": (
        lambda: ensemble(*(skipping(jls.DynamicLossScale(2.0), n) for n in (10, 0))),
        "lower bound",
    ),
    "no loss scale, with skip_if": (
        lambda: skipping(None, 20, skip_if=jnp.array(True)),
        "20 steps were skipped at a loss scale of 1, the last one because `skip_if` was true. `skip_if` is your own",
    ),
}


@pytest.mark.parametrize(("loss_scale", "is_reported"), [("auto", True), ("dynamic", False)])
def test_raise_if_stuck_detects_gradients_that_were_always_zero(loss_scale, is_reported):
    tx = jls.loss_scaled(optax.sgd(0.1), loss_scale)
    zeros = jnp.zeros(3)
    state = tx.init(zeros)
    update = jax.jit(lambda grads, state: tx.update(grads, state, zeros))
    for _ in range(99):
        _, state = update(zeros, state)
    jls.raise_if_stuck(state)
    _, stuck = tx.update(zeros, state, zeros)
    if is_reported:
        for each in stuck, ensemble(tx.init(zeros), stuck):
            with pytest.raises(RuntimeError, match="All gradients have been exactly zero for many steps"):
                jls.raise_if_stuck(each)
    else:
        jls.raise_if_stuck(stuck)
    _, recovered = tx.update(jnp.ones(3), state, zeros)
    _, recovered = tx.update(zeros, recovered, zeros)
    jls.raise_if_stuck(recovered)


def test_raise_if_stuck_detects_unscaled_gradients():
    runs = [unscaled.states(jnp.zeros((40, 1)), jnp.zeros((40, 1)), is_scaled) for is_scaled in (True, False)]
    correct, wrong = (jax.tree.map(lambda leaf: leaf[-1, 0], run) for run in runs)
    for each in correct, wrong._replace(loss_scale=jls.DynamicLossScale()):
        jls.raise_if_stuck(each)
    half_skipped = wrong._replace(applied_steps=jnp.int32(20), skipped_steps=jnp.int32(20))
    for each in wrong, half_skipped, ensemble(correct, wrong):
        with pytest.raises(RuntimeError, match="not scaled"):
            jls.raise_if_stuck(each)


def test_raise_if_stuck_does_not_confuse_an_overflow_with_gradients_that_were_always_zero():
    """An overflow at the lowest loss scale resets the peak, as at the beginning of a run."""
    tx, ones = jls.loss_scaled(optax.sgd(1e-3)), jnp.ones(3)
    state = tx.init(ones)
    update = jax.jit(lambda grads, state: tx.update(grads, state, ones)[1])
    for _ in range(120):
        state = update(ones, state)
    for _ in range(15):
        state = update(jnp.nan * ones, state)
        jls.raise_if_stuck(state)
    replaced = state._replace(loss_scale=jls.AutoLossScale(), skipped_steps=jnp.int32(0))
    replaced = replaced._replace(monitoring=state.monitoring._replace(largest=jnp.float32(1)))
    jls.raise_if_stuck(replaced)


@pytest.mark.parametrize(("state", "message"), STUCK.values(), ids=STUCK)
def test_raise_if_stuck_detects_runs_that_skip_every_step(state, message):
    if message is None:
        jls.raise_if_stuck(state(), patience=10)
    else:
        with pytest.raises(RuntimeError, match=message):
            jls.raise_if_stuck((state(),), patience=10)


def test_raise_if_stuck_rejects_partly_traced_states():
    state = skipping("dynamic", 0)
    with pytest.raises(ValueError, match="traced"):
        jax.jit(lambda skips: jls.raise_if_stuck(state._replace(consecutive_skips=skips)))(jnp.int32(0))


def test_run_is_stuck_at_the_lower_bound_of_a_user_defined_loss_scale():
    state = skipping(HalvingLossScale(64.0), 2)
    assert state.loss_scale() == 16
    state = state._replace(consecutive_skips=jnp.int32(20), skipped_steps=jnp.int32(20))
    jls.raise_if_stuck(state)
    low = state._replace(loss_scale=HalvingLossScale(1.0))
    with pytest.raises(RuntimeError, match="lower bound"):
        jls.raise_if_stuck(low)
    assert "is at its lower bound" in str(jls.diagnostics.explain(low._replace(grads_finite=jnp.array(False))))


def test_run_is_stuck_after_1000_skips_without_a_lower_bound(monkeypatch):
    monkeypatch.delattr(HalvingLossScale, "lower_bound")
    state = skipping(HalvingLossScale(1.0), 1)._replace(consecutive_skips=jnp.int32(999))
    jls.raise_if_stuck(state)
    with pytest.raises(RuntimeError, match="1000 steps were skipped"):
        jls.raise_if_stuck(state._replace(consecutive_skips=jnp.int32(1000)))


# --- States whose leaves are wrapped ---


class Wrapped:
    """An array inside a wrapper object, as some libraries use it."""

    def __init__(self, array):
        self.array = array

    def __jax_array__(self):
        return self.array


def in_nnx(state):
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, jls.loss_scaled(optax.sgd(0.1)), wrt=nnx.Param)
    optimizer.opt_state = nnx.data(jax.tree.map(nnx.Variable, state))
    return optimizer.opt_state


COATS = {"nnx": in_nnx, "another": lambda state: jax.tree.map(Wrapped, state)}


@pytest.mark.parametrize("wrap", COATS.values(), ids=COATS)
def test_wrapped_leaves_are_read_as_arrays(wrap):
    bare = skipping(jls.DynamicLossScale(2.0), 10)
    wrapped = wrap(bare)
    assert not isinstance(wrapped.applied_steps, jax.Array)
    assert repr(jls.metrics(wrapped)) == repr(jls.metrics(bare))  # NaN is not equal to NaN.
    assert all(isinstance(value, jax.Array) for value in jls.metrics(wrapped).values())
    assert jls.get_loss_scale(wrapped) == jls.get_loss_scale(bare)
    assert jls.diagnostics.explain(wrapped) == jls.diagnostics.explain(bare)
    with pytest.raises(RuntimeError, match="lower bound"):
        jls.raise_if_stuck(wrapped, patience=10)
    value, grad = jls.value_and_scaled_grad(lambda x: x**2, wrapped)(3.0)
    assert (value, grad) == (9.0, 6.0 * bare.loss_scale())


@jax.tree_util.register_pytree_with_keys_class
class Named:
    """A named array, as in haliax. It is a pytree node and cannot be converted to an array."""

    def __init__(self, array):
        self.array = array

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("array"), self.array)], None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)

    def __jax_array__(self):
        raise ValueError("Only scalar NamedArrays can be implicitly converted to jax arrays.")


def test_states_with_named_arrays_can_be_read():
    tx = jls.loss_scaled(optax.adam(0.1), jls.DynamicLossScale(2.0), record_bad_steps=True)
    params = {"kernel": Named(PARAMS["kernel"])}
    state = tx.init(params)
    for _ in range(20):
        state = tx.update_and_apply({"kernel": Named(BAD_GRADS["kernel"] * jnp.nan)}, state, params)[1]
    assert isinstance(state.inner_state[0].mu["kernel"], Named)
    for tree in state, (state, params), [params, {"optimizer": state}]:
        assert jls.metrics(tree)["skipped_steps"] == 20
        assert jls.get_loss_scale(tree)() == 1
        for names in (None, params):
            assert "NaN in the gradients, first in ['kernel'].array" in str(jls.diagnostics.explain(tree, names))
        with pytest.raises(RuntimeError, match="lower bound"):
            jls.raise_if_stuck(tree)
        assert jls.value_and_scaled_grad(lambda x: x**2, tree)(3.0)[0] == 9


def test_state_restored_by_flax_without_registration_is_rejected():
    tx = jls.loss_scaled(optax.sgd(0.1))
    restored = tx.init(PARAMS)._replace(loss_scale={"current_loss_scale": jnp.float32(8.0)})
    message = r"a dictionary.*import `jax_lossscale.interop.flax`"
    for read in (
        lambda state: tx.update(PARAMS, state, PARAMS),
        lambda state: jls.get_loss_scale((optax.EmptyState(), state)),
        lambda state: jls.value_and_scaled_grad(jnp.sum, state),
    ):
        with pytest.raises(ValueError, match=message):
            read(restored)


# --- States of several optimizers ---

TX = jls.loss_scaled(optax.adam(1e-2), 4.0)
STATES = {
    "critic": TX.init(PARAMS),
    "critic2": jls.loss_scaled(optax.adam(1e-2), 8.0).init(PARAMS),
    "pair": [TX.init(PARAMS), jls.loss_scaled(optax.sgd(1e-2), 16.0).init(PARAMS)],
}
PATHS = {
    "a key": ("critic", 4.0),
    "a key that begins with another": ("critic2", 8.0),
    "the notation of the error": ("['critic']", 4.0),
    "the complete path of the error": ("['critic'].loss_scale", 4.0),
    "a nested path": ("pair/1", 16.0),
    "a nested path in the notation of the error": ("['pair'][1]", 16.0),
}


@pytest.mark.parametrize(("path", "scale"), PATHS.values(), ids=PATHS)
def test_get_loss_scale_selects_by_path(path, scale):
    assert jls.get_loss_scale(STATES, path)() == scale
    assert jax.jit(lambda states: jls.get_loss_scale(states, path)())(STATES) == scale


UNCLEAR = {
    "no path": (None, r"got 4\..*\['critic'\].loss_scale.*\['pair'\]\[1\].loss_scale"),
    "everything": ("", "got 4"),
    "several": ("pair", r"got 2\..*\['pair'\]\[0\].loss_scale, \['pair'\]\[1\].loss_scale"),
    "a part of a key": ("crit", r"below the path 'crit'.*\['critic'\].loss_scale"),
    "no such key": ("actor", "below the path 'actor'"),
}


@pytest.mark.parametrize(("path", "message"), UNCLEAR.values(), ids=UNCLEAR)
def test_ambiguous_or_unknown_path_raises_and_lists_the_paths(path, message):
    with pytest.raises(ValueError, match=message):
        jls.get_loss_scale(STATES, path)
