"""A run that is resumed from a checkpoint is bitwise equal to a run that was never interrupted."""

import functools
import pickle
import random
import re
import signal
import sys
import time
import warnings
from pathlib import Path
from subprocess import PIPE

import chex
import flax.serialization
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from kinds import assert_same_bits
from programs import checkpointed
from programs.checkpointed import BEGINNING, BETWEEN_CHECKPOINTS, RESULTS, STEPS, WAITS_AT
from programs.starting import started
from test_half_parameters import BF16, F32, grads_at, params_in

import jax_lossscale as jls
import jax_lossscale.interop.flax  # registers the loss scales for `flax.serialization`

pytestmark = pytest.mark.ci


def pickled(run, target, folder):
    return pickle.loads(pickle.dumps(jax.device_get(run)))


def by_flax(run, target, folder):
    return flax.serialization.from_bytes(target, flax.serialization.to_bytes(run))


def by_orbax(run, target, folder):
    with warnings.catch_warnings(action="ignore"):
        ocp = pytest.importorskip("orbax.checkpoint")
        with ocp.CheckpointManager(folder) as manager:
            manager.save(4, args=ocp.args.StandardSave(run))
            manager.wait_until_finished()
            return manager.restore(4, args=ocp.args.StandardRestore(jax.eval_shape(lambda: target)))


DYNAMIC = jls.DynamicLossScale(8.0, 3, hysteresis=2)
SCHEDULED = optax.adamw(optax.linear_schedule(0.1, 0.0, 10))
# Each entry contains the inner optimizer, the loss scale and the dtype of the parameters.
RUNS = {
    "master weights": (jls.master_weights(jls.half_precision_state(optax.adam(1e-2))), DYNAMIC, BF16),
    "stochastic": (jls.stochastic_rounding(jls.half_precision_state(optax.adam(1e-2), seed=3), seed=5), DYNAMIC, BF16),
    "dynamic": (SCHEDULED, DYNAMIC, F32),
    "auto": (SCHEDULED, jls.AutoLossScale(8.0), F32),
    "fixed": (SCHEDULED, jls.FixedLossScale(8.0, skip_nonfinite=True), F32),
    "none": (SCHEDULED, None, F32),
}


@pytest.mark.parametrize(
    ("through", "name"),
    [*((by_orbax, name) for name in RUNS), *((way, name) for way in (pickled, by_flax) for name in tuple(RUNS)[:2])],
)
def test_run_restored_from_a_checkpoint_continues_bitwise_equal(through, name, tmp_path):
    inner, loss_scale, dtype = RUNS[name]
    tx, params = jls.loss_scaled(inner, loss_scale), params_in(dtype)
    step = jax.jit(tx.update_and_apply)

    def after(run, numbers):
        for number in numbers:
            grads = grads_at(number, params)
            if number == 2:  # Without a loss scale, the gradients are not checked, so `skip_if` skips this step.
                grads["bias"] = jnp.full(8, jnp.inf)
            run = step(grads, run[1], run[0], skip_if=number == 2)
        return run

    run = after((params, tx.init(params)), range(4))
    assert run[1].skipped_steps == 1
    restored = through(run, (params, tx.init(params)), tmp_path)
    assert isinstance(restored[1], jls.LossScaledState)
    assert_same_bits(restored, run)
    assert_same_bits(after(restored, range(4, 8)), after(run, range(4, 8)))


# --- A process that is killed ---


@functools.cache
def never_stopped():
    """Return the leaves, by name, before the first step and after each step."""
    runs = [checkpointed.beginning()]
    for step in range(STEPS):
        runs.append(checkpointed.train_step(runs[-1], checkpointed.batch_of(step)))
    return [checkpointed.leaves_by_name(run) for run in runs]


