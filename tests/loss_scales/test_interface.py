"""Every kind behind one interface."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kinds import ONE_OF_EACH, Dynamic, each_kind, grads_of, named

import jax_lossscale as jls


@each_kind
def test_interface(make, update):
    loss_scale = make()
    assert isinstance(loss_scale, jls.LossScale)
    for grad in grads_of("TF"):
        loss_scale, should_apply = update(loss_scale, grad)
        chex.assert_shape([loss_scale(), should_apply], ())
        chex.assert_type([loss_scale(), should_apply], [jnp.float32, jnp.bool_])


@pytest.mark.parametrize(
    ("kind", "skips"),
    [
        ("fixed", False),
        ("fixed_skipping", True),
        ("no_op", False),
        ("dynamic", True),
        ("dynamic_full", True),
        ("users_own", True),
    ],
)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_who_skips_a_nonfinite_step(kind, skips, value, update):
    _, should_apply = update(ONE_OF_EACH[kind](), {"kernel": np.array([1, value, 1], np.float32)})
    assert bool(should_apply) is not skips


@each_kind
@pytest.mark.parametrize("flag", [True, False])
def test_adjust_is_update_with_a_known_verdict(make, flag):
    loss_scale = make()
    expected, _ = loss_scale.update(np.float32(1.0 if flag else np.nan))
    measured = {"largest": jnp.float32(1.0)} if loss_scale.needs_largest else {}
    for grads_finite in flag, np.bool_(flag), jnp.array(flag):
        chex.assert_trees_all_equal(loss_scale.adjust(grads_finite, **measured), expected, strict=True)


@pytest.mark.parametrize(
    ("kind", "bound"),
    [
        ("fixed", 8),
        ("fixed_skipping", 8),
        ("no_op", 1),
        ("dynamic", None),
        ("dynamic_full", 64),
        ("auto", None),
        ("users_own", None),
    ],
)
def test_upper_bound_is_the_highest_scale_that_can_come(kind, bound):
    assert ONE_OF_EACH[kind]().upper_bound == bound


@each_kind
def test_unscale_undoes_scale(make):
    loss_scale = make()
    tree = {"kernel": jnp.array([1.0, -0.5], jnp.float16), "bias": jnp.float32(3), "step": 3, "frozen": None}
    scaled = loss_scale.scale(tree)
    chex.assert_trees_all_equal(scaled["bias"], 3 * loss_scale())
    assert scaled["kernel"].dtype == jnp.float16
    unscaled = loss_scale.unscale(scaled)
    chex.assert_trees_all_equal(unscaled["kernel"].astype(jnp.float16), tree["kernel"])
    chex.assert_trees_all_equal(unscaled["bias"], tree["bias"])
    assert (unscaled["step"], unscaled["frozen"]) == (3, None)


@pytest.mark.parametrize(
    ("grads", "finite"),  # what is finite is specified in tests/measure
    named(
        [
            ("python_number", 4.0, True),
            ("none", None, True),
            ("empty_tree", {"encoder": {}, "decoder": ([], ())}, True),
            ("nested_inf", {"encoder": [np.ones(3), (np.zeros(2), {"bias": np.float32(-np.inf)})]}, False),
            ("integers_beside_nan", [np.arange(3), None, np.float32(np.nan)], False),
        ]
    ),
)
def test_update_judges_any_tree(grads, finite, update):
    loss_scale, should_apply = update(Dynamic(8), grads)
    assert (bool(should_apply), float(loss_scale())) == (finite, 8 if finite else 4)


def test_update_passes_by_float0_keys_and_what_is_no_array():
    float0 = np.zeros(2, jax.dtypes.float0)
    loss_scale, should_apply = Dynamic(8).update([float0, jax.random.key(0), "kernel", len])
    assert (bool(should_apply), float(loss_scale())) == (True, 8)


def test_a_traced_update_leaves_no_trace_of_a_call():
    program = jax.make_jaxpr(lambda grads: jls.DynamicLossScale().update(grads))({"kernel": jnp.ones(3)})
    assert not [eqn for eqn in program.eqns if "update" in str(eqn.params.get("name"))]


def test_no_op_is_free():
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


@each_kind
def test_strict_promotion_changes_nothing(make):
    results = []
    for promotion in "standard", "strict":
        loss_scale, scales = make(), []
        with jax.numpy_dtype_promotion(promotion):
            for grad in 1e-3, np.nan, 1e-3, 0.0, 1e-6, np.nan, np.nan, 1e-3:
                loss_scale, _ = loss_scale.update(np.float32([grad]))
                scales.append(float(loss_scale()))
        results.append(scales)
    assert results[0] == results[1]


@each_kind
def test_equal_ones_have_equal_hashes(make):
    if make is ONE_OF_EACH["users_own"]:
        pytest.skip("a dataclass of the user's, with a hash of its own")
    assert hash(make()) == hash(make())
