"""Non-finite leaves: the report on the host, and the index of the first such leaf in a compiled step."""

from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from any_jax import enable_x64
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from samples import FLOATS, INF, NAN, random_bits

from jax_lossscale._measure import first_fault
from jax_lossscale.diagnostics import nonfinite_report
from jax_lossscale.diagnostics._report import Report

pytestmark = pytest.mark.usefixtures("strict_promotion")


# Reports on non-finite leaves.

GRADS = {
    "block1": {"bias": [0.0, 1.0], "kernel": [[1.0, -2.0], [3.0, 4.0]]},
    "block3": {"kernel": [[1.0, 7.0, -INF], [INF, NAN, INF]]},
    "head": [NAN, NAN],
    "steps": 3,
}


def as_arrays(tree):
    return jax.tree.map(jnp.asarray, tree, is_leaf=lambda node: isinstance(node, list))


def test_report_lists_every_leaf_with_the_worst_first():
    report = nonfinite_report(as_arrays(GRADS))
    assert [(leaf.path, leaf.nan, leaf.posinf, leaf.neginf, leaf.largest_finite) for leaf in report] == [
        ("['head']", 2, 0, 0, None),
        ("['block3']['kernel']", 1, 2, 1, 7.0),
        ("['block1']['kernel']", 0, 0, 0, 4.0),
        ("['block1']['bias']", 0, 0, 0, 1.0),
    ]
    assert [leaf.first_bad_index for leaf in report] == [(0,), (0, 2), None, None]
    assert [leaf.share for leaf in report] == [1.0, 4 / 6, 0.0, 0.0]
    assert (report[1].shape, report[1].dtype, report[1].nonfinite) == ((2, 3), "float32", 4)
    assert report.bad == report[:2]
    assert len(report) == 4


PRINTED = """\
2 of 4 leaves are not finite.
leaf                  dtype     shape  NaN  +inf  -inf    share  largest finite  first at
['head']            float32       [2]    2     0     0  100.00%            none       [0]
['block3']['kernel']  float32  [2, 3]    1     2     1   66.67%               7    [0, 2]"""


def test_report_is_printed_as_a_table_of_the_non_finite_leaves():
    printed = str(nonfinite_report(as_arrays(GRADS)))
    assert [line.split() for line in printed.splitlines()] == [line.split() for line in PRINTED.splitlines()]


class WithNotes(Report):
    def _header(self):
        return "One <b> is\nbad & worse."

    def _rows(self):
        return [["name", "kind", "size"], ["<script>", "a & b", "3"]]

    def _notes(self):
        return ["[1] Look.", "[2] Fix <it>."]


def read(report):
    """Return the rows of the table in the HTML of a report, and the texts around the table."""
    body = ElementTree.fromstring(f"<body>{report._repr_html_()}</body>")
    assert {element.tag for element in body.iter()} <= {"body", "div", "table", "tr", "th", "td"}
    rows = [[cell.text or "" for cell in row] for row in body.iter("tr")]
    return rows, [element.text for element in body.iter("div")]


def test_html_report_is_a_table_between_summary_and_notes():
    rows, around = read(WithNotes())
    assert rows == WithNotes()._rows()
    assert around == ["One <b> is\nbad & worse.", "[1] Look.\n[2] Fix <it>."]
    report = nonfinite_report({"<script>": jnp.array([NAN]), "fine": jnp.ones(1)})
    assert read(report)[0] == [list(row) for row in report._rows()]
    rows, around = read(nonfinite_report({"fine": jnp.ones(1)}))
    assert (rows, len(around)) == ([], 1)


NOTHING_BAD = {
    "all finite": ({"a": [1.0, -8.0], "b": [3.0]}, "All 2 leaves are finite; the largest magnitude, 8, is in ['a']."),
    "empty leaves": ({"a": []}, "All 1 leaves are finite."),
    "no leaves": ({"a": 3}, "There are no floating-point or complex leaves."),
}


