"""Access to the program in the first code block of each page in `docs/frameworks`, which the tests run."""

import re
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np

PAGES = Path(__file__).parents[2] / "docs" / "frameworks"


def copied(page):
    """Execute the first Python block of a page and return the names that it defines."""
    path = PAGES / f"{page}.md"
    source = re.search(r"^```python\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)[1]
    namespace = {"__name__": page}
    exec(compile(source, path, "exec"), namespace)
    return SimpleNamespace(**{name: value for name, value in namespace.items() if not name.startswith("__")})


def assert_same_bits(tree, other):
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for leaf, expected in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        if hasattr(expected, "dtype") and jax.dtypes.issubdtype(expected.dtype, jax.dtypes.prng_key):
            leaf, expected = jax.random.key_data(leaf), jax.random.key_data(expected)
        np.testing.assert_array_equal(leaf, expected, strict=hasattr(expected, "dtype"))


def bad(batch, value=np.nan):
    """Return a copy of the batch with one nonfinite element."""
    return {**batch, "x": batch["x"].at[0, 0].set(value)}
