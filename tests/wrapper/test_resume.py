"""A run that goes on from a checkpoint gives the bits of the one that was never stopped."""

import functools
import random
import signal
import sys
import time
from subprocess import PIPE

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import checkpointed
from programs.checkpointed import BEGINNING, BETWEEN_CHECKPOINTS, FORMATS, RESULTS, STEPS, WAITS_AT
from programs.starting import started

import jax_lossscale as jls

# Killed and started again.


@functools.cache
def never_stopped():
    """The leaves by name, before the first step and after every one."""
    runs = [checkpointed.beginning()]
    for step in range(STEPS):
        runs.append(checkpointed.train_step(runs[-1], checkpointed.batch_of(step)))
    return [checkpointed.leaves_by_name(run) for run in runs]


def kill_at_a_random_moment(kind, folder, dice):
    """Start a run and kill it some time after its first checkpoint."""
    errors = folder / "first.stderr"
    # A checkpoint begins only when the one before is complete, so that at this step there is one.
    last_line = str(dice.randrange(2 * BETWEEN_CHECKPOINTS, WAITS_AT - BETWEEN_CHECKPOINTS))
    with started("checkpointed.py", kind, folder, "wait", devices=1, errors=errors, stdout=PIPE) as process:
        lines = iter(process.stdout.readline, "")
        assert next(lines, "").strip() == "begins with 0", errors.read_text()
        assert any(line.strip() == last_line for line in lines), errors.read_text()
        time.sleep(dice.uniform(0, 0.03))
        process.kill()
        assert process.wait() == -signal.SIGKILL, errors.read_text()
    assert not (folder / RESULTS).exists()


def go_on_to_the_end(kind, folder):
    """Start it again; the step it begins with."""
    errors = folder / "second.stderr"
    with started("checkpointed.py", kind, folder, devices=1, errors=errors, stdout=PIPE) as process:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, errors.read_text()
    return int(output.splitlines()[0].removeprefix("begins with"))


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
@pytest.mark.parametrize(
    "kind", ["orbax", *(pytest.param(kind, marks=pytest.mark.slow) for kind in FORMATS if kind != "orbax")]
)
def test_a_run_killed_at_a_random_moment_ends_with_the_same_bits(kind, tmp_path):
    seed = random.randrange(2**32)
    print("seed", seed)  # shown if the test fails
    kill_at_a_random_moment(kind, tmp_path, random.Random(seed))
    first_step = go_on_to_the_end(kind, tmp_path)
    assert first_step in range(BETWEEN_CHECKPOINTS, WAITS_AT + 1, BETWEEN_CHECKPOINTS)

    for name, expected in (BEGINNING, never_stopped()[first_step]), (RESULTS, never_stopped()[STEPS]):
        with np.load(tmp_path / name) as found:
            assert set(found) == set(expected)
            for leaf in expected:
                assert found[leaf].dtype == expected[leaf].dtype
                assert found[leaf].tobytes() == expected[leaf].tobytes(), f"{name}: {leaf}"


def test_that_run_skips_steps_and_its_scale_changes_all_the_way():
    """Wherever it is killed, there is something to lose."""
    scales = [float(leaves["state/loss_scale/current_loss_scale"]) for leaves in never_stopped()]
    skipped = [int(leaves["state/skipped_steps"]) for leaves in never_stopped()]
    for start in range(0, STEPS, 50):
        end = start + 50
        assert skipped[end] > skipped[start]
        assert any(scales[step] < scales[step + 1] for step in range(start, end))
        assert any(scales[step] > scales[step + 1] for step in range(start, end))
    assert all(np.isfinite(leaf).all() for leaf in never_stopped()[STEPS].values())


# A model without sums of gradients, and with powers of two wherever something is multiplied: neither the number of
# devices nor a fused multiply-add changes a bit of it.

SCALE = jls.DynamicLossScale(2.0**10, increment_period=3)
PARAMS = np.linspace(-1, 1, 64, dtype=np.float32).reshape(16, 4)


def loss_fn(params, batch, dtype=jnp.float32):
    error = params.astype(dtype) * batch["x"].astype(dtype) - batch["y"].astype(dtype)
    return jnp.mean(jnp.square(error.astype(jnp.float32)))


def batch_of(step, bad=False):
    dice = np.random.default_rng(step)
    x = np.exp2(dice.integers(-2, 3, size=PARAMS.shape)).astype(np.float32)
    y = dice.normal(size=PARAMS.shape).astype(np.float32)
    if bad:
        y[13, 2] = 3e4
        x[13, 2] = 2.0**10
    return {"x": x, "y": y}


# On another number of devices.

# Not Adam: the moments would be the same, but its quotient is compiled to other last bits for shards of other shapes.
MOMENTUM = jls.loss_scaled(optax.sgd(2.0**-5, momentum=0.5), SCALE)


def shardings(tree, number):
    mesh = Mesh(np.array(jax.devices()[:number]), ("shard",), axis_types=(AxisType.Auto,))
    return jax.tree.map(lambda leaf: NamedSharding(mesh, P("shard") if leaf.ndim else P()), tree)


def float16_steps(params, state, steps):
    """Where the run is after them, and what was decided: the scale and whether the step was applied."""
    decisions = []
    grads_of = jax.jit(
        lambda params, state, batch: jls.scaled_grad(loss_fn, state)(params, batch, jnp.float16),
        out_shardings=params.sharding,
    )
    for step in steps:
        grads = grads_of(params, state, batch_of(step, bad=step % 6 == 4))
        params, state = jax.jit(MOMENTUM.update_and_apply)(grads, state, params)
        decisions.append((float(state.loss_scale()), bool(state.grads_finite)))
    return (params, state), decisions


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # within orbax
@pytest.mark.parametrize("number", [2])
def test_a_checkpoint_of_eight_devices_goes_on_on_fewer(number, tmp_path):
    start = (PARAMS, jax.jit(MOMENTUM.init)(PARAMS))
    start = jax.device_put(start, shardings(start, 8))
    eight, decisions = float16_steps(*start, range(20))
    assert {True, False} == {applied for _, applied in decisions}

    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", eight)
        checkpointer.wait_until_finished()
        target = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            eight,
            shardings(eight, number),
        )
        fewer = checkpointer.restore(tmp_path / "checkpoint", target)
    params, state = fewer
    for leaf in params, state.inner_state[0].trace:
        assert {shard.data.shape for shard in leaf.addressable_shards} == {(16 // number, 4)}

    expected, expected_decisions = float16_steps(*eight, range(20, 40))
    after, decisions = float16_steps(*fewer, range(20, 40))
    assert decisions == expected_decisions
    assert jax.tree.leaves(after)[0].sharding.device_set == set(jax.devices()[:number])
    chex.assert_trees_all_equal(jax.device_get(after), jax.device_get(expected))
