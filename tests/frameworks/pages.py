"""Access to the program in the first code block of each page in `docs/frameworks`, which the tests run."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np

PAGES = Path(__file__).parents[2] / "docs" / "frameworks"


def copied(page):
    """Execute the first Python block of a page and return the names that it defines."""
    path = PAGES / f"{page}.md"
    source = re.search(r"^```python\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)[1]
    namespace = {"__name__": page}
    exec(compile(source, path, "exec"), namespace)
    return SimpleNamespace(**{name: value for name, value in namespace.items() if not name.startswith("__")})


def bad(batch, value=np.nan):
    """Return a copy of the batch with one nonfinite element."""
    return {**batch, "x": batch["x"].at[0, 0].set(value)}
