"""The tool that runs other projects' tests under `autocast` finds exactly the planted bugs."""

import pytest
import suites
from programs.starting import run_python

PROJECT = """
import functools

import jax
import jax.numpy as jnp
import jax_lossscale as jls

autocast = jls.autocast


def broken(fun, *args, **options):
    under_autocast = autocast(fun, *args, **options)

    @functools.wraps(fun)
    def wrapped(*args):
        result = under_autocast(*args)
        if fun.__name__ == "crash":
            raise ValueError("planted")
        if fun.__name__ == "dtype":
            return result.astype(jnp.float16)
        if fun.__name__ == "excess" and options:
            x = jnp.sin(args[0]).astype(jnp.bfloat16)
            unrounded = (x @ x.T).astype(jnp.float32)  # By default, XLA does not round the result of this matmul.
            return result + 100 * (unrounded - jax.lax.reduce_precision(unrounded, 8, 7))
        return result * 1.1 if fun.__name__ == "number" else result

    return wrapped


jls.autocast = broken
x = jnp.arange(6.0).reshape(2, 3)


def test_crash():
    @jax.jit
    def crash(x):
        return x + 1

    crash(x)


def test_dtype():
    @jax.vmap
    def dtype(x):
        return jnp.sin(x)

    dtype(x)


def test_number():
    @jax.jit
    def number(x):
        return x @ x.T

    assert number(x)[0, 0] == 5


def test_excess():
    @jax.jit
    def excess(x):
        jax.debug.callback(lambda: None)
        return x @ jnp.sin(x).T

    excess(x)


def test_right():
    @jax.grad
    def right(x):
        return jnp.sum(jnp.sin(x) ** 2)

    assert jnp.all(jax.jit(right)(x) == right(x))  # the same program, which counts once


def test_without_float32():
    assert jax.jit(lambda x: x + 1)(1) == 2


def test_that_fails_without_autocast():
    assert jax.jit(lambda x: x + 2)(1.0) == 2


def test_that_counts_traces():
    count = 0

    @jax.jit
    def counted(x):
        nonlocal count
        count += 1
        return x - 1

    counted(x)
    assert count == 1
"""


PROGRAMS = ["crash", "dtype", "excess", "number", "right", "that_counts_traces", "that_fails_without_autocast"]


@pytest.mark.ci
def test_planted_bugs_are_found(tmp_path):
    (tmp_path / "test_planted.py").write_text(PROJECT)
    output = run_python(suites.__file__, "planted", tmp_path, "--results", tmp_path / "results")
    records = suites.read(tmp_path / "results" / "planted.jsonl")
    found = sorted((kind, line.partition("::")[2].strip("]")) for kind, line in suites.differences_in(records))
    planted = {
        **{"assertion": ["test_number"], "crash": ["test_crash"], "exact": ["test_dtype", "test_number"]},
        **{"jit": ["test_excess"], "numbers": ["test_number"], "trace": ["test_dtype"]},
    }
    assert found == [(kind, test) for kind, tests in planted.items() for test in tests]
    assert "ValueError: planted" in output
    programs = [record["test"].partition("::test_")[2] for record in records if "program" in record]
    assert sorted(set(programs)) == PROGRAMS
    values = ["numbers in float16", "numbers in bfloat16"]
    compared = [record["test"] for record in records if {*values} <= record.get("outcomes", {}).keys()]
    assert sorted({test.partition("::test_")[2] for test in compared}) == PROGRAMS[1:]
