"""Every public argument, and what it may not be: a `ValueError` that names it and what was given, at once.

A new public name, or a new argument of one, has no row in `public.py` and fails here until it has.
"""

import contextlib
import inspect
import json
import re
import sys

import flax.serialization
import jax
import matplotlib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from public import METHODS, ROWS, in_module

import jax_lossscale as jls
from jax_lossscale import interop

matplotlib.use("Agg")


def public_callables(module):
    """The functions and classes of a module that are public, by name."""
    names = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
    for name in names:
        thing = getattr(module, name)
        is_here = hasattr(module, "__all__") or getattr(thing, "__module__", "").startswith(module.__name__)
        if callable(thing) and is_here:
            yield name, thing


MODULES = [
    "",
    "diagnostics",
    "plotting",
    *(
        f"interop.{path.name}"
        for path in __import__("pkgutil").iter_modules(interop.__path__)
        if not path.name.startswith("_")
    ),
]


def test_every_public_argument_has_a_row():
    assert sorted(ROWS) == sorted(MODULES)
    for module in MODULES:
        public = {name: set(inspect.signature(thing).parameters) for name, thing in public_callables(in_module(module))}
        rows = {name: set(bad) for name, (_, bad) in ROWS[module].items()}
        assert rows == {name: arguments for name, arguments in public.items() if arguments}, module


CASES = [
    pytest.param(getattr(in_module(module), name), right, argument, value, id=f"{module}.{name}-{argument}-{number}")
    for module, rows in ROWS.items()
    for name, (right, bad) in rows.items()
    for argument, values in bad.items()
    if not isinstance(values, str)
    for number, value in enumerate(values)
] + [
    pytest.param(method, right, argument, value, id=f"{name}-{argument}-{number}")
    for name, (method, right, bad) in METHODS.items()
    for argument, values in bad.items()
    for number, value in enumerate(values)
]


def descriptions(value):
    """How an error may say what it got: as it is written, by a member of it, by its type, shape, length, structure."""
    yield from (repr(value), type(value).__name__, getattr(value, "__name__", repr(value)))
    yield str(jax.tree.structure(value))
    if isinstance(value, (list, tuple)):
        yield from (f"{word} {len(value)}" for word in ("holds", "got", "skipped:"))
        yield from map(repr, value)
    if isinstance(value, dict):
        yield from (", ".join(map(str, value)) or "nothing", *map(repr, value.values()))
    if value is None or isinstance(value, (bool, int, float, str, list, np.ndarray, jax.Array)):
        with contextlib.suppress(ValueError):  # ragged
            array = np.asarray(value)
            yield from (str(array.shape), array.dtype.name, *map(repr, array.ravel()))
            if array.dtype.kind in "fcib":
                yield from (jax.dtypes.canonicalize_dtype(array.dtype).name, str(jax.typeof(array)))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("function", "right", "argument", "value"), CASES)
def test_a_bad_argument_is_named_with_its_value(function, right, argument, value):
    arguments = {**right, argument: value}
    positional = (arguments.pop("fun"), *arguments.pop("args")) if "args" in arguments else ()
    with pytest.raises(ValueError) as error:
        function(*positional, **arguments)
    message = str(error.value)
    assert any(name in message for name in (argument, "loss scale of", "loss_scale", "from_config")), message
    assert any(description.lower() in message.lower() for description in descriptions(value)), message
    # What would be right: in so many words, or as the second sentence.
    assert re.search(
        r"must|should|accepted|known|lacks|cannot|holds|knows|takes|needs|no dtype|\. [A-Z]", message, re.IGNORECASE
    ), message


# Configuration from outside: it builds loss scales, and does nothing else.

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from([8, 2.0**15, 3]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=6,
)
OWN_KINDS = (jls.AutoLossScale, jls.DynamicLossScale, jls.FixedLossScale, jls.NoOpLossScale)
arguments_of_kinds = sorted({name for kind in OWN_KINDS for name in inspect.signature(kind).parameters})
names = st.sampled_from([*arguments_of_kinds, "__class__", "self", "cls", "skip", "eval", "__import__('os')"])
class_names = st.sampled_from([kind.__name__ for kind in OWN_KINDS]) | st.sampled_from(
    ["LossScale", "Popen", "os.system", "dict", "__main__.LossScale", "lambda: 0", "", "type"]
)
configs = st.fixed_dictionaries(
    {"class_name": class_names | json_values, "config": st.dictionaries(names, json_values, max_size=3) | json_values},
    optional={"state": json_values},
)


# What Python tells an audit hook of, and what no configuration may bring about.
FORBIDDEN = {
    "compile",
    "exec",
    "import",
    "open",
    "os.system",
    "pickle.find_class",
    "socket.connect",
    "subprocess.Popen",
}
watched = []


def note_what_is_forbidden(event, _):
    if watched and event in FORBIDDEN:
        watched.append(event)


sys.addaudithook(note_what_is_forbidden)  # for good, but it looks only while a list has begun


def refused_or_a_loss_scale(build, given):
    """Of our own kinds, with a sound scale; nothing but a `ValueError` comes out, and nothing else is done."""
    watched[:] = ["begun"]
    try:
        built = build(given)
    except ValueError:
        built = None
    finally:
        seen, watched[:] = watched[1:], []
    assert seen == []
    if built is not None:
        assert type(built) in OWN_KINDS
        assert np.isfinite(built()).all()
        assert (np.asarray(built()) > 0).all()
        assert type(jls.get(json.loads(json.dumps(jls.serialize(built))))) is type(built)


def test_the_watch_would_see_an_evaluation():
    with pytest.raises(AssertionError, match="compile"):
        refused_or_a_loss_scale(lambda given: eval(given), "jls.get(8)")


@settings(max_examples=200, deadline=None, derandomize=True)
@given(identifier=configs | json_values)
def test_get_builds_loss_scales_and_nothing_else(identifier):
    refused_or_a_loss_scale(jls.get, identifier)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(kind=st.sampled_from(OWN_KINDS), config=st.dictionaries(names, json_values, max_size=4) | json_values)
def test_from_config_builds_its_kind_and_nothing_else(kind, config):
    refused_or_a_loss_scale(kind.from_config, config)


NUMBERS = st.one_of(st.integers(), st.floats(), st.sampled_from([8.0, 2.0**15, 2000, 2, 0.5, "8", None, True, [1.0]]))
READERS = {
    f"{module}.{name}": (getattr(in_module(module), name), argument, right[argument])
    for module, rows in ROWS.items()
    for name, (right, bad) in rows.items()
    for argument in ("state_dict", "config", "state")
    if name.startswith("from_") and argument in right
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("reader", READERS)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_what_peers_have_saved_builds_loss_scales_and_nothing_else(reader, data):
    read, argument, right = READERS[reader]
    changed = {name: data.draw(NUMBERS | st.just(value)) for name, value in right.items()}
    refused_or_a_loss_scale(lambda given: read(**{argument: given}), changed)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_flax_restores_a_loss_scale_or_refuses(data):
    """`from_bytes`, of bytes that were changed on the way: whatever is restored has the structure of the target."""
    target = jls.DynamicLossScale(8)
    saved = bytearray(flax.serialization.to_bytes(target))
    for position in data.draw(st.lists(st.integers(0, len(saved) - 1), min_size=1, max_size=3)):
        saved[position] = data.draw(st.integers(0, 255))
    try:
        restored = flax.serialization.from_bytes(target, bytes(saved))
    except Exception:  # flax's own reader has many
        return
    assert type(restored) is jls.DynamicLossScale
    assert restored.get_config() == target.get_config()
