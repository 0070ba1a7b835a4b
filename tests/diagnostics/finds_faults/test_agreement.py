"""The verdict of `compare_gradients` and the list of `range_report` do not contradict each other."""

import re

import faults
import pytest
import workloads
from kinds import slow_except
from test_compare_gradients import KNOWN

from jax_lossscale.diagnostics import compare_gradients, range_report

pytestmark = pytest.mark.ci

PROGRAMS = faults.FAULTS | faults.SOUND | {name: getattr(workloads, name)() for name in KNOWN}
QUICK = ("healthy", "tiny_loss", "square_too_large", "rounded_away", "layer_norm", "cosines_of_small_vectors")


@pytest.mark.parametrize("name", slow_except(QUICK, PROGRAMS))
@pytest.mark.usefixtures("in_the_checkout")
def test_verdict_agrees_with_the_list_of_operations(name):
    fun, *args = PROGRAMS[name]
    verdict = compare_gradients(fun, *args, loss_scales=[2.0**8]).verdict
    report = range_report(fun, *args, loss_scale=2.0**8)
    assert not any("jax_lossscale" in operation.source for operation in report)
    harmful = [operation for operation in report.bad if operation.changes_result]
    assert list(report[: len(harmful)]) == harmful  # Harmful operations are listed first.
    if "will work" in verdict and "However, the loss" not in verdict:
        assert harmful == []
    named = re.search(r"`([\w-]+)`(?: in [^(]*)? \((tests/[^:]*:\d+)", verdict)
    if named:
        worst = report[0]
        assert (worst.derivative_of or worst.operation, worst.source) == named.groups()
    if "No loss scale" in verdict:
        assert not report[0].is_backward
    if "underflow" in verdict and "Compare larger loss scales" in verdict:
        assert "Use a larger loss scale" in next(operation.suggestion for operation in report if operation.is_backward)
