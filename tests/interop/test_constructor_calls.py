"""The constructor calls in `docs/migrating.md` give the same scales as flax and jmp."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kinds import slow_except
from test_peers import PAGE, cells, require

import jax_lossscale as jls

pytestmark = pytest.mark.ci


def calls(library):
    """Return the constructor calls in the section about a library, as pairs of theirs and ours."""
    section = PAGE.partition(f"\n## From {library}\n")[2].partition("\n## ")[0]
    rows = [cells(line) for line in section.splitlines() if line.startswith("| `")]
    return [(theirs.strip("`"), ours.strip("`")) for theirs, ours in rows if "(" in theirs]


def finite_flags(period, seed):
    """Return whether the gradients of each step of a random trace are finite. The scale grows and reaches its floor."""
    random = np.random.default_rng(seed)
    lengths = [(random.integers(1, 3 * period), random.integers(1, 4)) for _ in range(5)]
    lengths.insert(3, (period, 200))  # After 200 non-finite steps, the scale is equal to every floor in the tables.
    return jnp.concatenate([jnp.arange(finite + nonfinite) < finite for finite, nonfinite in lengths])


def scales_of_flax(dynamic_scale, flags):
    def step(dynamic_scale, finite):
        gradient = dynamic_scale.value_and_grad(lambda p: jnp.where(finite, 1.0, jnp.nan) * p)
        dynamic_scale = gradient(jnp.float32(1.0)).dynamic_scale
        return dynamic_scale, dynamic_scale.scale

    dynamic_scale = dynamic_scale.replace(scale=jnp.float32(dynamic_scale.scale), fin_steps=jnp.int32(0))
    return jax.lax.scan(step, dynamic_scale, flags)[1]


def scales_of_jmp(loss_scale, flags):
    def step(state, finite):
        # If `scan` carried the loss scale itself, jmp would replace the minimum by 1.
        adjusted = dataclasses.replace(loss_scale, loss_scale=state[0], counter=state[1]).adjust(finite)
        return (adjusted.loss_scale, adjusted.counter), adjusted.loss_scale

    return jax.lax.scan(step, (loss_scale.loss_scale, jnp.int32(0)), flags)[1]


LIBRARIES = {
    "flax": ("flax.training.dynamic_scale", "DynamicScale", "0.12", scales_of_flax),
    "jmp": ("jmp", "jmp", "0.0.4", scales_of_jmp),
}


@pytest.mark.parametrize("seed", slow_except([0], range(3)))
@pytest.mark.parametrize(
    ("library", "theirs", "ours"), [(n, *c) for n in LIBRARIES for c in calls(n) if "Dynamic" in c[0]]
)
def test_scales_equal_those_of_the_library(library, theirs, ours, seed):
    module, name, version, scales_of = LIBRARIES[library]
    require(library, version)
    module, loss_scale = importlib.import_module(module), eval(ours, {"jls": jls})
    flags = finite_flags(loss_scale.increment_period, seed)
    expected = scales_of(eval(theirs, {name: getattr(module, name, module), "jnp": jnp}), flags)
    replay = jls.diagnostics.simulate(loss_scale, flags)
    np.testing.assert_array_equal([*replay.loss_scale[1:], replay.final()], expected)
    assert expected.min() == loss_scale.min_loss_scale < loss_scale.initial_loss_scale < expected.max()


@pytest.mark.parametrize(("theirs", "ours"), [call for call in calls("jmp") if "Dynamic" not in call[0]])
@pytest.mark.parametrize("finite", [True, False])
def test_constant_scales_equal_those_of_jmp(theirs, ours, finite):
    require("jmp", "0.0.4")
    expected = eval(theirs, {"jmp": importlib.import_module("jmp"), "jnp": jnp}).adjust(jnp.bool_(finite))
    loss_scale, should_apply = eval(ours, {"jls": jls}).update(jnp.where(finite, 1.0, jnp.nan))
    assert loss_scale() == expected.scale(jnp.float32(1.0))
    assert should_apply  # Neither library skips a step.


def test_the_page_has_the_expected_number_of_calls():
    assert (len(calls("flax")), len(calls("jmp"))) == (4, 5)
