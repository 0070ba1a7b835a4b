"""Numbers that pages take from ``benchmarks/results`` are those that stand there."""

import re
from pathlib import Path

from benchmarks import BENCHMARKS, ON_REQUEST
from benchmarks.report import index

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def rows(path, heading):
    """The cells of the first table below a heading."""
    lines = re.search(r"(?:^\|.*\n)+", path.read_text().partition(heading)[2], re.MULTILINE)[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def number(cell):
    return float(re.match(r"[\d.]+", cell)[0])


def test_what_is_predicted_for_an_h100():
    predicted = {
        (model, loss): (number(time), number(temporaries))
        for model, loss, time, _, temporaries, *_ in rows(RESULTS / "autocast.md", "### Training steps for an H100")
    }
    told = rows(ROOT / "docs" / "performance.md", "## Is it faster than float32?")
    assert [model for model, *_ in told] == [model for model, loss in predicted if loss == "autocast"]
    for model, *cells in told:
        ours, whole, by_hand = (predicted[model, loss] for loss in ("autocast", "float32", "by hand"))
        ratios = ours[0] / whole[0], ours[0] / by_hand[0], ours[1] / whole[1], ours[1] / by_hand[1]
        assert [f"{ratio:.2f}" for ratio in ratios] == cells, model


def test_what_the_readme_begins_with():
    start = " ".join((ROOT / "README.md").read_text().partition("```python")[0].split())
    told = rows(ROOT / "docs" / "performance.md", "## Is it faster than float32?")
    time, temporaries = [sorted(float(row[column]) for row in told) for column in (1, 3)]
    assert f"need {temporaries[0]} to {temporaries[-1]} of float32's temporary memory" in start
    assert f"{time[0]} to {time[-1]} of its time" in start
    ours = rows(ROOT / "README.md", "## What it costs")[0]
    assert "auto" in ours[0]
    assert f"[{number(ours[1])} times as long]" in start


# The row of README: that of the benchmark.
CONTENDERS = {
    '`update_and_apply`, `"auto"`': "ours, update_and_apply, 'auto'",
    '`update_and_apply`, `"dynamic"`': "ours, update_and_apply",
    "`optax.apply_if_finite`, with a loss scale by hand": "apply_if_finite",
    "jmp": "jmp",
    "flax": "flax",
}


def test_what_the_step_costs():
    told = {row[0]: row[1:] for row in rows(ROOT / "README.md", "## What it costs")}
    assert told.keys() == CONTENDERS.keys()
    for place, gradients in enumerate(["float32 gradients", "float16 gradients"]):
        measured = {
            row[0]: (row[3], *row[4].split(" to ")) for row in rows(RESULTS / "optimizer.md", f"leaves, {gradients}")
        }
        for name, contender in CONTENDERS.items():
            median, first, third = measured[contender]
            assert told[name][place].partition(",")[0] == f"{median} ({first} to {third})", name


def test_what_moves_between_devices():
    moved = {(layout, way): number(cells[5]) for layout, way, *cells in rows(RESULTS / "collectives.md", "### Coll")}
    told = rows(ROOT / "docs" / "guide" / "devices.md", "## What `jls.autocast` moves")
    ways = ("by hand", "autocast", "autocast, recompute=False", "autocast, table cast")
    assert len(told) == 4
    for layout, *cells in told:
        assert [f"{moved[layout, way]:.0f}" for way in ways] == cells, layout


def test_the_index_is_that_of_the_files():
    assert {path.stem for path in RESULTS.iterdir()} <= {*BENCHMARKS, *ON_REQUEST}
    assert (ROOT / "benchmarks" / "RESULTS.md").read_text() == index(RESULTS)
