"""Tests of the common interface that run for every class of loss scale."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kinds import ONE_OF_EACH, each_kind

import jax_lossscale as jls


@pytest.mark.parametrize("kind", ONE_OF_EACH)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_update_skips_nonfinite_steps_if_the_class_supports_it(kind, value, update):
    loss_scale = ONE_OF_EACH[kind]()
    for gradient, applied in (1, True), (value, kind in ("fixed", "no_op")):
        loss_scale, should_apply = update(loss_scale, {"kernel": np.array([1, gradient, 1], np.float32)})
        assert bool(should_apply) is applied
        chex.assert_shape([loss_scale(), should_apply], ())
        chex.assert_type([loss_scale(), should_apply], [jnp.float32, jnp.bool_])


@each_kind
@pytest.mark.parametrize("flag", [True, False])
def test_adjust_equals_update_with_a_given_finiteness_flag(make, flag):
    loss_scale = make()
    expected, _ = loss_scale.update(np.float32(1.0 if flag else np.nan))
    measured = {"largest": jnp.float32(1.0)} if loss_scale.needs_largest else {}
    for grads_finite in flag, np.bool_(flag), jnp.array(flag):
        chex.assert_trees_all_equal(loss_scale.adjust(grads_finite, **measured), expected, strict=True)


def test_upper_bound_is_the_largest_reachable_scale():
    bounds = {kind: make().upper_bound for kind, make in ONE_OF_EACH.items()}
    limited = {"fixed": 8, "fixed_skipping": 8, "no_op": 1, "dynamic_full": 64}
    assert bounds == {**limited, **dict.fromkeys(("dynamic", "auto", "users_own"))}


def test_no_op_adds_no_operations():
    loss_scale, tree = jls.NoOpLossScale(), {"kernel": jnp.ones(3, jnp.float16), "step": 3}

    def step(grads):
        new_loss_scale, should_apply = loss_scale.update(grads)
        return loss_scale.unscale(loss_scale.scale(grads)), new_loss_scale, should_apply

    assert jax.tree.leaves(loss_scale) == []
    assert (loss_scale.lower_bound, loss_scale.upper_bound) == (1, 1)
    assert loss_scale.scale(tree) is tree
    assert loss_scale.unscale(tree) is tree
    assert loss_scale.adjust(False) is loss_scale
    assert jax.make_jaxpr(step)(tree).eqns == []


# The user-defined class is excluded because its equality is that of a dataclass.
each_of_ours = pytest.mark.parametrize("kind", [kind for kind in ONE_OF_EACH if kind != "users_own"])


@each_of_ours
def test_comparing_traced_loss_scales_raises(kind):
    loss_scale = ONE_OF_EACH[kind]()
    if not jax.tree.leaves(loss_scale):
        assert jax.jit(lambda a, b: a == b)(loss_scale, loss_scale)
        return
    for compare in (lambda a: a == a, lambda a: a == loss_scale, lambda a: loss_scale == a, lambda a: a != a):
        with pytest.raises(ValueError, match=r"`==` got a traced `\w+LossScale`.*outside `jax.jit`"):
            jax.jit(compare)(loss_scale)


@each_of_ours
def test_concrete_loss_scales_can_be_compared_under_jit(kind):
    make = ONE_OF_EACH[kind]
    assert jax.jit(lambda: make() == make())()
    assert not jax.jit(lambda: make() == jls.FixedLossScale(3))()
    assert hash(make()) == hash(make())
