"""`autocast` does not change the results of programs whose values float16 represents exactly.

The programs are random (`exact_programs`), and so are the mode, the dtype and the policy. A program is replaced by
another one if its evaluation (`exact`) finds a value with too many significant bits. If a program fails, the error
message shows the shortest part of it that still fails.
"""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from any_jax import is_older_than
from exact import InexactError, evaluated, exact_in
from exact_programs import EXCEPTIONS, FLOAT32, MODES, STRUCTURES, arrays, loss_of, program_of
from jax.extend.core.primitives import convert_element_type_p
from kinds import slow_except
from random_programs import shortest
from reading import matmul_dtypes_in

import jax_lossscale as jls

pytestmark = pytest.mark.ci

POLICIES = {
    "none": None,
    "recompute nothing": jls.PrecisionPolicy(recompute=False),
    "keep little": jls.PrecisionPolicy(recompute=100.0),
    "half residual stream": jls.PrecisionPolicy(half_residual_stream=True),
    "float32 results": jls.PrecisionPolicy([jls.PrecisionRule("float32_result")]),
}
# Operations whose values may be rounded although they need float32, for some policies, modes and structures. A
# half-precision residual stream is rounded, a rule overrides the bounds of a constant, and a derivative that is
# computed before `autocast` or by a custom rule may pass a constant on as if it were an ordinary value.
LEAVES_FLOAT32 = {
    "half residual stream": ("attention", "with a large constant", *FLOAT32),
    "float32 results": ("with a large constant",),
    "of the gradient": ("with a large constant",),
    "in_custom_vjp": ("with a large constant",),
    "in_gradient": ("with a large constant",),
}
# `autocast` does not rewrite the backward pass of a `jax.custom_vjp` function in the rule of a `jax.custom_jvp`
# function.
AS_WRITTEN = ("in_custom_vjp", "in_custom_jvp")
# The structures that JAX does not support in some modes.
UNSUPPORTED = {"jvp": ("in_custom_vjp",), "linearize": ("in_custom_vjp",)}
if is_older_than("0.9.0") and not is_older_than("0.8.1"):  # These versions cannot batch the operation `psum_invariant`.
    UNSUPPORTED["vmap"] = ("in_shard_map_automatic", "in_shard_map_explicit")


def type_of(aval):
    return aval.shape, aval.dtype, aval.weak_type, aval.sharding.spec


def weakly_typed(array):
    return convert_element_type_p.bind(array, new_dtype=array.dtype, weak_type=True, sharding=None)


def check(program, mode, seed, dtype, policy):
    """Check that `autocast` does not change the results of a program. Raise `InexactError` for inexact results."""
    hows = [how for how in LEAVES_FLOAT32 if how in (policy, mode) or repr(how) in repr(program)]
    if any(repr(name) in repr(program) for how in hows for name in LEAVES_FLOAT32[how]):
        raise InexactError
    w, x = arrays(seed)
    inputs = w, jnp.stack([x, x[::-1]]) if "vmap" in mode else x

    def traced(cast):
        return jax.make_jaxpr(MODES[mode](cast, loss_of(program)), return_shape=True)(*inputs)

    try:
        plain, shapes = traced(lambda loss: loss)
    except Exception as error:  # JAX itself does not support some operations on a mesh.
        if "in_shard_map" in repr(program):
            raise InexactError from error
        raise
    expected = evaluated(plain, inputs, exact_in(dtype))
    half, half_shapes = traced(functools.partial(jls.autocast, dtype=dtype, policy=POLICIES[policy]))
    assert jax.tree.structure(half_shapes) == jax.tree.structure(shapes)
    assert list(map(type_of, half.out_avals)) == list(map(type_of, plain.out_avals))
    for value, other in zip(evaluated(half, inputs), expected, strict=True):
        np.testing.assert_array_equal(value, other)
    dtypes = set(matmul_dtypes_in(half))
    if policy == "float32 results":
        assert dtypes <= {dtype, f"{dtype} {dtype} float32"}
    else:
        has_exceptions = any(repr(name) in repr(program) for name in EXCEPTIONS[dtype])
        is_as_written = all(repr(name) in repr(program) for name in AS_WRITTEN)
        assert dtypes <= ({dtype, "float32"} if has_exceptions or is_as_written else {dtype})
        if mode == "value":  # Some derivatives do not need every matmul.
            assert ("float32" in dtypes) == has_exceptions


def fails(program, *how):
    try:
        check(program, *how)
    except InexactError:
        return False
    except Exception:
        return True
    return False


def check_some(structure, number, modes=MODES):
    """Check random programs around a structure: `number` programs in each mode."""
    for mode in modes:
        structures = [name for name in STRUCTURES if name not in UNSUPPORTED.get(mode, ())]
        if structure not in structures:
            continue
        for n in range(number):
            numbers = random.Random(f"{structure} {mode} {n}")
            for _ in range(20):
                program = program_of(numbers, structures, structure)
                how = (
                    *(mode, numbers.randrange(4), numbers.choice(["float16", "float16", "bfloat16"])),
                    numbers.choice(["none", "none", *POLICIES]),
                )
                try:
                    check(program, *how)
                except InexactError:
                    continue
                except Exception as error:
                    fewest = shortest(program, lambda part: fails(part, *how))  # noqa: B023
                    raise AssertionError(f"{fewest}, {how}") from error
                break
            else:
                raise AssertionError("no program is exact")


ignored = pytest.mark.filterwarnings("ignore:.*no operation matches")


@ignored
@pytest.mark.parametrize("structure", slow_except(["in_cond", "in_remat", "in_scan", "in_while"], STRUCTURES))
def test_exact_programs_are_unchanged_by_autocast(structure):
    """Each structure is tested in every fifth mode. The slow test below covers all combinations."""
    check_some(structure, 1, list(MODES)[list(STRUCTURES).index(structure) % 5 :: 5])


@ignored
@pytest.mark.slow
@pytest.mark.parametrize("structure", STRUCTURES)
def test_thousands_of_exact_programs_are_unchanged_by_autocast(structure):
    check_some(structure, 30)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_results_of_weakly_typed_arguments_keep_their_weak_types(structure):
    numbers = random.Random(structure)
    structures = [name for name in STRUCTURES if "shard_map" not in name]
    for _ in range(2):
        loss = loss_of(program_of(numbers, structures, structure))
        given = [weakly_typed(array) for array in arrays(0)]
        expected, found = (jax.make_jaxpr(function)(*given).out_avals for function in (loss, jls.autocast(loss)))
        assert [type_of(aval) for aval in found] == [type_of(aval) for aval in expected]


@pytest.mark.parametrize("structure", slow_except(["in_cond", "in_remat", "in_scan", "in_while"], STRUCTURES))
def test_autocast_twice_equals_autocast_once(structure):
    program = program_of(random.Random(structure), list(STRUCTURES), structure)
    once = jls.autocast(loss_of(program))
    first, second = (str(jax.make_jaxpr(function)(*arrays(0))) for function in (once, jls.autocast(once)))
    assert first == second


def test_inexact_programs_are_detected():
    for loss in (lambda x: x / 3, lambda x: x + 5000.5, lambda x: jnp.sum(x * 1000.0)):
        with pytest.raises(InexactError):
            evaluated(jax.make_jaxpr(loss)(jnp.ones(3)), [jnp.ones(3)], exact_in("float16"))
