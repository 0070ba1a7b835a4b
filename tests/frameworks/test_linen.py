"""The program on the flax linen page: comparison with a manual step, skipped steps and checkpoints."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

flax = pytest.importorskip("flax")

from flax import linen as nn  # noqa: E402
from flax import serialization  # noqa: E402
from flax.linen import fp8_ops  # noqa: E402
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT  # noqa: E402
from flax.training import checkpoints, train_state  # noqa: E402
from kinds import assert_same_bits  # noqa: E402
from pages import bad, copied  # noqa: E402
from programs.starting import run_python  # noqa: E402

import jax_lossscale as jls  # noqa: E402
from jax_lossscale.interop.flax import TrainState  # noqa: E402

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def page():
    return copied("linen")


def batches(page, number=6):
    """Return batches, the third of which makes the loss NaN."""
    return [bad(page.batch) if step == 2 else page.batch for step in range(number)]


def trained(step, state, batches):
    for batch in batches:
        state, _ = step(state, batch, jax.random.key(2))
    return state


def test_step_equals_a_manual_step_with_the_train_state_of_flax(page):
    """The manual step uses the `TrainState` of flax and selects the fields that a skipped step must restore."""

    class TheirState(train_state.TrainState):
        batch_stats: dict

    @jax.jit
    def their_step(state, batch, key):
        grad_fn = jls.value_and_scaled_grad(jls.autocast(page.loss_fn), state.opt_state, has_aux=True)
        (loss, batch_stats), grads = grad_fn(
            state.params, state.batch_stats, batch, jax.random.fold_in(key, state.step)
        )
        updates, opt_state = page.tx.update(grads, state.opt_state, state.params, value=loss)
        new = {"params": optax.apply_updates(state.params, updates), "batch_stats": batch_stats}
        old = {"params": state.params, "batch_stats": state.batch_stats}
        kept = jax.tree.map(lambda a, b: jnp.where(opt_state.consecutive_skips == 0, a, b), new, old)
        return state.replace(step=state.step + 1, opt_state=opt_state, **kept), loss

    begin = {"apply_fn": None, "params": page.variables["params"], "batch_stats": page.variables["batch_stats"]}
    ours = trained(page.train_step, page.TrainState.create(**begin, tx=page.tx), batches(page))
    theirs = trained(their_step, TheirState.create(**begin, tx=page.tx), batches(page))
    assert jax.tree.structure(ours.opt_state) == jax.tree.structure(theirs.opt_state)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=1e-6)
    for name in "params", "batch_stats", "opt_state", "step":
        jax.tree.map(close, getattr(ours, name), getattr(theirs, name))
    assert jls.all_finite((ours.params, ours.batch_stats))
    assert ours.opt_state.skipped_steps == 1


def simple(**fields):
    class WithFields(TrainState):
        count: jax.Array = None
        average: dict = None

    tx = jls.loss_scaled(optax.sgd(0.5), 8.0)
    return WithFields.create(apply_fn=None, params={"x": jnp.ones(2)}, tx=tx, **fields)


GRADS = {"x": jnp.full(2, 8.0)}
SKIPPED = {
    "value": {"value": jnp.float32(jnp.nan)},
    "skip_if": {"skip_if": True},
    "grads_finite": {"grads_finite": False},
}


@pytest.mark.parametrize("kwargs", [{}, {"value": 1.0, "skip_if": False, "grads_finite": True}, *SKIPPED.values()])
def test_additional_fields_are_restored_if_the_step_is_skipped(kwargs):
    tx = jls.loss_scaled(optax.sgd(0.5), jls.DynamicLossScale(8.0))
    state = simple(count=jnp.int32(3), average={"x": jnp.zeros(2)}).replace(tx=tx)
    state = state.replace(opt_state=tx.init(state.params))
    fields = {"count": state.count + 1, "average": state.params}
    after = jax.jit(lambda state: state.apply_gradients(grads=GRADS, **fields, **kwargs))(state)
    applied = kwargs not in SKIPPED.values()
    np.testing.assert_array_equal(after.params["x"], 0.5 if applied else 1.0)
    np.testing.assert_array_equal(after.average["x"], 1.0 if applied else 0.0)
    assert (after.count, after.step) == (4 if applied else 3, 1)


def test_float8_statistics_are_restored_if_the_step_is_skipped():
    """The float8 layers of flax return their new statistics in place of gradients."""
    name = OVERWRITE_WITH_GRADIENT
    params = {"params": {"x": jnp.ones(2)}, name: {"amax": jnp.zeros(2)}}
    tx = jls.loss_scaled(optax.sgd(0.5), jls.DynamicLossScale(8.0))
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    for factor, x, amax in (1.0, 0.5, 7.0), (jnp.inf, 1.0, 0.0):
        after = state.apply_gradients(grads={"params": {"x": factor * GRADS["x"]}, name: {"amax": jnp.full(2, 7.0)}})
        np.testing.assert_array_equal(after.params["params"]["x"], x)
        np.testing.assert_array_equal(after.params[name]["amax"], amax)


def test_float8_statistics_under_autocast():
    """The backward rules of this layer return statistics even if all their cotangents are zero."""
    model, x = nn.Dense(4, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp), jnp.linspace(-1, 2, 32).reshape(4, 8)
    params = model.init(jax.random.key(0), x)

    def loss(params):
        return jnp.mean(model.apply(params, x) ** 2)

    expected, found = (jax.grad(fun)(params)[OVERWRITE_WITH_GRADIENT] for fun in (loss, jls.autocast(loss)))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3), found, expected)


def test_float8_statistics_that_several_layers_share():
    """Flax adds up these statistics with the maximum, for which it defines an extended dtype."""

    def loss(statistics, x):
        scale, history = (jax.lax.convert_element_type(each, fp8_ops.fm32) for each in statistics)

        def layer(x, _):
            return 2 * fp8_ops.in_qdq(jnp.float32, jnp.float8_e4m3fn, x, scale, history), None

        return jnp.sum(jax.lax.scan(layer, x @ x, None, length=3)[0])

    given = (jnp.ones(1), jnp.zeros(3)), jnp.eye(2)
    for expected, found in zip(jax.grad(loss)(*given), jax.grad(jls.autocast(loss))(*given), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_train_state_rejects_an_optimizer_without_a_loss_scale():
    with pytest.raises(ValueError, match=r"jls\.loss_scaled\(tx, None\)"):
        TrainState.create(apply_fn=None, params={"x": jnp.ones(2)}, tx=optax.sgd(0.5))
    with pytest.raises(ValueError, match="which wraps the whole inner optimizer"):
        simple().replace(tx=optax.sgd(0.5)).apply_gradients(grads=GRADS)


def test_apply_gradients_rejects_fields_of_another_structure_or_dtype():
    with pytest.raises(ValueError, match="same structure"):
        simple().apply_gradients(grads=GRADS, average={"x": jnp.ones(2)})
    with pytest.raises(ValueError, match="Arrays must have the same shape and dtype"):
        simple(count=jnp.int32(3)).apply_gradients(grads=GRADS, count=jnp.float32(3))
    with pytest.raises(AttributeError, match="no_such_field"):
        simple().apply_gradients(grads=GRADS, no_such_field=1)


def through_bytes(state, target, folder):
    return serialization.from_bytes(target, serialization.to_bytes(state))


def through_checkpoints(state, target, folder):
    checkpoints.save_checkpoint(folder, state, step=7)
    return checkpoints.restore_checkpoint(folder, target)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # The warning comes from orbax.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("through", [through_bytes, through_checkpoints])
def test_restored_train_state_continues_bitwise_equal(page, through, tmp_path):
    state = trained(page.train_step, page.state, batches(page))
    zeros = jax.tree.map(jnp.zeros_like, {"params": state.params, "batch_stats": state.batch_stats})
    target = page.TrainState.create(apply_fn=page.network.apply, tx=page.tx, **zeros)
    restored = through(state, target, tmp_path)
    assert isinstance(restored.opt_state, jls.LossScaledState)
    assert_same_bits(restored.opt_state, state.opt_state)
    found, expected = (trained(page.train_step, start, batches(page)) for start in (restored, state))
    assert_same_bits(found.params, expected.params)


# Importing `jax_lossscale.interop.flax` registers the loss scales with flax. The test needs a new interpreter, because
# this file has already imported the module.

KNOWN_OR_NOT = """
from flax import serialization
import jax_lossscale as jls

loss_scale = jls.DynamicLossScale(2.0**10, hysteresis=2)
try:
    serialization.to_bytes(loss_scale)
except TypeError as error:
    print(error)
import jax_lossscale.interop.flax

for loss_scale in loss_scale, jls.FixedLossScale(8.0), jls.NoOpLossScale(), jls.AutoLossScale():
    saved = serialization.to_bytes({"loss_scale": loss_scale})
    assert serialization.from_bytes({"loss_scale": loss_scale}, saved) == {"loss_scale": loss_scale}
"""


def test_importing_interop_flax_registers_the_loss_scales():
    # `docs/frameworks/linen.md` quotes this message.
    assert run_python("-c", KNOWN_OR_NOT) == "can not serialize 'DynamicLossScale' object\n"
