"""A run that is resumed from a checkpoint is bitwise equal to a run that was never interrupted."""

import functools
import random
import signal
import sys
import time
from subprocess import PIPE

import numpy as np
import pytest
from programs import checkpointed
from programs.checkpointed import BEGINNING, BETWEEN_CHECKPOINTS, RESULTS, STEPS, WAITS_AT
from programs.starting import started

pytestmark = pytest.mark.ci


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
            assert set(found) == set(expected)
            for leaf in expected:
                assert found[leaf].dtype == expected[leaf].dtype
                assert found[leaf].tobytes() == expected[leaf].tobytes(), f"{name}: {leaf}"


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
