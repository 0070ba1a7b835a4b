"""The evidence of whether gradients are scaled: its thresholds, step by step."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_lossscale._optax.scaling_evidence import ScalingEvidence, no_evidence, seem_unscaled, with_step

NAN = float("nan")


def evidence(scale, largest, num_steps, inverse_steps):
    return ScalingEvidence(*map(jnp.float32, (scale, largest)), *map(jnp.int32, (num_steps, inverse_steps)))


# (evidence before the step, scale of the step, largest gradient of the step, expected evidence after the step)
STEPS = {
    "the first step is stored": ((0, 0, 0, 0), 2**4, 0.5, (2**4, 0.5, 1, 0)),
    "gradients of zero are ignored": ((0, 0, 0, 0), 2**4, 0, (0, 0, 0, 0)),
    "nonfinite gradients are ignored": ((0, 0, 0, 0), 2**4, NAN, (0, 0, 0, 0)),
    "the second step does not replace the first one": ((2**4, 0.5, 1, 0), 2**9, 2.0**-6, (2**4, 0.5, 2, 0)),
    "growth of 7 bits is no evidence": ((2**4, 0.5, 3, 1), 2**11, 2.0**-8, (2**4, 0.5, 4, 1)),
    "growth of 7 bits, gradients 3 bits above the inverse": ((2**4, 0.5, 1, 0), 2**11, 2.0**-5, (2**4, 0.5, 2, 0)),
    "growth of 7 bits, gradients 4 bits above the inverse": ((2**4, 0.5, 1, 0), 2**11, 2.0**-4, (2**4, 0.5, 2, -10)),
    "growth of 6 bits, gradients 2 bits above the inverse": ((2**4, 0.5, 1, 0), 2**10, 2.0**-5, (2**4, 0.5, 2, 0)),
    "growth of 6 bits, gradients 3 bits above the inverse": ((2**4, 0.5, 1, 0), 2**10, 2.0**-4, (2**4, 0.5, 2, -10)),
    "growth of 8 bits, inverse": ((2**4, 0.5, 3, 1), 2**12, 2.0**-9, (2**4, 0.5, 4, 2)),
    "growth of 9 bits, inverse": ((2**4, 0.5, 3, 1), 2**13, 2.0**-10, (2**4, 0.5, 4, 2)),
    "gradients 3 bits above the inverse": ((2**4, 0.5, 3, 1), 2**12, 2.0**-6, (2**4, 0.5, 4, 2)),
    "gradients 3 bits below the inverse": ((2**4, 0.5, 3, 1), 2**12, 2.0**-12, (2**4, 0.5, 4, 2)),
    "gradients 4 bits above the inverse": ((2**4, 0.5, 3, 1), 2**12, 2.0**-5, (2**4, 0.5, 4, -9)),
    "gradients 4 bits below the inverse": ((2**4, 0.5, 3, 1), 2**12, 2.0**-13, (2**4, 0.5, 4, -9)),
    "gradients that do not depend on the scale": ((2**4, 0.5, 3, 0), 2**12, 0.5, (2**4, 0.5, 4, -10)),
    "the tenth step counts": ((2**4, 0.5, 9, 6), 2**12, 2.0**-9, (2**4, 0.5, 10, 7)),
    "later steps do not count": ((2**4, 0.5, 10, 7), 2**12, 0.5, (2**4, 0.5, 10, 7)),
}


@pytest.mark.parametrize("name", STEPS)
def test_evidence_after_a_step(name):
    before, scale, largest, expected = STEPS[name]
    after = with_step(evidence(*before), jnp.float32(scale), jnp.float32(largest))
    assert tuple(map(float, after)) == expected


def test_evidence_before_the_first_step():
    assert tuple(map(float, no_evidence())) == (0, 0, 0, 0)


# (inverse steps, number of steps of the run, log2 of the peak, largest gradient of the last step, expected result)
RUNS = {
    "all conditions hold": (6, 20, 0, 2.0**-12, True),
    "too few inverse steps": (5, 20, 0, 2.0**-12, False),
    "too few steps": (6, 19, 0, 2.0**-12, False),
    "gradients too close to the peak": (6, 20, 0, 2.0**-11, False),
    "gradients far from a higher peak": (6, 20, 13, 2.0, True),
    "gradients of zero": (6, 20, 0, 0, True),
    "a step contradicts": (9 - 10, 1000, 0, 2.0**-20, False),
}


def test_whether_gradients_seem_unscaled_for_each_member_of_an_ensemble():
    inverse_steps, num_steps, log2_peak, largest, expected = map(np.asarray, zip(*RUNS.values(), strict=True))
    ensemble = ScalingEvidence(jnp.ones(7), jnp.ones(7), jnp.full(7, 10), jnp.asarray(inverse_steps))
    found = seem_unscaled(ensemble, num_steps, log2_peak, largest)
    assert found.dtype == bool
    np.testing.assert_array_equal(found, expected)
