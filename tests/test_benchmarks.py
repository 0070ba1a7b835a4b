"""The benchmarks' method: who takes a turn when, who takes part, and what ``python -m benchmarks --help`` says."""

import collections
import itertools
import os
import re
import time
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks import BENCHMARKS, ON_REQUEST
from benchmarks.__main__ import main
from benchmarks.isolation import Progress, call_apart, run_apart
from benchmarks.report import Mark, Table, as_markdown, columns, index, marks_as_markdown
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


def test_each_is_timed_right_after_an_untimed_step_of_its_own(turns):
    steps = turns()
    assert steps[::2] == steps[1::2]


def test_all_take_their_turn_in_every_round(turns):
    timed = turns()[1::2]
    for n in range(0, len(timed), len(NAMES)):
        assert sorted(timed[n : n + len(NAMES)]) == NAMES


def test_none_always_follows_the_same_one(turns):
    timed = turns()[1::2]
    follows = collections.Counter(itertools.pairwise(timed))
    for name in NAMES:
        for before in set(NAMES) - {name}:
            assert follows[before, name] >= ROUNDS / 10  # a rotation has all ROUNDS, or none
    assert len({tuple(timed[n : n + len(NAMES)]) for n in range(0, len(timed), len(NAMES))}) > len(NAMES)


def test_the_order_is_that_of_the_seed(turns):
    assert turns() == turns()
    assert turns(seed=1) != turns(seed=2)


def test_tables_are_markdown_that_a_terminal_shows():
    heads = columns("step | median {:.1f} ms | over bare {:.2f} | spread")
    assert heads == (("step", "{}"), ("median", "{:.1f} ms"), ("over bare", "{:.2f}"), ("spread", "{}"))
    rows = [("bare", 2.0, 1.0, "1 to 1"), ("a | b", 20.25, None, "")]
    marks = [Mark("fast", 1.25, 1.2, note="late"), Mark("copies", 0, 0, exactly=True), Mark("unseen", None, 1.0)]
    table = Table("Steps", heads, rows, marks, ["A note."], quick=True)
    assert table.as_markdown() == [
        "### Steps (quick)",
        "",
        "| step   |  median | over bare | spread |",
        "| ------ | ------: | --------: | -----: |",
        "| bare   |  2.0 ms |      1.00 | 1 to 1 |",
        "| a \\| b | 20.2 ms |         - |        |",
        "",
        "A note.",
        "",
    ]
    assert Table("Nothing", heads, (), marks).as_markdown() == []
    assert [mark.as_text(quick) for mark, quick in zip(marks, (False, True, True), strict=True)] == [
        ("fast", "1.25", "<= 1.20", "not met", "late"),
        ("copies", "0", "= 0", "met (quick)", ""),
        ("unseen", "not measured", "<= 1.00", "-", ""),
    ]
    assert "| fast   |         1.25 | <= 1.20 | not met (quick) | late |" in marks_as_markdown([table])


def test_the_index_has_the_date_and_the_marks_of_each_file(tmp_path):
    steps = Table("Steps", columns("step | median"), [("bare", "1 ms")], [Mark("fast", 1.25, 1.2)])
    for name, tables in ("speed", [steps]), ("accuracy", [Table("Ends", columns("arm"), [("float32",)])]):
        about = {"command": f"python -m benchmarks {name}", "date": f"the day of {name}", "processor": "a fast one"}
        (tmp_path / f"{name}.md").write_text(as_markdown(name, tables, about))
    found = [section.splitlines() for section in index(tmp_path).split("\n## ")[1:]]
    folder = tmp_path.name
    assert found == [
        [f"[accuracy]({folder}/accuracy.md), the day of accuracy", "", "No marks."],
        [f"[speed]({folder}/speed.md), the day of speed", "", *marks_as_markdown([steps])[:-1]],
    ]


def test_the_index_is_that_of_the_files():
    results = ROOT / "benchmarks" / "results"
    assert {path.stem for path in results.iterdir()} <= {*BENCHMARKS, *ON_REQUEST}
    assert (ROOT / "benchmarks" / "RESULTS.md").read_text() == index(results)


@pytest.mark.parametrize("part", [["--quick"]], ids=" ".join)
def test_results_are_of_whole_benchmarks(part, capsys):
    with pytest.raises(SystemExit):
        main(["autocast", *part, "--results"])
    assert "leave out --quick" in capsys.readouterr().err


def test_what_fails_apart_is_told():
    failed = run_apart("no_such_benchmark", False, {})
    assert isinstance(failed, str)
    assert "No module named 'benchmarks.no_such_benchmark'" in failed
    assert call_apart(pow, 2, 10, timeout=60) == 1024
    assert call_apart(os._exit, 1, timeout=60) is None
    assert call_apart(time.sleep, 60, timeout=0.5) is None


def test_the_extras_that_the_help_names_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    sources = [path.read_text() for path in (ROOT / "benchmarks").glob("*.py")]
    named = re.findall(r"extra `+([\w-]+)`", "\n".join([*sources, *BENCHMARKS.values()]))
    assert "bench-cuda" in named
    assert set(named) <= set(extras)


def test_the_transformer_whose_training_step_is_compiled_has_195_leaves_and_learns():
    pytest.importorskip("flax")
    pytest.importorskip("jmp")
    from benchmarks import models

    params, _ = jax.eval_shape(lambda: models.transformer(12, width=256, batch=4, context=128))
    assert len(jax.tree.leaves(params)) == 195

    params, text = models.transformer(1, width=16, batch=2, context=8)
    with jax.numpy_rank_promotion("allow"):
        grads = jax.jit(jax.grad(models.transformer_loss(jnp.float32, heads=2)))(params, text)
    del grads["layers"][0]["key"]["bias"]  # adds the same to all logits of a query, which changes nothing
    assert all(jnp.any(leaf != 0) for leaf in jax.tree.leaves(grads))


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
