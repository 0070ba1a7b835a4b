"""What an older version has saved of `"auto"` is read, or the error says what to do."""

import pickle

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_lossscale as jls

# What their `AutoLossScale` held after five steps, as `vars` gave it.
CONFIG = {"initial_loss_scale": 256.0, "min_loss_scale": 2.0**-24, "max_loss_scale": None, "log2_headroom": 0.0}
BOTH = {"current_loss_scale": np.float32(2.0**29), "log2_peak": np.float32(-19), "log2_margin": np.float32(1)}
COUNTER = {"num_finite_steps": np.int32(2048)}
LEAVES = {"0.3.0": {**BOTH, **COUNTER}, "0.4.0": {**BOTH, "log2_allowance": np.float32(2), **COUNTER}}
EXPECTED = {"0.3.0": {**BOTH, "log2_allowance": 0}, "0.4.0": {**BOTH, "log2_allowance": 2}}
PARAMS = {"kernel": jnp.ones(2)}
TX = jls.loss_scaled(optax.sgd(0.1), "auto")

each_version = pytest.mark.parametrize("version", LEAVES)


def steps_from(state):
    """The loss scale after one more step."""
    _, grads = jls.value_and_scaled_grad(lambda params: (params["kernel"] ** 2).sum(), state)(PARAMS)
    return TX.update_and_apply(grads, state, PARAMS)[1].loss_scale


@each_version
def test_a_pickle_is_read(version):
    older = object.__new__(jls.AutoLossScale)
    vars(older).update(CONFIG | LEAVES[version])
    read = pickle.loads(pickle.dumps(older))
    assert vars(read) == CONFIG | EXPECTED[version]
    assert steps_from(TX.init(PARAMS)._replace(loss_scale=read))() < 2.0**29  # a gradient of 2 overflows there


@each_version
def test_a_state_of_flax_is_read(version):
    serialization = pytest.importorskip("flax.serialization")
    pytest.importorskip("jax_lossscale.interop.flax")
    fresh = TX.init(PARAMS)
    saved = {**serialization.to_state_dict(fresh), "loss_scale": LEAVES[version]}
    read = serialization.from_state_dict(fresh, serialization.msgpack_restore(serialization.msgpack_serialize(saved)))
    expected = jls.AutoLossScale(**{name: float(leaf) for name, leaf in EXPECTED[version].items()})
    assert read.loss_scale == expected
    assert steps_from(read)() < 2.0**29


@each_version
def test_what_flax_reads_without_knowing_loss_scales_is_refused_with_the_cure(version):
    read = TX.init(PARAMS)._replace(loss_scale=LEAVES[version])
    with pytest.raises(
        ValueError, match=r"`update\(state=...\)` has a dictionary .*`import jax_lossscale.interop.flax`"
    ):
        TX.update(PARAMS, read, PARAMS)
    for ask in (jls.get_loss_scale, lambda state: jls.value_and_scaled_grad(jnp.sum, state)):
        with pytest.raises(ValueError, match="dictionary in the place of the loss scale"):
            ask((optax.EmptyState(), read))


@each_version
def test_orbax_leaves_out_what_is_gone_where_it_is_told_to(version, tmp_path):
    checkpoint = pytest.importorskip("orbax.checkpoint")
    with checkpoint.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "older", {"loss_scale": {**LEAVES[version]}})
        with pytest.raises(ValueError, match="partial_restore=True"):
            checkpointer.restore(tmp_path / "older", item={"loss_scale": jls.AutoLossScale()})
        some = checkpoint.args.PyTreeRestore(item={"loss_scale": jls.AutoLossScale()}, partial_restore=True)
        read = checkpointer.restore(tmp_path / "older", args=some)["loss_scale"]
    assert (read.log2_peak, read.log2_margin, read()) == (-19, 1, 2.0**29)
