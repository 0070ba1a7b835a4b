"""Random programs (`tools/random_programs.py`) under `autocast` have the results of float32, except for rounding."""

import pytest
from any_jax import needs_jax
from random_programs import BITS, EXPLAINED, compared

pytestmark = needs_jax("0.10.0", "some of the operations do not exist")


MARKS = [(), *9 * [pytest.mark.slow]]
TENS = [pytest.param(10 * n, marks=marks) for n, marks in enumerate(MARKS)]


@pytest.mark.parametrize("first", TENS)
def test_random_programs_equal_float32_except_for_rounding(first):
    """The first of ten programs is evaluated without `jax.jit`."""
    records = [compared(n, [*BITS][n % len(BITS)], is_jitted=n > first) for n in range(first, first + 10)]
    assert [record for record in records if record["outcome"] not in EXPLAINED] == []
    assert sum(record["outcome"] == "invalid" for record in records) <= 3
