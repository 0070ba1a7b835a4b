"""`benchmarks.policies`: the rules of others step by step, how one is judged, and what `AutoLossScale` does there."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jax_lossscale as jls
from benchmarks.policies.comparators import HistogramLossScale, LogMaxLossScale, ToleranceLossScale
from benchmarks.policies.constants import NEEDS
from benchmarks.policies.contenders import BEST_FIXED, contenders
from benchmarks.policies.judge import best_fixed, judge, unused_bits
from benchmarks.policies.traces import Trace, events, hostile, mixtures, of_one_length, synthetic
from benchmarks.policies.trainings import all_trainings, trained


def constant(log2_largest, steps=8, inside=0.0):
    return Trace("constant", np.full(steps, float(log2_largest)), np.full(steps, inside), 0.0)


# --- The rules of others ---


def scales_after(loss_scale, events):
    """After each event: T, F, or the largest gradient of a finite step."""
    adjust = jax.jit(type(loss_scale).adjust)
    scales = []
    for event in events:
        finite = event != "F"
        measured = {"largest": np.float32(event if finite else np.nan)} if loss_scale.needs_largest else {}
        loss_scale = adjust(loss_scale, finite, **measured)
        scales.append(float(loss_scale()))
    return scales


@pytest.mark.parametrize(
    ("window", "tolerance", "flags", "scales"),
    [
        (3, 0.25, "TTTTTT", [8, 8, 16, 16, 16, 32]),
        (3, 0.25, "TTTFTTT", [8, 8, 16, 8, 8, 8, 16]),  # one overflow of one step since it grew
        (100, 0.25, "TTTTFFTTTF", [8, 8, 8, 8, 8, 4, 4, 4, 4, 2]),  # 1 of 5, 2 of 6; since then 1 of 4
        (100, 0.0, "TTTTFF", [8, 8, 8, 8, 4, 2]),  # the classic rule
        # An overflow that was borne, 1 of 5, is still counted after growth: 2 of 6.
        (8, 0.25, "TTTTF" + "TTTTTTTT" + "TTTTTF", [8] * 12 + [16] * 6 + [8]),
    ],
)
def test_tolerance(window, tolerance, flags, scales):
    loss_scale = ToleranceLossScale(window, tolerance, current_loss_scale=np.float32(8.0))
    assert scales_after(loss_scale, flags) == scales


def test_log_max_is_as_many_deviations_below_the_top_and_has_the_faults_that_were_published():
    assert scales_after(LogMaxLossScale(), [2.0**-4] * 3) == pytest.approx([2.0**20] * 3, rel=1e-3)
    # log2 is 0 and 2 in turn: its mean is 1 and its deviation 1.
    scales = scales_after(LogMaxLossScale(), [1.0, 4.0] * 1500)
    assert np.log2(scales[-2:]) == pytest.approx(16 - 1 - 3.09, abs=0.02)
    after_one_overflow = scales_after(LogMaxLossScale(), [2.0**-4] * 10 + ["F"] + [2.0**-4] * 3000)
    assert set(after_one_overflow[10:]) == {1.0}
    assert np.isnan(scales_after(LogMaxLossScale(), [1.0, 0.0, 1.0, 1.0])).tolist() == [False, True, True, True]


def test_histogram_moves_at_every_step_and_looks_inside():
    # An eighth of 65504 is 8188: 2**-3 * 2**16 is above.
    assert scales_after(HistogramLossScale(), [2.0**-3] * 4 + ["F"]) == [2.0**16, 2.0**15, 2.0**16, 2.0**15, 2.0**14]
    assert scales_after(HistogramLossScale(), [0.0] * 3) == [2.0**16, 2.0**17, 2.0**18]
    # By the largest gradient alone it would double at every step until the next overflow.
    assert judge(HistogramLossScale(), [constant(-10, steps=400, inside=10.0)]).skipped.item() == 0


# --- Judging ---


def test_what_is_judged():
    traces = [
        constant(0),  # at 2**10 six powers of two are free, less than the bit that 65504 lacks of 2**16
        constant(-2),  # one bit too far away to have arrived
        constant(8),
        constant(0, inside=7.0),
    ]
    judged = judge(jls.FixedLossScale(2.0**10), traces)
    assert judged.skipped.tolist() == [0, 0, 8, 8]
    assert judged.unused_bits[:2] == pytest.approx([np.log2(65504) - 10, np.log2(65504) - 8])
    assert np.isnan(judged.unused_bits[2:]).all()
    assert judged.steps_to_arrive.tolist() == [0, 8, 8, 8]


def test_steps_whose_gradients_are_all_zero_are_skipped_by_none_and_not_counted():
    zero_at_first = Trace("zero", np.array([-np.inf, -np.inf, 0.0, 0.0]), np.zeros(4), 0.0)
    for initial, skipped, arrives in (2.0**17, 2, 2), (2.0**15, 0, 0):
        judged = judge(jls.DynamicLossScale(initial), [zero_at_first])
        assert (judged.skipped.item(), judged.steps_to_arrive.item()) == (skipped, arrives)


@pytest.mark.parametrize("make", [jls.AutoLossScale, jls.DynamicLossScale], ids=lambda make: make.__name__)
def test_what_follows_the_end_of_a_trace_is_not_judged(make):
    traces = [constant(-3, steps=20, inside=2.0), constant(4, steps=50)]
    together = judge(make(), of_one_length(traces))
    for number, trace in enumerate(traces):
        for both, alone in zip(together, judge(make(), [trace]), strict=True):
            assert both[number] == pytest.approx(alone[0], rel=1e-9)


def test_the_best_fixed_scale_overflows_once_in_500_steps_and_at_every_scale_where_all_do():
    trace = Trace("two", np.repeat([-4.0, 0.0], [998, 2]), np.zeros(1000), 0.0)
    assert best_fixed(trace) == 2.0**19  # 2**-4 * 2**20 overflows
    assert best_fixed(trace._replace(log2_inside=np.repeat([0.0, 1.0, 0.0], [3, 1, 996]))) == 2.0**18
    assert judge(contenders()[BEST_FIXED](trace), [trace]).skipped.item() == 2
    nan = Trace("NaN", np.zeros(1000), np.repeat([0.0, np.inf], [990, 10]), 0.0)
    assert best_fixed(nan) == 2.0**15
    assert judge(jls.FixedLossScale(2.0**15), [nan]).skipped.item() == 0


def test_every_contender_takes_a_step_on_every_synthetic_kind():
    for trace in synthetic(50, 1) + mixtures(50) + events(50):
        for name, make in contenders().items():
            assert make(trace)().shape == (), name


# --- What `AutoLossScale` does with them ---


# One in 50 or 100 that is 2^16 larger costs more skipped steps than one in 500.
HARD = [trace for trace in mixtures(20_000) + events(4_000) if not trace.kind.startswith(("1 in 50", "1 in 100"))]


@pytest.mark.parametrize("trace", HARD, ids=lambda trace: trace.kind)
def test_auto_skips_few_and_stays_near_the_best_fixed_scale(trace):
    """Where sizes are mixed, and whatever happens in a run, beside a scale that nobody could have known before."""
    ours, fixed = judge(jls.AutoLossScale(), [trace]), judge(contenders()[BEST_FIXED](trace), [trace])
    assert ours.skipped.item() <= len(trace.log2_largest) / 500
    assert ours.unused_bits.item() - fixed.unused_bits.item() <= 3


@pytest.mark.slow  # the rule compiled anew with another number, and again
@pytest.mark.parametrize("need", NEEDS, ids=lambda need: f"{need.constant}={need.instead:.3g}")
def test_every_number_of_the_rule_has_a_trace_that_needs_it(need):
    assert need.measured() <= need.limit < need.measured_instead()
    assert need.measured() <= need.limit  # it is put back


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_whatever_comes_auto_stays_near_the_best_fixed_scale(seed):
    """From 2,000 steps on; the best is the highest at which one in 500 real gradients overflows."""
    trace = hostile(np.random.default_rng(seed), 3000)
    unused, skipped = unused_bits(jls.AutoLossScale(), [trace])
    first = trace.log2_first
    real = np.sort(first[np.isfinite(first)])[::-1]
    applied = np.isfinite(unused[:, 0]) & (np.arange(3000) >= 2000)
    bits_below = first[applied] + unused[applied, 0] - real[len(real) // 500]
    assert bits_below.size == 0 or (np.percentile(bits_below, 95) <= 32 and np.max(bits_below) <= 50)
    assert skipped.sum() <= 20 + 0.6 * len(real)


@pytest.mark.slow  # four trainings
@pytest.mark.parametrize("name", ["digits, NaN every 30th step", "digits, 9 of 10 batches masked out"])
def test_no_training_is_lost(name):
    """Two of the trainings of the benchmark, shortened: where some gradients are NaN, and where most are zero."""
    training = all_trainings()[name]._replace(steps=1000)
    (loss,), (skipped,) = trained(training, "auto", 1)
    (expected,), (bad,) = trained(training, "float32", 1)
    assert loss <= 1.05 * expected + 0.01
    assert skipped <= bad + 3