@pytest.mark.parametrize(("tree", "summary"), NOTHING_BAD.values(), ids=NOTHING_BAD)
def test_summary_if_all_leaves_are_finite(tree, summary):
    assert str(nonfinite_report(as_arrays(tree))) == summary


def test_complex_number_counts_once_for_its_worst_part():
    values = np.array([complex(NAN, INF), complex(INF, -INF), complex(1, -INF), complex(3, -5)], np.complex64)
    (leaf,) = nonfinite_report(jnp.asarray(values))
    assert (leaf.nan, leaf.posinf, leaf.neginf, leaf.largest_finite) == (1, 1, 1, 5.0)


def test_report_inside_jit_raises_an_error():
    with pytest.raises(ValueError, match="record_bad_steps=True"):
        jax.jit(nonfinite_report)(jnp.ones(2))


@pytest.mark.ci
@settings(deadline=None, max_examples=40)
@given(
    npst.arrays(
        np.float32,
        npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
        elements=st.sampled_from([0.0, -1.5, float(np.float32(3e38)), NAN, INF, -INF]),
    )
)
def test_report_agrees_with_numpy(values):
    (leaf,) = nonfinite_report([jnp.asarray(values)])
    bad = ~np.isfinite(values)
    counts = [int(question(values).sum()) for question in (np.isnan, np.isposinf, np.isneginf)]
    assert [leaf.nan, leaf.posinf, leaf.neginf] == counts
    finite = np.abs(values[~bad])
    assert leaf.largest_finite == (float(finite.max()) if finite.size else None)
    assert leaf.first_bad_index == (tuple(map(int, np.argwhere(bad)[0])) if bad.any() else None)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_dtype_is_supported(x64, dtype):
    values = random_bits(dtype)
    with np.errstate(over="ignore"), enable_x64(x64):
        exact = values.astype(np.float64 if x64 else np.float32)
        (leaf,) = nonfinite_report([jnp.asarray(values)])
    assert leaf.nan == np.isnan(exact).sum()
    assert leaf.posinf == np.isposinf(exact).sum()
    if x64 or dtype != "float64":
        assert leaf.largest_finite == np.abs(exact[np.isfinite(exact)]).max()


# The first non-finite leaf, inside `jax.jit`.

FIRST = {
    # Each entry contains a tree, the index of its first non-finite leaf, and whether this leaf contains a NaN.
    "finite": ({"a": [1.0], "b": [2.0]}, -1, False),
    "the second": ({"a": [1.0], "b": [2.0, INF], "c": [NAN]}, 1, False),
    "a NaN after an infinity": ({"a": [1.0], "b": [INF, NAN]}, 1, True),
    "integers are counted but not checked": ({"a": 3, "b": [NAN]}, 1, True),
    "None is counted": ({"a": None, "b": [NAN]}, 1, True),
    "no leaf is checked": ({"a": 3}, -1, False),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(("tree", "index", "is_nan"), FIRST.values(), ids=FIRST)
def test_first_nonfinite_leaf(tree, index, is_nan, compiled):
    def find(tree):
        return first_fault(tree, None)

    found, has_nan = (jax.jit(find) if compiled else find)(as_arrays(tree))
    assert (found, found.dtype, found.shape) == (index, jnp.int32, ())
    assert has_nan == is_nan


def test_devices_of_a_shard_map_agree_on_the_first_nonfinite_leaf():
    mesh = jax.make_mesh((8,), ("shard",), axis_types=(jax.sharding.AxisType.Auto,))
    values = np.ones((2, 8), np.float32)
    values[1, 3] = NAN
    specs = {"in_specs": jax.P("shard"), "out_specs": jax.P()}
    find = jax.shard_map(lambda leaves: first_fault(leaves, "shard"), mesh=mesh, **specs)
    assert jax.jit(find)([*values]) == (1, True)
