"""Every report accepts typical user programs, and reports no faults in their sound parts."""

import itertools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs_of_others import PROGRAMS
from workloads import draw

import jax_lossscale as jls
from jax_lossscale.diagnostics import (
    autocast_report,
    compare_gradients,
    find_precision,
    in_precision,
    nonfinite_report,
    range_report,
)

pytestmark = pytest.mark.ci

SCALE = 2.0**8
HALF = ("bert", "vit", "gnn", "nnx_classifier", "mutable")  # These are accurate in half precision.
REPORTS = {
    "compare_gradients": lambda fun, *args: compare_gradients(jls.autocast(fun), *args, loss_scales=[SCALE]).verdict,
    "range_report": lambda fun, *args: repr(range_report(jls.autocast(fun), *args, loss_scale=SCALE)),
    "autocast_report": lambda fun, *args: repr(autocast_report(fun, *args)),
    "find_precision": lambda fun, *args: str(find_precision(fun, *args)),
    "in_precision": lambda fun, *args: str(in_precision(jls.autocast(fun))(*args)),
    "nonfinite_report": lambda fun, *args: repr(nonfinite_report(jax.tree.leaves(args))),
}


# Each report on these programs takes seconds, so only the slow tests create it.
SLOW = ("bert", "vit", "s5", "nnx_classifier", "gaussian_process")


@pytest.mark.filterwarnings("ignore:.*matmuls stay in half precision")
@pytest.mark.parametrize(
    ("name", "kind"),
    [pytest.param(name, kind, marks=pytest.mark.slow if name in SLOW else ()) for name in PROGRAMS for kind in REPORTS],
)
def test_every_report_accepts_every_program(name, kind):
    answer = REPORTS[kind](*PROGRAMS[name]())
    assert "cast_floating" not in answer  # The programs already use `autocast`.
    if name in HALF:
        sound = {
            "compare_gradients": f"Training in float16 will work. Start with a loss scale of 2^{jnp.log2(SCALE):.0f}",
            "range_report": "stay in range",
            "find_precision": "This policy has no rules.",
        }
        assert sound.get(kind, "") in answer


@pytest.mark.slow
def test_gram_matrix_has_the_reason_of_the_plan_in_every_report():
    fun, *args = PROGRAMS["gaussian_process"]()
    reason = "its result is factorized"
    for text in (
        compare_gradients(jls.autocast(fun), *args, loss_scales=[SCALE]).verdict,
        repr(range_report(jls.autocast(fun), *args, loss_scale=SCALE)),
        str(autocast_report(fun, *args).summary),
    ):
        assert reason in text
        assert "where it is cast" not in text


def test_manual_cast_is_not_suggested_for_a_function_without_matmuls():
    report = compare_gradients(jls.autocast(lambda x: jnp.mean(x * x)), jnp.ones(3), loss_scales=[SCALE])
    assert (report.cause, report.will_train, report.loss_scale) == ("no half precision", True, 1.0)
    assert report.verdict == (
        "`fun` has no matrix multiplications or convolutions, so `autocast` computes nothing in float16. "
        "Therefore, the gradients are the same as in float32, and half precision has no benefit."
    )


def test_sharding_constraint_is_never_reported():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))

    def fun(weights, x):
        y = (x.astype(jnp.float16) @ weights.astype(jnp.float16)) * jnp.float16(1e4)
        return jnp.mean(jax.lax.with_sharding_constraint(y, rows).astype(jnp.float32))

    report = range_report(fun, draw(8, 4, seed=1) * 100, draw(4, 8, seed=2), loss_scale=1.0)
    assert report.bad
    assert "sharding_constraint" not in {operation.operation for operation in report}


# Rules that `find_precision` returns for layers in a loop.


def layers(weights, x):
    """Apply layers that share a source line. With the weights `DEEP`, the last of eight layers is out of range."""
    for kernel in weights:
        x = jnp.log1p(jnp.square(x @ kernel))
    return jnp.mean(x)


DEEP = [draw(8, 8, seed=n, scale=0.4) for n in range(7)] + [3e5 * jnp.ones((8, 8))]


@pytest.mark.slow
def test_one_layer_of_eight_is_identified_by_its_parameter():
    args = DEEP, draw(16, 8, seed=20)
    found = find_precision(layers, *args)
    policy = found.policy
    assert {rule.parameter for rule in policy.rules} == {"[7]"}
    report = autocast_report(layers, *args, policy=policy)
    assert sum(each.count for each in report.matmuls) == 23
    assert sum(each.count for each in report.matmuls if each.dtype == "float16") == 20
    assert found.summary == report.summary
    assert str(found).startswith(f"{report.summary}\nError compared with float32: over 100% -> ")
    assert jls.PrecisionPolicy.from_config(policy.get_config()) == policy


@pytest.mark.slow
def test_relu_kinks_of_a_healthy_classifier_need_no_rule():
    key = jax.random.key(0)
    sizes = [16, *[32] * 7, 10]
    weights = [draw(a, b, seed=n, scale=(2 / a) ** 0.5) for n, (a, b) in enumerate(itertools.pairwise(sizes))]
    x, labels = jax.random.normal(key, (64, 16)), jax.random.randint(key, (64,), 0, 10)

    def loss(weights, x):
        for kernel in weights[:-1]:
            x = jax.nn.relu(x @ kernel)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x @ weights[-1]), labels[:, None], axis=1))

    assert find_precision(loss, weights, x).rules == ()


def test_warning_if_few_matmuls_stay_in_half_precision():
    def fun(weights, x):
        for kernel in weights:
            x = jnp.log1p(jnp.square(x @ (3e5 * kernel)))
        return jnp.mean(x)

    with pytest.warns(UserWarning, match=r"Only 0 of 3 matmuls stay in half precision"):
        policy = find_precision(fun, [draw(8, 8, seed=n) + 1 for n in range(3)], draw(4, 8, seed=9))
    assert policy.rules


def test_rule_that_is_contained_in_another_is_detected():
    from jax_lossscale.diagnostics._find_precision import _contains

    rule = jls.PrecisionRule
    assert _contains(rule("float32", layer="a"), rule("float32", layer="a", operation="dot_general", reason="why"))
    assert not _contains(rule("float32", layer="a"), rule("float32_result", layer="a", operation="dot_general"))
    assert not _contains(rule("float32", layer="a"), rule("float32", layer="a", reason="why"))


def test_work_is_not_repeated_for_each_pair_of_a_rule_and_a_matmul(monkeypatch):
    from jax_lossscale._program.location import Location
    from jax_lossscale.diagnostics._find_precision import _policy
    from jax_lossscale.diagnostics._precision_probes import MatmulSite

    def location(n):
        return Location("", f"block{n}", f"model.py:{n}", "", (), False, "")

    calls = []
    monkeypatch.setattr(os, "getcwd", lambda: calls.append("getcwd") or "/")
    monkeypatch.setattr(jls.PrecisionRule, "get_config", lambda rule: calls.append("get_config") or {})
    policy = _policy([MatmulSite("dot_general", location(n)) for n in range(20)], np.full(20, 2))
    assert [rule.layer for rule in policy.rules] == [f"block{n}" for n in range(20)]
    assert len(calls) <= 20
