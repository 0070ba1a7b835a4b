"""Legends and axis labels of the benchmark figures on the pages."""

from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.accuracy import page
from benchmarks.harness.report import Table
from benchmarks.policies import figure
from benchmarks.policies.replay import Group

pytestmark = pytest.mark.ci
pytest.importorskip("matplotlib")

SETTINGS = ["bfloat16", "float16", "float16, fixed", "float16, dynamic", "float16, auto", "autocast, auto"]


def test_accuracy_legend_has_the_names_of_its_table():
    headings = ["workload", "noise floor", *SETTINGS]
    summary = Table("", [(heading, "{}") for heading in headings], [("gru", 0.5, *["noise"] * len(SETTINGS))])
    details = Table("", [("workload", ""), ("setting", ""), ("seed 0", "")], [("gru", name, 1.0) for name in SETTINGS])
    drawn = page.draw(summary, details)
    (legend,) = drawn.legends
    table = next(line for line in page._for_the_page(summary).as_markdown() if "workload" in line)
    names = [cell.strip().replace("`", "") for cell in table.strip("|").split("|")][2:]
    assert [text.get_text() for text in legend.get_texts()] == names
    assert "float16, fixed" not in names


def test_labels_of_symlog_axes_contain_logarithmic():
    summary = Table("", [("workload", ""), ("noise floor", ""), ("bfloat16", "")], [("gru", 0.5, "noise")])
    details = Table("", [("workload", ""), ("setting", ""), ("seed 0", "")], [("gru", "bfloat16", 1.0)])
    trace = SimpleNamespace(log2_largest=np.zeros(1000))
    judged = SimpleNamespace(unused_bits=np.array([2.0]), skipped=np.array([1]))
    group = Group("ten trainings", [trace], {"auto": judged}, {})
    axes = [*page.draw(summary, details).axes, *figure.draw([group]).axes]
    assert {ax.get_xscale() for ax in axes} == {"linear", "symlog"}
    for ax in axes:
        assert ("logarithmic" in ax.get_xlabel()) == (ax.get_xscale() == "symlog")
