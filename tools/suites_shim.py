"""Pytest plugin that executes each program of another project's tests under `autocast` as well (see `suites.py`).

The plugin replaces `jax.jit`, `jax.grad` and similar functions. Each outermost call of a function that they return is a
program. `Comparison` compares each program with itself under `autocast`.

Programs without a matmul would contain no half-precision values. Therefore, each float32 argument and result `x` is
replaced by the matmul `[x, 0] @ [1, 1]`, which does not change its value in float32. The original program contains
these matmuls as well.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import random
import re
import signal
import threading
import time
import traceback
import types
from pathlib import Path
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest
from jax import lax
from jax._src import core, debugging, public_test_util
from jax._src import test_util as jax_test_util
from random_programs import Reference, in_float32, on_host, worst

import jax_lossscale as jls

OF_FUNCTIONS = ("jit", "grad", "value_and_grad", "jacfwd", "jacrev", "jacobian", "hessian", "checkpoint", "remat")
# `autocast` is applied to the results of these functions, so that it has to handle their primitives.
OF_PROGRAMS = ("vmap", "pmap", "shard_map")
NUMBERS = (bool, int, float, complex)
AT_ONCE = ("vjp", "jvp", "linearize")
LOOPS = ("associative_scan", "cond", "custom_linear_solve", "custom_root", "fori_loop", "map", "scan", "switch")
LOOPS += ("while_loop",)
SECONDS = 40  # This is the time limit of a test in seconds.
LARGEST = 200_000  # For jaxprs with more characters, only the types are compared.


def in_jit(fun):
    """Return the function with `jax.jit` applied to the arrays in the arguments, which `autocast` traces as well."""

    @functools.wraps(fun)
    def jitted(*args, **kwargs):
        leaves, tree = jax.tree.flatten((args, kwargs))
        found = []

        def of_arrays(arrays):
            filled = [array if _is_array(leaf) else leaf for array, leaf in zip(arrays, leaves, strict=True)]
            args, kwargs = jax.tree.unflatten(tree, filled)
            results, structure = jax.tree.flatten(fun(*args, **kwargs))
            found[:] = structure, results
            return [leaf if _is_array(leaf) else None for leaf in results]

        arrays = jax.jit(of_arrays)([leaf if _is_array(leaf) else None for leaf in leaves])
        structure, results = found
        filled = [leaf if array is None else array for array, leaf in zip(arrays, results, strict=True)]
        return jax.tree.unflatten(structure, filled)

    return jitted


def through_matmuls(fun):
    """Return the function with a matmul applied to each float32 argument and result."""

    @functools.wraps(fun)
    def wrapped(*args, **kwargs):
        args, kwargs = _map(_through_matmul, (args, kwargs))
        return _map(_through_matmul, fun(*args, **kwargs))

    return wrapped


def _map(function, tree):
    # nnx objects are not copied, because changes that the function makes to a copy would be lost.
    return jax.tree.map(
        lambda leaf: leaf if _is_nnx(leaf) or not _is_array(leaf) else function(leaf), tree, is_leaf=_is_nnx
    )


def _through_matmul(x):
    aval = jax.typeof(x)
    if getattr(aval, "dtype", None) != np.float32 or aval.weak_type or isinstance(x, jax.Ref):
        return x
    pairs = lax.pad(lax.expand_dims(x, [x.ndim]), np.float32(0), [(0, 0, 0)] * x.ndim + [(0, 1, 0)])
    return lax.dot_general(pairs, np.ones(2, np.float32), (([x.ndim], [0]), ([], [])))


def _is_nnx(leaf):
    return type(leaf).__module__.startswith("flax.nnx")


def _is_array(leaf):
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.dtype.kind not in "OSUV" or leaf.dtype == jnp.bfloat16
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))


@dataclasses.dataclass
class Traced:
    """The jaxpr of a function, from the arrays in the arguments to the arrays in the result."""

    jaxpr: Any
    structure: str
    is_array: list  # Each entry states whether a result is an array or a Python number.
    inputs: list

    def difference(self, other):
        """Describe how the structure or types of another function's results differ, or return an empty string."""
        if self.structure != other.structure or len(self.jaxpr.out_avals) != len(other.jaxpr.out_avals):
            pairs = enumerate(zip(self.structure, other.structure, strict=False))
            start = next((n for n, (old, new) in pairs if old != new), 0)
            return f"structure {self.structure[max(0, start - 50) :][:150]} became {other.structure[start:][:100]}"
        for old, new in zip(self.jaxpr.out_avals, other.jaxpr.out_avals, strict=True):
            if str(old) != str(new):
                return f"type {old} became {new}"
            if old != new and any("Explicit" in str(aval.sharding) for aval in (old, new)):
                return f"sharding {old.sharding} became {new.sharding}"
        # JAX returns Python numbers unchanged if they are not traced, but `autocast` may convert them to arrays.
        if any(was and not now for was, now in zip(self.is_array, other.is_array, strict=True)):
            return "an array became a Python number"
        return ""

    def __call__(self, inputs):
        return list(map(on_host, jax.jit(jax.extend.core.jaxpr_as_fun(self.jaxpr))(*inputs)))


