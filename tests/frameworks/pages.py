"""What a reader has after copying the first block of a page in `docs/frameworks`: the program that is tested here."""

import re
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np

PAGES = Path(__file__).parents[2] / "docs" / "frameworks"


def first_block(page):
    """The source of the first python block of a page."""
    return re.search(r"^```python\n(.*?)^```$", (PAGES / f"{page}.md").read_text(), re.MULTILINE | re.DOTALL)[1]


def copied(page):
    """The names that the first block defines, and what it has made of them."""
    namespace = {"__name__": page}
    exec(compile(first_block(page), f"docs/frameworks/{page}.md", "exec"), namespace)
    return SimpleNamespace(**{name: value for name, value in namespace.items() if not name.startswith("__")})


def assert_same_bits(tree, other):
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for leaf, expected in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        if hasattr(expected, "dtype") and jax.dtypes.issubdtype(expected.dtype, jax.dtypes.prng_key):
            leaf, expected = jax.random.key_data(leaf), jax.random.key_data(expected)
        np.testing.assert_array_equal(leaf, expected, strict=hasattr(expected, "dtype"))


def bad(batch, value=np.nan):
    """The same batch, with one number that is not finite."""
    return {**batch, "x": batch["x"].at[0, 0].set(value)}
