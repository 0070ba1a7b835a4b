"""Properties that all report classes share."""

import dataclasses

import pytest

from jax_lossscale import diagnostics
from jax_lossscale.diagnostics import _gradient_errors, _lost_updates, _nonfinite, _operations, _range_report

REPORTS = [thing for name in diagnostics.__all__ if dataclasses.is_dataclass(thing := getattr(diagnostics, name))]
MODULES = _gradient_errors, _lost_updates, _nonfinite, _operations, _range_report
ENTRIES = [thing for module in MODULES for thing in vars(module).values() if dataclasses.is_dataclass(thing)]


@pytest.mark.parametrize("kind", dict.fromkeys([*REPORTS, *ENTRIES]))
def test_fields_are_keyword_only(kind):
    """A later version can then add a field at any position."""
    with pytest.raises(TypeError, match="takes 1 positional argument but 2 were given"):
        kind(None)
