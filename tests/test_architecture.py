"""Imports between modules, the size of the package, side effects of its import, and documentation of public names."""

import ast
import dataclasses
import doctest
import graphlib
import inspect
import io
import re
import shutil
import sys
import tokenize
import tomllib
from pathlib import Path

import pytest
from programs.starting import run_python
from test_public_api import public_modules

import jax_lossscale as jls

PACKAGE = Path(jls.__file__).parent
TESTS = Path(__file__).parent
MODULES = {path: ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}

# The keys are layers, and the values are the layers that they may import, including optax. A layer may import only
# lower layers. Loss scaling, up to the optimizer wrapper, does not depend on jaxpr tools (`_program`) or on modules
# that use them.
CORE = {"_check", "_compat", "_limits", "_warn", "_tree", "_measure", "_loss_scale"}
MIDDLE = CORE | {"_gradients", "_optax", "_sixteen_bit", "optax", "_program", "_autocast", "_version"}
LAYERS = {
    "_version": set(),
    "_check": set(),
    "_compat": set(),
    "_limits": set(),
    "_warn": set(),
    "_tree": {"_check"},
    "_measure": {"_check", "_compat", "_tree"},
    "_loss_scale": {"_check", "_limits", "_tree", "_measure"},
    "_gradients": CORE,
    "_optax": CORE | {"optax"},
    "_sixteen_bit": CORE | {"_optax", "optax"},
    "_program": {"_check", "_tree"},
    "_autocast": {"_check", "_compat", "_program", "_warn"},
    "_trainers": CORE | {"_autocast", "_gradients", "_optax", "_program", "optax"},
    "diagnostics": MIDDLE,
    "interop": MIDDLE,
    "plotting": MIDDLE | {"diagnostics"},
    "demo": MIDDLE | {"diagnostics", "plotting", ""},
    "__main__": {"demo", ""},
    # The empty name stands for `__init__.py` of the package.
    "": (MIDDLE - {"optax"}) | {"_trainers", "diagnostics", "plotting"},
}
# Modules in `_loss_scale` that the modules with the loss-scale classes may import.
POLICY_BASE = {"base", "powers"}
NO_POLICIES = POLICY_BASE | {"registry", "lookup", "__init__"}

# Each module of the diagnostics may import only the modules before it in this list.
DIAGNOSTICS = (
    "_report _bits _exponents _nonfinite _lost_updates _in_precision _operations _lost_constants _loss_call "
    "_argument_faults _traced_gradients "
    "_sites _shadow _blame _gradient_errors _range_report _finding _compare_gradients "
    "_precision_probes _precision_trials _precision_search _find_precision _autocast_report _explain "
    "_simulate"
).split()


def layer_of(module):
    """Return the first name after that of the package: "_tree" for `jax_lossscale._tree`, and "" for the package."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] != "__init__" else ""


def imported_names(path):
    """Yield the absolute names that a file imports.

    ``from a import b`` gives ``a.b`` if this is a module, otherwise ``a``.
    """
    package = list(path.relative_to(PACKAGE.parent).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            origin = ".".join(base + ([node.module] if node.module else []))
            for alias in node.names:
                name = f"{origin}.{alias.name}"
                yield name if is_module(name) else origin


def is_module(name):
    parts = name.split(".")
    file = PACKAGE.parent.joinpath(*parts)
    return parts[0] == PACKAGE.name and (file.with_suffix(".py").exists() or (file / "__init__.py").exists())


def known_layers(path):
    """Yield the layers that a file imports, and "optax" if it imports optax."""
    for name in imported_names(path):
        if name.split(".")[0] == PACKAGE.name:
            yield layer_of(name)
        elif name.split(".")[0] == "optax":
            yield "optax"


@pytest.mark.parametrize("path", sorted(MODULES), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_layers_import_only_lower_layers(path):
    layer = layer_of(MODULES[path])
    assert set(known_layers(path)) <= LAYERS[layer] | ({layer} - {""})


def test_diagnostics_modules_import_only_preceding_modules():
    directory = PACKAGE / "diagnostics"
    assert {path.stem for path in directory.rglob("*.py")} == {"__init__", *DIAGNOSTICS}
    for index, module in enumerate(DIAGNOSTICS):
        imported = imported_names(directory / f"{module}.py")
        modules = {name.split(".")[2] for name in imported if name.startswith("jax_lossscale.diagnostics.")}
        assert modules <= {*DIAGNOSTICS[:index]}, module


def test_imports_have_no_cycles():
    """Imports that are only used by type checkers count as well."""
    names = {path: module.removesuffix(".__init__") for path, module in MODULES.items()}
    imported = {name: {n for n in imported_names(path) if is_module(n)} - {name} for path, name in names.items()}
    graphlib.TopologicalSorter(imported).prepare()  # `prepare` raises if there is a cycle.


@pytest.mark.parametrize("path", sorted((PACKAGE / "_loss_scale").glob("*.py")), ids=lambda path: path.name)
def test_loss_scale_modules_do_not_import_each_other(path):
    siblings = {name.split(".")[2] for name in imported_names(path) if name.startswith("jax_lossscale._loss_scale.")}
    if path.stem in POLICY_BASE:
        assert siblings <= POLICY_BASE - {path.stem}
    elif path.stem not in NO_POLICIES:
        assert siblings <= POLICY_BASE


# --- Size ---

# Maximum number of lines of code. If a change removes lines, lower the limit. If a new capability needs more lines in
# the package, increase the limit and name the capability here.
ROOT = TESTS.parent
LIMITS = {
    (PACKAGE,): 10_047,
    # Benchmarks and tools that no page cites any more should be removed before new ones are added.
    (ROOT / "benchmarks", ROOT / "tools"): 7_799,
    (TESTS,): 20_283,
}
WITHOUT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def lines_of_code(source):
    """Return the number of lines of a file without blank lines, comments and docstrings."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in WITHOUT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        has_docstring = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node)
        if has_docstring:
            lines.difference_update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


