"""Optimizer steps lowered for other platforms with `jax.export`, and exported steps that are stored and loaded."""

import math
import re
from typing import NamedTuple

import jax
import jax.export
import numpy as np
import optax
import pytest
from kinds import assert_same_bits

import jax_lossscale as jls
from jax_lossscale._measure import finite_and_largest

pytestmark = pytest.mark.as_for_users

PLATFORMS = ["cpu", "cuda", "rocm", "tpu"]
LEAVES = 5
# No other array in these programs has this shape.
SHAPE = (7, 11)
PARAMS = {str(n): np.full(SHAPE, n, np.float32) for n in range(LEAVES)}


def transformation(skip="auto"):
    return jls.loss_scaled(optax.adam(0.1), jls.DynamicLossScale(8.0), skip=skip)


def lowered(function, platforms, *args):
    return jax.export.export(jax.jit(function), platforms=platforms)(*args).mlir_module()


class Branching(NamedTuple):
    on: str  # The value is "flag" or "platform".
    branches: int
    results: str


def branchings(text):
    """Return all conditionals with more than one branch.

    JAX keeps conditionals with one branch if it knows the platform.
    """
    found, regions, converted_flags = [], [], set()
    for line in map(str.strip, text.splitlines()):
        if name := re.match(r"(%\w+)(?::\d+)? = ", line):
            converted_flags.discard(name[1])
        if flag := re.match(r"(%\w+) = stablehlo\.convert %\w+ : \(tensor<i1>\) -> tensor<i32>", line):
            converted_flags.add(flag[1])
        if opened := re.search(r'"stablehlo\.(\w+)"\((%\w+).*\({$', line):
            on = "flag" if opened[1] == "if" or opened[2] in converted_flags else "platform"
            regions.append((opened[1] in ("case", "if"), on, 1))
        elif line == "}, {":
            is_conditional, on, branches = regions.pop()
            regions.append((is_conditional, on, branches + 1))
        elif line.startswith("}) :"):
            is_conditional, on, branches = regions.pop()
            if is_conditional and branches > 1:
                found.append(Branching(on, branches, line.split("->")[1]))
    assert not regions
    return found


def parameter_branchings(text):
    return [found for found in branchings(text) if "tensor<7x11xf32>" in found.results]


def parameter_selections(text):
    return len(re.findall(r"stablehlo\.select .*tensor<7x11xf32>", text))


# For each leaf, the step selects parameters (or updates) and two moments, either in one conditional or in separate
# selections.
CHOSEN = 3 * LEAVES
# The keys are (skip, platforms). The values are the numbers of conditionals on the finiteness check, of conditionals on
# the platform and of selections.
STEPS = {
    ("auto", ("cpu",)): (1, 0, 0),
    ("auto", ("cuda",)): (0, 0, CHOSEN),
    ("auto", ("cuda", "rocm", "tpu")): (0, 0, CHOSEN),
    ("auto", tuple(PLATFORMS)): (1, 1, CHOSEN),
    ("cond", tuple(PLATFORMS)): (1, 0, 0),
    ("select", tuple(PLATFORMS)): (0, 0, CHOSEN),
}


@pytest.mark.parametrize("method", ["update", "update_and_apply"])
@pytest.mark.parametrize(
    ("skip", "platforms", "expected"),
    [(*situation, expected) for situation, expected in STEPS.items()],
    ids=["-".join((skip, *platforms)) for skip, platforms in STEPS],
)
def test_steps_are_skipped_by_one_conditional_or_by_selections(skip, platforms, expected, method):
    tx = transformation(skip)
    text = lowered(getattr(tx, method), platforms, PARAMS, tx.init(PARAMS), PARAMS)
    found = parameter_branchings(text)
    on_verdict, on_platform = ([branching for branching in found if branching.on == on] for on in ("flag", "platform"))
    assert (len(on_verdict), len(on_platform), parameter_selections(text)) == expected
    assert all(branching.branches == 2 for branching in found)
    assert all(branching.results.count("tensor<7x11xf32>") == CHOSEN for branching in found)
    assert "custom_call" not in text


# The elements of a large leaf are read as integers, whose maximum is computed.
LARGE = (512, 128)


@pytest.mark.parametrize(
    ("dtype", "scale"), [("float16", None), ("bfloat16", np.float32(8)), ("float32", np.float32(8))]
)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_all_finite_reads_a_large_leaf_once_on_every_platform(dtype, platform, scale):
    def is_finite(leaf):
        return jls.all_finite(leaf) if scale is None else finite_and_largest(leaf, np.float32(scale))[0]

    text = lowered(is_finite, [platform], jax.ShapeDtypeStruct(LARGE, dtype))
    words = re.findall(r"stablehlo.bitcast_convert .*\(tensor<([\dx]*)x\w+>\) -> tensor<.*xi\d+>", text)
    counts = (
        len(re.findall(r"stablehlo\.is_finite .*tensor<\d+x", text)),
        len(re.findall(r"applies stablehlo\.add across", text)),
        sum(math.prod(map(int, shape.split("x"))) for shape in words) / math.prod(LARGE),
        len([found for found in branchings(text) if found.on == "flag"]),
    )
    # The counts are elementwise `is_finite` operations, sums, conversions to integers per element, and conditionals.
    assert counts == (0, 0, 1, 0)
    assert "custom_call" not in text


def through_storage(function, *args):
    """Export ``function`` for all platforms, serialize it and return the loaded function.

    Arguments and results are passed as lists of leaves, because `jax.export` cannot serialize pytree types that are not
    registered with it.
    """
    structure = jax.tree.structure(args)
    result_structure = jax.tree.structure(jax.eval_shape(function, *args))

    def of_leaves(leaves):
        return jax.tree.leaves(function(*jax.tree.unflatten(structure, leaves)))

    exported = jax.export.export(jax.jit(of_leaves), platforms=PLATFORMS)(jax.tree.leaves(args))
    again = jax.export.deserialize(exported.serialize())
    assert again.platforms == tuple(PLATFORMS)
    return lambda *args: jax.tree.unflatten(result_structure, again.call(jax.tree.leaves(args)))


GRADS = {"kernel": np.linspace(-1, 1, 77, dtype=np.float32).reshape(SHAPE), "half": np.ones(3, np.float16)}
SEQUENCE = [
    GRADS,
    GRADS,
    {**GRADS, "half": np.float16([1, np.nan, 1])},
    {**GRADS, "kernel": np.full(SHAPE, -np.inf, np.float32)},
]


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:.*float16 parameters:UserWarning")
@pytest.mark.parametrize(("method", "skip"), [("update", "select"), ("update_and_apply", "auto")])
def test_exported_step_equals_the_original_step(method, skip):
    tx = transformation(skip)
    step = jax.jit(getattr(tx, method))
    params, state = GRADS, tx.init(GRADS)
    stored = through_storage(step, GRADS, state, params)
    for grads in SEQUENCE:
        found, expected = stored(grads, state, params), step(grads, state, params)
        assert_same_bits(found, expected)
        state = expected[1]
    assert state.skipped_steps == 2
