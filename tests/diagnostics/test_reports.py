"""Properties that all report classes share."""

import dataclasses

import pytest

from jax_lossscale import diagnostics
from jax_lossscale.diagnostics._gradient_errors import LeafGradientError
from jax_lossscale.diagnostics._lost_updates import LeafLostUpdates
from jax_lossscale.diagnostics._nonfinite import LeafReport
from jax_lossscale.diagnostics._operations import OperationPrecision
from jax_lossscale.diagnostics._range_report import OperationRange

EXPORTED = [getattr(diagnostics, name) for name in diagnostics.__all__]
REPORTS = [thing for thing in EXPORTED if dataclasses.is_dataclass(thing)]
ENTRIES = [LeafGradientError, LeafLostUpdates, LeafReport, OperationPrecision, OperationRange]


def test_every_report_is_exported():
    assert {report.__name__ for report in REPORTS} == {
        "AutocastReport",
        "Explanation",
        "ExponentHistogram",
        "GradientComparison",
        "LostUpdates",
        "NonfiniteReport",
        "PrecisionReport",
        "RangeReport",
    }


@pytest.mark.parametrize("kind", [*REPORTS, *ENTRIES])
def test_fields_are_keyword_only(kind):
    """A later version can then add a field at any position."""
    assert all(field.kw_only for field in dataclasses.fields(kind))
    with pytest.raises(TypeError, match="positional argument"):
        kind(None)


@pytest.mark.parametrize("kind", REPORTS)
def test_docstring_states_that_only_the_library_creates_reports(kind):
    assert "are created only by this library. Their attributes are guaranteed" in " ".join(kind.__doc__.split())
