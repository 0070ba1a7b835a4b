"""Conversion between loss scales and their identifiers or configurations: `get`, `serialize` and `loss_scale_for`."""

import dataclasses
import json
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kinds import Dynamic, Fixed, HalvingLossScale, each_kind, named

import jax_lossscale as jls


@pytest.mark.parametrize(
    ("identifier", "expected"),
    named(
        [
            ("dynamic", "dynamic", Dynamic()),
            ("None", None, jls.NoOpLossScale()),
            ("number", 8, Fixed(8)),
            ("mapping", MappingProxyType({"class_name": "NoOpLossScale", "config": {}}), jls.NoOpLossScale()),
            (
                "dictionary_with_defaults",
                {"class_name": "DynamicLossScale", "config": {"initial_loss_scale": 8}},
                Dynamic(8),
            ),
            ("users_own", {"class_name": "HalvingLossScale", "config": {"initial": 8.0}}, HalvingLossScale(8.0)),
        ]
    ),
)
def test_get_returns_the_loss_scale_of_an_identifier(identifier, expected):
    loss_scale = jls.get(identifier)
    assert type(loss_scale) is type(expected)
    assert loss_scale == expected


@each_kind
def test_get_returns_loss_scales_unchanged_and_accepts_traced_numbers(make):
    loss_scale = make()
    assert jls.get(loss_scale) is loss_scale
    assert jax.jit(lambda number: jls.get(number)())(8.0) == 8


@pytest.mark.parametrize(
    "identifier",
    [
        *["Dynamic", "fixed", "8", b"dynamic", True, np.True_, jnp.array(True), 8j, [8], np.array([8.0])],
        *[Dynamic, len],
        *[{}, {"class_name": "DynamicLossScale"}, {"class_name": "NoOpLossScale", "config": {}, "state": 8}],
    ],
    ids=repr,
)
def test_get_error_lists_the_accepted_identifiers(identifier):
    with pytest.raises(ValueError) as error:
        jls.get(identifier)
    for accepted in repr(identifier), "a number", "'dynamic'", "None", "a `LossScale`", "`serialize`":
        assert accepted in str(error.value)


@pytest.mark.parametrize(
    ("class_name", "config"),
    [
        ("NoLossScale", {}),
        ("LossScale", {}),
        (None, {}),
        (["DynamicLossScale"], {}),
        ("DynamicLossScale", {"multiplier": 0.5}),
        ("DynamicLossScale", {"period": 3}),
        ("DynamicLossScale", None),
        ("DynamicLossScale", {8: 8}),
        ("FixedLossScale", {}),
        ("HalvingLossScale", {"final": 1}),
    ],
)
def test_get_rejects_invalid_dictionaries(class_name, config):
    with pytest.raises(ValueError) as error:
        jls.get({"class_name": class_name, "config": config})
    assert str(class_name) in str(error.value)


def test_get_finds_a_subclass_of_a_user_defined_class():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class BelowHalvingLossScale(HalvingLossScale):
        initial: float = dataclasses.field(metadata={"static": True})

    rebuilt = jls.get(jls.serialize(BelowHalvingLossScale(16.0)))
    assert (type(rebuilt), float(rebuilt())) == (BelowHalvingLossScale, 16)


def test_arguments_of_a_subclass_are_passed_to_its_other_base_classes():
    class Tagged:
        def __init_subclass__(cls, *, tag):
            cls.tag = tag

    class TaggedLossScale(HalvingLossScale, Tagged, tag="mine"):
        pass

    assert TaggedLossScale.tag == "mine"


class UnregisteredLossScale(HalvingLossScale):
    pass


class UnregisteredBelowOurs(Dynamic):
    pass


@pytest.mark.parametrize("kind", [UnregisteredLossScale, UnregisteredBelowOurs])
def test_get_rejects_classes_that_are_not_registered_as_pytrees(kind):
    loss_scale = kind(8.0)
    for identifier in (loss_scale, {"class_name": kind.__name__, "config": loss_scale.get_config()}):
        with pytest.raises(ValueError, match=f"{kind.__name__}` is not registered as a pytree"):
            jls.get(identifier)


@each_kind
def test_serialize_and_get_round_trip_through_json_without_the_state(make):
    moved = make().adjust(False)
    rebuilt = jls.get(json.loads(json.dumps(jls.serialize(moved))))
    assert type(rebuilt) is type(moved)
    assert rebuilt == make()
    assert type(moved).from_config(moved.get_config()) == make()


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        (jnp.float16, jls.AutoLossScale),
        ("float16", jls.AutoLossScale),
        (np.dtype("float16"), jls.AutoLossScale),
        (jnp.bfloat16, jls.NoOpLossScale),
        ("bfloat16", jls.NoOpLossScale),
        (jnp.float32, jls.NoOpLossScale),
        (jnp.float64, jls.NoOpLossScale),
    ],
)
def test_loss_scale_for_returns_the_recommended_class(dtype, kind):
    assert jls.loss_scale_for(dtype) == kind()


@pytest.mark.parametrize(
    "dtype", [None, jnp.int32, jnp.complex64, jnp.bool_, jnp.float8_e4m3fn, "half-precision", 16], ids=str
)
def test_loss_scale_for_rejects_other_dtypes(dtype):
    with pytest.raises(ValueError, match="loss_scale_for"):
        jls.loss_scale_for(dtype)


OWN_KINDS = [kind for kind in vars(jls).values() if isinstance(kind, type) and issubclass(kind, jls.LossScale)]
OWN_KINDS.remove(jls.LossScale)


@pytest.mark.parametrize("kind", OWN_KINDS)
def test_user_class_cannot_replace_a_builtin_class_of_the_same_name(kind):
    impostor = type(kind.__name__, (HalvingLossScale,), {})
    jax.tree_util.register_dataclass(impostor, data_fields=["num_overflows"], meta_fields=["initial"])
    ours = kind(8) if kind is not jls.NoOpLossScale else kind()
    assert type(jls.get(jls.serialize(ours))) is kind
    with pytest.raises(ValueError, match="Rename the class"):
        jls.serialize(impostor(8.0))


def test_get_instantiates_the_class_that_was_defined_last():
    """A class can be redefined with another base class, for example if a notebook cell is edited and run again."""

    def define(base, scale):
        methods = {"__call__": lambda self: scale, "adjust": lambda self, grads_finite: self}
        return jax.tree_util.register_static(type("Redefined", (base,), {**methods, "get_config": lambda self: {}}))

    define(jls.LossScale, 1.0)
    assert jls.get(jls.serialize(define(jls.NoOpLossScale, 2.0)()))() == 2.0
    assert jls.get(jls.serialize(define(jls.LossScale, 3.0)()))() == 3.0
