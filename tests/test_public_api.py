"""The public names and signatures equal those in `public_api.txt`, so that changes are deliberate.

After an intended change, run ``python tests/test_public_api.py`` to update the file. All libraries that ``interop``
supports must be installed.
"""

import importlib
import inspect
import pkgutil
import sys
import typing
from pathlib import Path

import optax
import pytest

FILE = Path(__file__).parent / "public_api.txt"
TRANSFORMATION = ("init", "update", "update_and_apply")


def public_modules():
    interop = importlib.import_module("jax_lossscale.interop")
    peers = [f"jax_lossscale.interop.{info.name}" for info in pkgutil.iter_modules(interop.__path__)]
    public = [name for name in peers if "._" not in name]
    return ["jax_lossscale", "jax_lossscale.diagnostics", "jax_lossscale.plotting", *sorted(public)]


def described(module):
    """Return the lines of one module."""
    thing = importlib.import_module(module)
    names = getattr(thing, "__all__", None) or [name for name in vars(thing) if is_made_in(thing, name)]
    lines = [line for name in sorted(names) for line in description(name, getattr(thing, name))]
    # The file also contains the functions of the transformation that `loss_scaled` returns.
    if module == "jax_lossscale":
        functions = thing.loss_scaled(optax.identity())
        lines += [f"loss_scaled().{name}{signature(getattr(functions, name))}" for name in TRANSFORMATION]
    return lines


def is_made_in(module, name):
    return not name.startswith("_") and getattr(getattr(module, name), "__module__", None) == module.__name__


def description(name, thing):
    if inspect.isclass(thing):
        base = thing.__mro__[1]
        is_foreign = base.__module__.partition(".")[0] in ("flax", "optax")
        return [
            f"class {name}: {base.__name__}" if is_foreign else f"class {name}{signature(thing)}",
            *members(name, thing),
        ]
    if typing.get_origin(thing):
        return [f"{name}: type alias"]
    return [f"{name}{signature(thing)}" if callable(thing) else f"{name}: {type(thing).__name__}"]


def members(name, owner):
    """Yield the public attributes that the class defines and that are not constructor parameters."""
    for attribute, member in sorted(vars(owner).items()):
        function = getattr(member, "__func__", member)
        if inspect.isfunction(function):
            if function.__module__.startswith("jax_lossscale") and attribute.strip("_") in (attribute, "call"):
                kind = "" if function is member else f"{type(member).__name__} "
                yield f"    {kind}{name}.{attribute}{signature(function)}"
        elif not attribute.startswith("_") and attribute not in inspect.signature(owner).parameters:
            yield f"    {name}.{attribute}"


def signature(thing):
    """Return the signature as written in the code, independent of the versions of Python and JAX."""
    found = inspect.signature(thing)
    parameters = [
        parameter.replace(annotation=as_written(parameter.annotation, str), default=as_written(parameter.default, repr))
        for name, parameter in found.parameters.items()
        if not name.startswith("_")
    ]
    return str(found.replace(parameters=parameters, return_annotation=as_written(found.return_annotation, str)))


def as_written(thing, text):
    if thing is inspect.Parameter.empty:
        return thing
    return AsItIs(getattr(thing, "__forward_arg__", None) or getattr(thing, "__name__", None) or text(thing))


class AsItIs:
    """An object whose `repr` is the given text."""

    def __init__(self, text):
        self.text = text

    def __repr__(self):
        return self.text


def written():
    """Return the lines of the file, by module."""
    by_module = {}
    for line in FILE.read_text().splitlines():
        if line.startswith("["):
            lines = by_module.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            lines.append(line)
    return by_module


def write():
    sections = ["\n".join([f"[{module}]", *described(module)]) for module in public_modules()]
    header = "# Written by `python tests/test_public_api.py`. A changed line can break programs of users."
    FILE.write_text("\n\n".join([header, *sections]) + "\n")


@pytest.mark.parametrize("module", public_modules())
def test_public_names_and_signatures_equal_the_file(module):
    pytest.importorskip(module, exc_type=ImportError)
    assert described(module) == written()[module], "if the change is intended, run `python tests/test_public_api.py`"


def test_public_modules_equal_those_in_the_file():
    assert list(written()) == public_modules()


@pytest.mark.parametrize("package", ["jax_lossscale", "jax_lossscale.diagnostics", "jax_lossscale.plotting"])
def test_every_name_without_underscore_is_exported(package):
    module = importlib.import_module(package)
    names = {name for name in dir(module) if not name.startswith("_")}
    assert names - {"interop", "demo"} <= set(module.__all__)  # Users must import these public subpackages explicitly.


def test_interop_contains_only_public_modules():
    interop = importlib.import_module("jax_lossscale.interop")
    names = {f"jax_lossscale.interop.{name}" for name in dir(interop) if not name.startswith("_")}
    assert names <= set(public_modules())


if __name__ == "__main__":
    sys.path.insert(0, str(FILE.parent.parent))
    write()
