"""The benchmarks' method: who takes a turn when, who takes part, and which results are written."""

import collections
import itertools
import re
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks import BENCHMARKS, ON_REQUEST
from benchmarks.isolation import Progress
from benchmarks.report import index
from benchmarks.timing import interleave

ROOT = Path(__file__).parent.parent
ROUNDS = 60
NAMES = ["a", "b", "c", "d"]


@pytest.fixture
def turns(monkeypatch):
    """The names of the contenders in the order of their steps, by seed; the clock says that each step is long."""
    clock = iter(range(1_000_000))
    monkeypatch.setattr("benchmarks.timing.time.perf_counter", lambda: next(clock))

    def run(seed=0):
        steps = []
        contenders = {name: lambda name=name: steps.append(name) for name in NAMES}
        timings = interleave(contenders, ROUNDS, Progress(lambda fraction, what: None), seed=seed)
        assert {name: len(seconds) for name, seconds in timings.seconds.items()} == dict.fromkeys(NAMES, ROUNDS)
        return steps[-2 * len(NAMES) * ROUNDS :]

    return run


def test_all_take_their_turn_in_every_round_each_after_an_untimed_step_of_its_own(turns):
    steps = turns()
    timed = steps[1::2]
    assert steps[::2] == timed
    for n in range(0, len(timed), len(NAMES)):
        assert sorted(timed[n : n + len(NAMES)]) == NAMES


def test_none_always_follows_the_same_one(turns):
    timed = turns()[1::2]
    follows = collections.Counter(itertools.pairwise(timed))
    for name in NAMES:
        for before in set(NAMES) - {name}:
            assert follows[before, name] >= ROUNDS / 10  # a rotation has all ROUNDS, or none
    assert len({tuple(timed[n : n + len(NAMES)]) for n in range(0, len(timed), len(NAMES))}) > len(NAMES)


def test_the_index_is_that_of_the_files():
    results = ROOT / "benchmarks" / "results"
    assert {path.stem for path in results.iterdir()} <= {*BENCHMARKS, *ON_REQUEST}
    assert (ROOT / "benchmarks" / "RESULTS.md").read_text() == index(results)


def test_the_extras_that_the_help_names_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    sources = [path.read_text() for path in (ROOT / "benchmarks").glob("*.py")]
    named = re.findall(r"extra `+([\w-]+)`", "\n".join([*sources, *BENCHMARKS.values()]))
    assert "bench-cuda" in named
    assert set(named) <= set(extras)


def test_every_contender_unscales_before_adam():
    pytest.importorskip("flax")
    pytest.importorskip("jmp")
    from benchmarks import peers

    params = {"kernel": jnp.ones(3)}
    scaled_grads = {"kernel": jnp.array([30.0, -40.0, 0.0]) * peers.LOSS_SCALE}
    for contender in (peers.OURS, peers.OURS_IN_TWO_CALLS, *peers.OTHER_KINDS, *peers.PEERS):
        _, adam_state = jax.jit(contender.apply)(contender.init(params), scaled_grads)
        leaves = jax.tree_util.tree_leaves_with_path(adam_state)
        (moment,) = (leaf for path, leaf in leaves if ".mu" in jax.tree_util.keystr(path))
        scaled_again = peers.LOSS_SCALE if contender is peers.FLAX else 1.0  # it scales what it is given itself
        # The first moment is a tenth of the gradients.
        assert float(jnp.linalg.norm(moment)) == pytest.approx(5.0 * scaled_again), contender