@pytest.mark.parametrize("folders", LIMITS, ids=lambda folders: " and ".join(folder.name for folder in folders))
def test_folders_have_at_most_the_agreed_number_of_lines(folders):
    files = [path for folder in folders for path in folder.rglob("*.py")]
    assert sum(lines_of_code(path.read_text()) for path in files) <= LIMITS[folders]


# --- Tests in a new interpreter ---

EXTRAS = ("flax", "jmp", "matplotlib", "orbax", "rich", "sklearn", "torch", "tqdm")
WITHOUT_EXTRAS = f"import sys\nsys.modules.update(dict.fromkeys({EXTRAS!r}))\n"
PRINT_MODULES = "\nimport sys\nprint(*(name for name in sys.modules if sys.modules[name] is not None))"


def modules_after(code):
    """Return the names of the modules that are imported after a program."""
    return run_python("-c", code + PRINT_MODULES).split()


def packages_after(code):
    return {name.partition(".")[0] for name in modules_after(code)}


def test_import_loads_only_the_dependencies():
    before = packages_after("import jax, jaxlib, optax, chex, numpy")
    after = packages_after("import jax_lossscale")
    assert after - before - sys.stdlib_module_names == {"jax_lossscale"}


def test_imports_of_the_core_are_declared_dependencies():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    named = {re.match(r"\w+", dependency)[0] for dependency in project["dependencies"]}
    core = [path for path in MODULES if layer_of(MODULES[path]) not in ("demo", "interop", "plotting")]
    imported = {name.partition(".")[0] for path in core for name in imported_names(path)}
    assert "scipy" in imported  # The package imports scipy inside a function.
    assert "tqdm" in imported  # The reports also work without tqdm.
    assert imported - sys.stdlib_module_names - {PACKAGE.name, "tqdm"} <= named


def test_import_without_extras_gives_no_warning_and_uses_no_device():
    # The platform does not exist, so any access to a device fails. The probe checks that it does.
    probe = "try: jax.devices()\nexcept RuntimeError: print('no device')\n"
    code = WITHOUT_EXTRAS + "import jax\nfrom jax_lossscale import *\n" + probe
    assert run_python("-W", "error", "-c", code, JAX_PLATFORMS="no_such_platform") == "no device\n"


def test_the_core_works_without_the_extras():
    code = f"""{WITHOUT_EXTRAS}
import jax, jax.numpy as jnp, optax
import jax_lossscale as jls
tx = jls.loss_scaled(optax.adam(0.1))
params = {{"w": jnp.ones(3)}}
state = tx.init(params)
loss, grads = jls.value_and_scaled_grad(lambda p: jnp.sum(p["w"] ** 2), state)(params)
params, state = jax.jit(tx.update_and_apply)(grads, state, params, value=loss)
print(int(state.applied_steps), jls.get(jls.serialize(jls.get_loss_scale(state)))())
"""
    assert run_python("-c", code) == "1 256.0\n"


def test_import_loads_only_the_core():
    assert sum(name.startswith("jax_lossscale") for name in modules_after("import jax_lossscale")) <= 50


