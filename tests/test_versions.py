"""The package only uses names that the installed version of JAX has, and contains no unnecessary fallback.

``python tools/versions.py`` runs this file and the tests of the core with every minor version of JAX.
"""

import ast
import importlib
import re

import jax
import pytest
from any_jax import as_numbers, is_older_than
from versions import OLDEST, PROJECT, ROOT

PACKAGE = ROOT / "jax_lossscale"
COMPAT = PACKAGE / "_compat.py"
# These modules require the version of JAX that is installed with their extras, or document the required version.
WITH_EXTRAS = ("demo", "interop", "plotting")
PATHS = [path for path in sorted(PACKAGE.rglob("*.py")) if path != COMPAT and path.parts[-2] not in WITH_EXTRAS]


def dotted_names(path):
    """Yield the full name of everything that a file uses from JAX, such as ``jax.numpy.ones`` for `jnp.ones`."""
    tree = ast.parse(path.read_text())
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {alias.asname or alias.name.partition(".")[0]: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "jax":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            aliases |= {alias.asname or alias.name: name for alias, name in zip(node.names, names, strict=True)}
            yield from names
    for node in ast.walk(tree):
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name) and aliases.get(node.id, "").partition(".")[0] == "jax":
            yield ".".join([aliases[node.id], *reversed(parts)])


# Names that the package uses only if JAX has them, and the versions that introduced them.
NEWER = dict.fromkeys(("jax.extend.core.primitives.name_p", "jax.extend.core.primitives.remat_p"), "0.10.0")


def is_there(name):
    thing, module = jax, "jax"
    for part in name.split(".")[1:]:
        module = f"{module}.{part}"
        try:
            thing = getattr(thing, part) if hasattr(thing, part) else importlib.import_module(module)
        except ImportError:
            return False
    return True


@pytest.mark.parametrize("path", PATHS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_package_uses_only_names_of_the_installed_jax(path):
    missing = [name for name in dict.fromkeys(dotted_names(path)) if not is_there(name)]
    assert missing == [name for name in NEWER if name in missing and is_older_than(NEWER[name])]


def test_each_fallback_is_still_needed():
    code = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    needed_before = re.findall(r"[Nn]eeded before jax (\d+\.\d+\.\d+)", code)
    assert needed_before
    assert [version for version in needed_before if as_numbers(version) <= as_numbers(OLDEST["jax"])] == []


def test_readme_and_classifiers_state_the_same_versions():
    readme = (ROOT / "README.md").read_text()
    assert f"jax {OLDEST['jax'].removesuffix('.0')} or newer" in " ".join(readme.split())
    assert f"Python {PROJECT['requires-python'].removeprefix('>=')} or newer" in " ".join(readme.split())
    minors = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert f">={minors[0]}" == PROJECT["requires-python"]
    assert minors == [f"3.{minor}" for minor in range(as_numbers(minors[0])[1], as_numbers(minors[-1])[1] + 1)]
