"""Grouping of small leaves into blocks before they are read. Each leaf is inspected a constant number of times."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_lossscale._measure.leaves import alike, blocks, large

pytestmark = pytest.mark.as_for_users


class Leaf:
    """An array that counts how often its `size` is read."""

    def __init__(self, size, dtype="float32"):
        self.array, self.num_reads = jnp.full(size, size, dtype), 0
        self.shape, self.dtype = self.array.shape, self.array.dtype

    @property
    def size(self):
        self.num_reads += 1
        return self.array.size

    def ravel(self):
        return self.array


@pytest.mark.ci
@pytest.mark.parametrize("number", [10, 100])
def test_size_of_each_small_leaf_is_read_once(number):
    leaves = [Leaf(3) for _ in range(number)]
    (block,) = blocks(leaves)
    assert block.size == 3 * number
    assert {leaf.num_reads for leaf in leaves} == {1}


def test_each_leaf_is_either_in_one_block_or_large():
    leaves = [jnp.full(size, n, dtype) for n, size in enumerate((2**15, 2**15 + 1, 7)) for dtype in ("float32",) * 9]
    halves = [jnp.zeros(5, jnp.float16)]
    found = list(blocks([*leaves, *halves]))
    assert [block.dtype for block in found] == ["float32", "float32", "float16"]
    assert found[0].size == 8 * 2**15  # The block contains as many leaves as fit.
    expected = jnp.concatenate([leaf for leaf in leaves if leaf.size <= 2**15])
    np.testing.assert_array_equal(jnp.concatenate(found[:2]), expected)
    assert [leaf.size for leaf in large(leaves)] == [2**15 + 1] * 9
    assert [len(group) for group in alike(large(leaves), 4)] == [4, 4, 1]