def test_names_are_imported_when_they_are_first_used():
    code = """
import jax_lossscale as jls
assert set(jls.__all__) <= set(dir(jls))
for name in jls.__all__:
    assert getattr(jls, name) is vars(jls)[name], name
from jax_lossscale import autocast, diagnostics
print(jls.autocast is autocast, jls.diagnostics is diagnostics, hasattr(jls, "other"))
"""
    assert run_python("-c", code) == "True True False\n"


@pytest.mark.slow
def test_the_core_works_without_the_modules_that_read_jaxprs(tmp_path):
    """If a helper of JAX that only these modules use is renamed, loss scales and `loss_scaled` still work."""
    removed = ("_program", "_autocast", "diagnostics", "plotting", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=shutil.ignore_patterns(*removed))
    shutil.copytree(TESTS, tmp_path / TESTS.name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(TESTS.parent / "pyproject.toml", tmp_path)
    core = ["loss_scales/test_dynamic.py", "wrapper/test_eager.py"]
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"tests/{path}" for path in core)]
    run_python(*command, cwd=tmp_path, PYTHONPATH="")


# --- Documentation of public names ---


def test_no_message_recommends_installing_this_package_from_an_index():
    """The package is not in a package index, so extras can only be installed from a checkout."""
    for path in MODULES:
        assert re.findall(r"pip install [^`\n]*jax_lossscale", path.read_text()) == []


def documented(module):
    """Yield the public functions and classes of a module, and the public methods of these classes."""
    names = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
    for name in names:
        thing = getattr(module, name)
        is_ours = getattr(thing, "__module__", "").startswith(PACKAGE.name)
        if not is_ours or not (inspect.isfunction(thing) or inspect.isclass(thing)):
            continue
        if module is not jls and thing.__module__ != module.__name__:
            continue
        yield name, thing
        if inspect.isclass(thing):
            for attribute, member in vars(thing).items():
                function = getattr(member, "__func__", getattr(member, "fget", member))
                if not attribute.startswith("_") and inspect.isfunction(function):
                    yield f"{name}.{attribute}", function


def parameters(thing):
    """Return the names that a docstring must explain, which are parameters or fields."""
    if dataclasses.is_dataclass(thing):
        return [field.name for field in dataclasses.fields(thing) if not field.name.startswith("_")]
    if inspect.isclass(thing):
        return list(vars(thing).get("_fields", ()))
    return [name for name in inspect.signature(thing).parameters if name not in ("self", "cls")]


def section(docstring, *headings):
    """Return the text of the docstring sections with any of these headings."""
    sections = re.split(r"^(\w+):\n", inspect.cleandoc(docstring), flags=re.MULTILINE)
    return "\n".join(text for heading, text in zip(sections[1::2], sections[2::2], strict=True) if heading in headings)


@pytest.mark.parametrize("module", public_modules())
def test_public_names_and_parameters_are_documented(module):
    flaws = []
    for name, thing in documented(pytest.importorskip(module, exc_type=ImportError)):
        docstring = thing.__doc__ or ""
        if not docstring.strip():
            flaws.append(f"{name}: no docstring")
        if "." in name and "\n" not in docstring.strip():
            continue  # A one-line docstring is sufficient for a method.
        explained = re.findall(r"^  (?:``)?\*{0,2}(\w+)", section(docstring, "Args", "Attributes"), re.MULTILINE)
        flaws += [
            f"{name}: {parameter} is not documented" for parameter in parameters(thing) if parameter not in explained
        ]
        if inspect.isfunction(thing):
            returns = inspect.signature(thing).return_annotation not in (None, "None", inspect.Signature.empty)
            if returns and not section(docstring, "Returns", "Yields"):
                flaws.append(f"{name}: no section Returns")
    assert flaws == []


@pytest.mark.ci
@pytest.mark.parametrize("path", [path for path in sorted(MODULES) if path.stem != "__main__"], ids=MODULES.get)
def test_docstring_examples_run(path):
    module = pytest.importorskip(MODULES[path].removesuffix(".__init__"), exc_type=ImportError)
    assert doctest.testmod(module).failed == 0


def test_public_functions_and_loss_scales_have_examples():
    names = [name for name, thing in documented(jls) if inspect.isfunction(thing) or issubclass(thing, jls.LossScale)]
    without = [name for name in names if "." not in name and ">>>" not in getattr(jls, name).__doc__]
    assert without == ["LossScale"]  # The abstract class needs no example.