def traced(fun, args, kwargs, is_differentiated=False):
    """Trace a function, or a function that also returns the gradient of a weighted sum of the results."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    positions = [n for n, leaf in enumerate(leaves) if _is_array(leaf)]
    structure, is_array = None, []

    def flat(*inputs):
        nonlocal structure, is_array
        filled = list(leaves)
        for n, value in zip(positions, inputs, strict=True):
            filled[n] = value
        args, kwargs = jax.tree.unflatten(tree, filled)
        results, structure = jax.tree.flatten(fun(*args, **kwargs))
        others = [type(leaf).__name__ for leaf in results if not _is_array(leaf) and not isinstance(leaf, NUMBERS)]
        structure = f"{structure} {others}"
        results = [leaf for leaf in results if _is_array(leaf) or isinstance(leaf, NUMBERS)]
        is_array = [_is_array(leaf) for leaf in results]
        return [leaf if _is_array(leaf) else jnp.asarray(leaf) for leaf in results]

    inputs = [jnp.asarray(x) if isinstance(x := leaves[n], (np.ndarray, np.generic)) else x for n in positions]
    jaxpr = jax.make_jaxpr(_with_gradient(flat) if is_differentiated else flat)(*inputs)
    return Traced(jaxpr, _without_addresses(structure), is_array, inputs)


def _with_gradient(flat):
    def weighted_sum(*inputs):
        results = flat(*inputs)
        floats = [x.real for x in results if jnp.issubdtype(x.dtype, jnp.inexact)]
        if not floats:
            raise TypeError("There is nothing to differentiate.")
        return sum(jnp.sum(x * _weights(x)).astype(np.float32) for x in floats), results

    def function(*inputs):
        argnums = [n for n, x in enumerate(inputs) if x.dtype == np.float32]
        grads, results = jax.grad(weighted_sum, argnums, has_aux=True)(*inputs)
        return [*results, *grads]

    return function


def _weights(x):
    """Return weights of both signs, so that gradients such as those of a softmax are not all zero."""
    return ((np.arange(x.size).reshape(x.shape) * 5 % 8 - 2.5) / 4).astype(x.dtype)


def _without_addresses(text):
    return re.sub(r"0x[0-9a-f]+|\bid=\d+", "", str(text))


class Comparison:
    """Comparison of a program with itself under `autocast`.

    Args:
      kind: the name of the JAX function that created the program.
      program: a function that creates the program, given a transformation of the test's function, such as `autocast`.
    """

    def __init__(self, kind, program, args, kwargs):
        self.kind, self.program, self.args, self.kwargs = kind, program, args, kwargs
        self.outcomes, self.errors, self.sensitivities, self.details = {}, {}, {}, {}
        self.before = through_matmuls
        try:
            self.plain = self.traced(lambda fun: fun)
        # The program cannot be traced with the matmuls, or it cannot be traced at all.
        except Exception:
            self.before = lambda fun: fun
            self.plain = self.traced(lambda fun: fun)
        self.text = _without_addresses(self.plain.jaxpr)
        self.digest = hashlib.sha1(self.text.encode()).hexdigest()[:16]

    def traced(self, cast, is_differentiated=False):
        return traced(self.program(lambda fun: cast(self.before(fun))), self.args, self.kwargs, is_differentiated)

    def run(self):
        """Run all checks."""
        halves, plain, has_gradient = {}, self.plain, False
        # Some programs are not differentiable even without `autocast`.
        with contextlib.suppress(Exception):
            plain, has_gradient = self.traced(lambda fun: fun, is_differentiated=True), True
        if STATE.is_exact or not has_gradient:
            halves["float16"] = self.trace("trace", self.plain, is_differentiated=False)
        if has_gradient:
            halves["float16"] = self.trace("trace of the gradient", plain, is_differentiated=True)
        are_known = not any(isinstance(x, (jax.ShapeDtypeStruct, jax.Ref)) for x in plain.inputs)
        # Programs with other effects are not executed, because these can change the inputs of the next execution.
        has_effects = not all(isinstance(effect, debugging.DebugEffect) for effect in plain.jaxpr.effects)
        if not are_known or has_effects or len(self.text) > LARGEST:
            return
        suffix = " of the gradient" if has_gradient else ""
        halves["bfloat16"] = self.trace(f"trace in bfloat16{suffix}", plain, has_gradient, dtype=jnp.bfloat16)
        if None in halves.values():
            return
        checks = {
            f"numbers in {dtype}": (dtype, functools.partial(half, half.inputs)) for dtype, half in halves.items()
        }
        if STATE.is_exact:
            checks["exact"] = "float32", lambda: self.traced(in_float32, has_gradient)(plain.inputs)
        try:
            references = {dtype: Reference(plain.jaxpr, plain.inputs, dtype) for dtype, _ in checks.values()}
        except Exception:
            return
        for name, (dtype, function) in checks.items():
            found = self.tried(name, function)
            if found is not None and len(found) == len(plain.jaxpr.out_avals):
                self.compare(name, references[dtype], found, has_gradient)

    def compare(self, name, reference, found, has_gradient):
        """Record the outcome and the errors of the results and of the gradients."""
        records = reference.compared(found)
        if any(record["outcome"] == "differs" for record in records):
            jitted = reference.compared(self.traced(in_jit, has_gradient)(reference.args))
            for record, other in zip(records, jitted, strict=True):
                if record["outcome"] == other["outcome"] == "differs":
                    record["outcome"] = "as with jit"
        results = len(self.plain.jaxpr.out_avals)
        parts = {name: records[:results], f"{name} of the gradient": records[results:]}
        for check, part in list(parts.items())[: 1 + has_gradient]:
            found = worst([{"outcome": "same", "ratio": 0.0, "error": 0.0, "noise": 0.0, "scale": 0.0}, *part])
            self.outcomes[check], self.errors[check], self.sensitivities[check] = (
                found[key] for key in ("outcome", "error", "noise")
            )
            if found["outcome"] != "same":
                self.details[check] = "error {error}, noise {noise}, largest magnitude {scale}".format(**found)

    def is_of_jit(self, name):
        """Return whether `jax.jit` in place of `autocast` also changes types or structure, or fails."""
        if not name.startswith("trace"):
            return False
        is_differentiated = name.endswith("gradient")
        try:
            plain, jitted = (self.traced(cast, is_differentiated) for cast in (lambda fun: fun, in_jit))
            is_of_jit = bool(plain.difference(jitted))
        except Exception:
            is_of_jit = True
        if is_of_jit:
            self.outcomes[name] = "as with jit"
        return is_of_jit

    def tried(self, name, function):
        """Return the result of a function, or record the error and return None if it raises."""
        try:
            return function()
        except Exception as error:
            frames = [f for f in traceback.extract_tb(error.__traceback__) if "/jax_lossscale/" in f.filename]
            place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
            if self.is_of_jit(name):
                return None
            message = f"{type(error).__name__}: {(str(error).strip() or ' ').splitlines()[0][:200]}{place}"
            self.outcomes[name], self.details[name] = "crash", _without_addresses(message)
            if STATE.verbose:
                traceback.print_exc()
            return None

    def trace(self, name, plain, is_differentiated, **options):
        half = self.tried(name, lambda: self.traced(functools.partial(jls.autocast, **options), is_differentiated))
        if half is not None:
            difference = plain.difference(half)
            self.outcomes[name] = "differs" if difference else "same"
            if difference:
                self.details[name] = difference[:400]
                return None if self.is_of_jit(name) else half
        return half

    def as_dict(self):
        return {
            **{"program": self.digest, "kind": self.kind, "test": STATE.test},
            **{"matmuls": self.before is through_matmuls, "details": self.details},
            **{"outcomes": self.outcomes, "errors": self.errors, "sensitivities": self.sensitivities},
        }


# --- Replaced functions of JAX ---


class State:
    """State of the plugin: the current test, the checked programs and the file for the records."""

    def __init__(self):
        given = json.loads(os.environ["SUITES"])
        self.file, self.seed = Path(given["file"]), given["seed"]
        self.seconds, self.is_exact, self.verbose = given["seconds"], given["is_exact"], given["verbose"]
        self.tests = self.deadline = 0
        self.test, self.is_busy = "", False
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        known = [json.loads(line) for line in lines]
        self.seen = {record["program"] for record in known if "program" in record}
        self.run_before = {record["test"] for record in known if "outcome" in record}

    def is_checking(self):
        """Return whether a call is a program, which is an outermost call during a test."""
        is_main = threading.current_thread() is threading.main_thread()
        return is_main and bool(self.test) and not self.is_busy and core.trace_state_clean()

    def write(self, record):
        with self.file.open("a") as file:
            file.write(json.dumps(record) + "\n")


class Wrapped:
    """A function that JAX created. Each call of it is a program."""

    def __init__(self, kind, original, program):
        with contextlib.suppress(Exception):
            # `update_wrapper` copies all attributes, including those of other wrappers.
            functools.update_wrapper(self, original)
        self._kind, self._original, self._program, self._known = kind, original, program, set()

    def __call__(self, *args, **kwargs):
        signature = _signature((args, kwargs)) if STATE.is_checking() else None
        if signature is None or signature in self._known:
            return self._original(*args, **kwargs)
        self._known.add(signature)
        return called(self._kind, self._original, self._program, args, kwargs)

    def __get__(self, instance, owner=None):
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name):
        return getattr(self._original, name)


def called(kind, original, program, args, kwargs, is_returned=True):
    """Call the original function, check the program, and return the result for the test."""
    if not STATE.is_checking():
        return original(*args, **kwargs)
    STATE.is_busy = True
    try:
        donated = _copied((args, kwargs)) if kind in ("jit", "pmap") else (args, kwargs)
        result = original(*args, **kwargs)
        exact = checked(kind, program, *donated, is_returned)
        return result if exact is None else exact
    finally:
        STATE.is_busy = False


def _signature(tree):
    """Return a value that is equal for calls that lead to the same jaxpr."""
    leaves, structure = jax.tree.flatten(tree)
    codes = (getattr(leaf, "__code__", leaf) for leaf in leaves)
    kinds = (str(jax.typeof(x)) if _is_array(x) else id(x) if callable(x) else repr(x)[:100] for x in codes)
    return f"{structure} {[*kinds]}"


def _copied(tree):
    """Copy all arrays, because the call may donate them."""
    return jax.tree.map(lambda x: jnp.copy(x) if isinstance(x, jax.Array) and not isinstance(x, jax.Ref) else x, tree)


def checked(kind, program, args, kwargs, is_returned):
    """Check a program. Return the result of the plan executed in float32 if the test must receive it."""
    try:
        comparison = Comparison(kind, program, args, kwargs)
    except Exception:  # The program fails even without `autocast`.
        return None
    if "f32[" not in comparison.text or comparison.digest in STATE.seen:
        return None
    STATE.seen.add(comparison.digest)
    exact = None
    try:
        comparison.run()
        if "as with jit" in (comparison.outcomes.get("trace"), comparison.outcomes.get("trace of the gradient")):
            # Equinox functions detect whether they are differentiated, so `autocast` must be applied outside.
            comparison = Comparison(kind, functools.partial(_outside, program(lambda fun: fun)), args, kwargs)
            comparison.run()
            is_returned = False
        if STATE.is_exact and is_returned:
            exact = comparison.tried("exact, as called", lambda: program(in_float32)(*args, **kwargs))
            comparison.outcomes.setdefault("exact, as called", "same")
    except Exception:
        STATE.write({"error of the shim": traceback.format_exc(), "test": STATE.test})
    STATE.write(comparison.as_dict())
    return exact


def replace_functions():
    """Replace the JAX functions that create programs or run them immediately."""
    for name in OF_FUNCTIONS + OF_PROGRAMS:
        setattr(jax, name, _maker(name, getattr(jax, name), is_outside=name in OF_PROGRAMS))
    for name in AT_ONCE:
        setattr(jax, name, _at_once(name, getattr(jax, name)))
    for name in LOOPS:
        setattr(lax, name, Wrapped(name, getattr(lax, name), functools.partial(_outside, getattr(lax, name))))
    # The tests of JAX compare functions with NumPy and gradients with finite differences, which is slow. A comparison
    # with the original program replaces these checks.
    test_case = jax_test_util.JaxTestCase
    test_case._CheckAgainstNumpy = lambda *args, **kwargs: None
    test_case._CompileAndCheck = lambda self, fun, args_maker, **_: _checked_only("compiled", fun, args_maker())
    for module in (jax_test_util, public_test_util, jax.test_util):
        module.check_grads = lambda fun, args, *_, **__: _checked_only("check_grads", fun, args)
    update = jax.config.update  # float64 is disabled, because `autocast` casts only float32.
    jax.config.update = lambda name, value: None if name == "jax_enable_x64" else update(name, value)


def _checked_only(kind, fun, args):
    called(kind, lambda *args: None, lambda cast: cast(fun), tuple(args), {}, is_returned=False)


def _outside(function, cast):
    return cast(function)


def _maker(name, transform, is_outside):
    @functools.wraps(transform)
    def make(*args, **options):
        if not args:
            fun = options.pop("fun", options.pop("f", None))
            if fun is None:
                return functools.partial(make, **options)
            args = (fun,)
        fun, *others = args
        original = transform(*args, **options)
        if not callable(fun) or not callable(original) or STATE.is_busy:
            return original
        if is_outside:
            return Wrapped(name, original, lambda cast: cast(original))
        return Wrapped(name, original, lambda cast: transform(cast(fun), *others, **options))

    return make


def _at_once(name, transform):
    @functools.wraps(transform)
    def run(fun, *args, **options):
        def original(*args):
            return transform(fun, *args, **options)

        def program(cast):
            return lambda *args: _applied(transform(cast(fun), *args, **options), name, args)

        return called(name, original, program, args, {}, is_returned=False)

    return run


def _applied(results, name, args):
    """Apply the function that `jax.vjp` and `jax.linearize` return, so that all results are arrays."""
    if name == "jvp":
        return results
    out, function, *others = results
    given = jax.tree.map(jnp.ones_like, out if name == "vjp" else args)
    return out, function(given) if name == "vjp" else function(*given), others


# --- Hooks of the plugin ---


class OutOfTime(BaseException):
    """Raised if a test takes too long."""


def _stop(*_):
    raise OutOfTime


def pytest_collection_modifyitems(items):
    items[:] = [item for item in items if item.nodeid not in STATE.run_before]
    random.Random(STATE.seed).shuffle(items)
    signal.signal(signal.SIGALRM, _stop)
    STATE.deadline = time.time() + STATE.seconds
    jax.jit(jnp.negative)(1.0)  # JAX's tests require that the compilation cache exists before they start.


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    if time.time() > STATE.deadline:
        item.session.shouldstop = "The time is up."
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    STATE.test = item.nodeid
    signal.alarm(600 if STATE.verbose else SECONDS)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        STATE.test = ""
        STATE.tests += 1
        if STATE.tests % 200 == 0:
            jax.clear_caches()


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report):
    if report.when == "call" or report.failed:  # If a fixture fails, the test is not called.
        message = report.longrepr.reprcrash.message[:500] if hasattr(report.longrepr, "reprcrash") else ""
        outcome = "out of time" if OutOfTime.__name__ in message else report.outcome
        STATE.write({"test": report.nodeid, "outcome": outcome, "message": message})


def pytest_collectreport(report):
    if report.failed:
        error = (str(report.longrepr).strip() or "?").splitlines()[-1]
        STATE.write({"not run": f"the file cannot be collected: {error[:300]}", "test": report.nodeid})


STATE = State()
replace_functions()