def kill_at_a_random_moment(folder, dice):
    """Start a run and kill it at a random time after its first checkpoint."""
    errors = folder / "first.stderr"
    # A checkpoint is started only after the previous one is complete, so at least one complete checkpoint exists at
    # this step.
    last_line = str(dice.randrange(2 * BETWEEN_CHECKPOINTS, WAITS_AT - BETWEEN_CHECKPOINTS))
    with started("checkpointed.py", folder, "wait", devices=1, errors=errors, stdout=PIPE) as process:
        lines = iter(process.stdout.readline, "")
        assert next(lines, "").strip() == "begins with 0", errors.read_text()
        assert any(line.strip() == last_line for line in lines), errors.read_text()
        time.sleep(dice.uniform(0, 0.03))
        process.kill()
        assert process.wait() == -signal.SIGKILL, errors.read_text()
    assert not (folder / RESULTS).exists()


def go_on_to_the_end(folder):
    """Resume the run until its end. Return the number of its first step."""
    errors = folder / "second.stderr"
    with started("checkpointed.py", folder, devices=1, errors=errors, stdout=PIPE) as process:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, errors.read_text()
    return int(output.splitlines()[0].removeprefix("begins with"))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
def test_run_resumed_after_a_kill_is_bitwise_equal(tmp_path):
    seed = random.randrange(2**32)
    print("seed", seed)  # pytest shows the seed if the test fails.
    kill_at_a_random_moment(tmp_path, random.Random(seed))
    first_step = go_on_to_the_end(tmp_path)
    assert first_step in range(BETWEEN_CHECKPOINTS, WAITS_AT + 1, BETWEEN_CHECKPOINTS)

    for name, expected in (BEGINNING, never_stopped()[first_step]), (RESULTS, never_stopped()[STEPS]):
        with np.load(tmp_path / name) as found:
            assert_same_bits(dict(found), expected)


def test_training_run_has_skipped_steps_and_scale_changes_throughout():
    """At every time when the run may be killed, there is state that could be lost."""
    scales = [float(leaves["state/loss_scale/current_loss_scale"]) for leaves in never_stopped()]
    skipped = [int(leaves["state/skipped_steps"]) for leaves in never_stopped()]
    for start in range(0, STEPS, 50):
        end = start + 50
        assert skipped[end] > skipped[start]
        assert any(scales[step] < scales[step + 1] for step in range(start, end))
        assert any(scales[step] > scales[step + 1] for step in range(start, end))
    assert all(np.isfinite(leaf).all() for leaf in never_stopped()[STEPS].values())


# --- The state of the previous version ---


def page_function(name):
    """Return a function that is defined in the page about checkpoints."""
    page = (Path(__file__).parents[2] / "docs" / "guide" / "checkpoints.md").read_text()
    (block,) = re.findall(rf"^```python\n(def {name}.*?)^```$", page, re.MULTILINE | re.DOTALL)
    exec(block, namespace := {"jax": jax})
    return namespace[name]


def nested(arrays, prefix):
    """Return arrays whose names are paths as nested dictionaries, as orbax restores them without a target."""
    chosen = {path.removeprefix(prefix): array for path, array in arrays.items() if path.startswith(prefix)}
    return flax.traverse_util.unflatten_dict(chosen, sep="/")


def test_state_of_version_0_7_can_be_continued():
    """The file contains a run of version 0.7.0: its state after 6 steps, and its parameters after 3 more steps."""
    arrays = dict(np.load(Path(__file__).parents[1] / "golden" / "state_of_version_0_7.npz"))
    tx = jls.loss_scaled(optax.adam(0.1), record_bad_steps=True)
    params = nested(arrays, "params/")
    state = page_function("from_version_0_7")(nested(arrays, "state/"), tx.init(params))
    assert (state.applied_steps, state.skipped_steps, state.loss_scale()) == (5, 1, 2.0**13)
    assert jls.diagnostics.explain(state, params).cause == "loss"

    def loss_fn(params, x):
        return jnp.mean((x @ params["kernel"] + params["bias"][None] - 1) ** 2)

    for number in range(6, 9):
        x = jnp.sin(jnp.arange(12.0).reshape(4, 3) + number)
        loss, grads = jls.value_and_scaled_grad(loss_fn, state)(params, x)
        params, state = tx.update_and_apply(grads, state, params, value=loss)
    chex.assert_trees_all_close(params, nested(arrays, "later_params/"), rtol=1e-6)
