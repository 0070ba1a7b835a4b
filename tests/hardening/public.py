"""What each public argument may not be: a row for each, beside arguments that are right."""

import dataclasses
import functools
import importlib
import inspect
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import optax

import jax_lossscale as jls

NAN, INF = float("nan"), float("inf")
TX = jls.loss_scaled(optax.sgd(0.1), "dynamic")
PARAMS = jnp.ones(2)
STATE = TX.init(PARAMS)
PLAIN_STATE = optax.sgd(0.1).init(PARAMS)

# Arguments of a kind, and what is wrong in their place.
NUMBER = ("3", [3.0], 3j, True, np.array(True), NAN, INF, 10**400, len)
POSITIVE = (*NUMBER, 0, -1)
STATE_NUMBER = (*NUMBER, np.array([1.0, NAN]), np.array(["a"]), np.array([1j]))
COUNT = ("3", 2.5, -1, 2**31, True, NAN, [3])
STATE_COUNT = (*COUNT, np.array([1, -1]), np.array([1.0, 2.5]))
FLAG = (None, 1, "yes", np.array([True, False]))
ONE_OF_SOME = (None, 3, "other", [])
BOOL_SCALAR = (1, "yes", np.array([True, False]), 1.0, [True])
DTYPE = (None, 16, "half-precision", len, jnp.int32)
POLICY = (3, "wide", {}, [], jls.PrecisionRule("wide"))
FUNCTION = (None, 3, "loss", [len])
OPTIONAL_FUNCTION = FUNCTION[1:]
ARGNUMS = ("0", 0.5, [0.5], None, (0, "1"))
SCALE = ("8", "other", True, 0, -1, NAN, jls.DynamicLossScale, PLAIN_STATE, TX, len, 3j, jnp.ones(2))
LOSS_SCALE = (8, "dynamic", None, jls.DynamicLossScale, STATE, True)
OPT_STATE = (None, 3, "state", PLAIN_STATE, TX, [STATE, STATE], jls.DynamicLossScale, len)
MAPPING = (None, 3, "state", [("scale", 8.0)], {"other": 8.0}, len)
MAGNITUDES = ("x", 3, [-1.0], ["three"], [[1.0]], [1j])
AXES = (3, "x")

# No row, and why.
ANY_TREE = "every value is a pytree, and the leaf rule says what becomes of its leaves"
PASSED_ON = "goes to the user's own function, chain or class as it is"
BY_JAX = "JAX refuses it, in its own words"
JUST_STORED = "a record that the library makes, and whoever makes one stores what they like"


def loss(x):
    return x**2


def mean(x, batch):
    return jnp.mean(x * batch)


def in_module(name):
    return importlib.import_module(f"jax_lossscale.{name}" if name else "jax_lossscale")


_DIFFERENTIATED = {"fun": FUNCTION, "loss_scale": SCALE, "argnums": BY_JAX, "has_aux": BY_JAX}
_GRADIENT = ({"fun": loss, "loss_scale": 8}, {**_DIFFERENTIATED, "holomorphic": BY_JAX, "allow_int": BY_JAX})
_TRANSFER = {"loss_scale": LOSS_SCALE}

# (the arguments that are right, what may not be in the place of each)
ROWS = {
    "": {
        "AutoLossScale": (
            {},
            {
                "initial_loss_scale": (*NUMBER, None, 0, -1),
                "min_loss_scale": (*POSITIVE, None, 1e-39, 2.0**16),
                "max_loss_scale": (*NUMBER, 0, 4),
                "log2_headroom": (*NUMBER, None, -1),
                "current_loss_scale": (*STATE_NUMBER, 0, -1, 1e-39),
                "log2_peak": STATE_NUMBER,
                "log2_margin": (*STATE_NUMBER, -1, np.array([-1.0])),
                "log2_allowance": (*STATE_NUMBER, -1, np.array([-1.0])),
                "num_finite_steps": ("3", 2.5, -2, 2**31, True, NAN, [3], np.array([1, -2]), np.array([1.0, 2.5])),
            },
        ),
        "DynamicLossScale": (
            {},
            {
                "initial_loss_scale": (*NUMBER, None, 0, -1),
                "increment_period": (*COUNT, None, 0),
                "multiplier": (*NUMBER, None, 1, 0.5),
                "backoff_factor": (*NUMBER, 0, 1, 2),
                "min_loss_scale": (*POSITIVE, None, 1e-39, 2.0**16),
                "max_loss_scale": (*NUMBER, 0, 4),
                "hysteresis": (*COUNT, None, 0),
                "hysteresis_refill": ONE_OF_SOME,
                "current_loss_scale": (*STATE_NUMBER, 0, -1, 1e-39),
                "num_good_steps": STATE_COUNT,
                "hysteresis_left": STATE_COUNT,
            },
        ),
        "FixedLossScale": (
            {"loss_scale_value": 8},
            {"loss_scale_value": (*STATE_NUMBER, None, 0.5, 0), "skip_nonfinite": FLAG},
        ),
        "PrecisionPolicy": (
            {},
            {
                "rules": (None, 3, "wide", {"precision": "wide"}, [3], [{"other": 1}]),
                "recompute": (None, "yes", -1.0, NAN, INF, np.array([True, False])),
                "narrow_skips": FLAG,
                "errors": ("8", 3, True, [1.0], [1.0, -1.0], [NAN, 1.0]),
                "loss_scale": ("8", True, 0, -1, NAN, INF, [8.0]),
            },
        ),
        "PrecisionRule": (
            {"precision": "wide"},
            {
                "precision": ONE_OF_SOME,
                **dict.fromkeys(("layer", "operation", "source", "function"), (None, 3, "", ["a"])),
                **dict.fromkeys(("parameter", "reason"), (None, 3, ["a"])),
            },
        ),
        "autocast": ({"fun": loss}, {"fun": FUNCTION, "dtype": (*DTYPE, jnp.complex64), "policy": POLICY}),
        "in_half": ({"function": loss}, {"function": FUNCTION, "otherwise": OPTIONAL_FUNCTION}),
        "keep_float32": ({"function": loss}, {"function": OPTIONAL_FUNCTION}),
        "AccumulatedGradients": ({}, dict.fromkeys(jls.AccumulatedGradients._fields, JUST_STORED)),
        "BadStep": ({}, dict.fromkeys(jls.BadStep._fields, JUST_STORED)),
        "LossScaledState": ({}, dict.fromkeys(jls.LossScaledState._fields, JUST_STORED)),
        "LossScaledTransformation": ({}, {"init": JUST_STORED, "update": JUST_STORED}),
        "accumulate_gradients": (
            {"fun": mean, "loss_scale": 8, "num_microbatches": 2},
            {
                **_DIFFERENTIATED,
                "num_microbatches": (*COUNT, None, 0),
                "batch_argnums": ARGNUMS,
                "allow_int": BY_JAX,
            },
        ),
        "all_finite": ({"tree": PARAMS}, {"tree": ANY_TREE, "axis_name": BY_JAX}),
        "cast_floating": (
            {"tree": PARAMS, "dtype": "float16"},
            {"tree": ANY_TREE, "dtype": DTYPE, "where": PASSED_ON},
        ),
        "get": (
            {},
            {
                "identifier": (
                    *("other", True, 3j, [], {}, len, NAN, 0),
                    {"class_name": [], "config": {}},
                    {"class_name": "FixedLossScale", "config": "ab"},
                    {"class_name": "FixedLossScale", "config": {}},
                    {"class_name": "FixedLossScale", "config": {"loss_scale_value": 8, "__class__": 3}},
                )
            },
        ),
        "get_loss_scale": ({"opt_state": STATE}, {"opt_state": OPT_STATE, "path": (3, ["a"], b"a", "nope", len)}),
        "loss_scale_for": ({}, {"dtype": (*DTYPE, jnp.float8_e4m3fn)}),
        "loss_scaled": (
            {"inner": optax.sgd(0.1)},
            {
                "inner": (None, 3, "adam", optax.adam, SimpleNamespace(init=len)),
                "loss_scale": ("other", True, [], {}, 3j, 0),
                "axis_name": BY_JAX,
                "skip": ONE_OF_SOME,
                "record_bad_steps": FLAG,
            },
        ),
        "metrics": ({}, {"opt_state": OPT_STATE}),
        "raise_if_stuck": ({"opt_state": STATE}, {"opt_state": OPT_STATE, "patience": (*COUNT, None, 0, INF, len)}),
        "scale_gradient": ({"tree": PARAMS}, {"tree": ANY_TREE, "scale": SCALE}),
        "unscale_gradient": ({"tree": PARAMS}, {"tree": ANY_TREE, "scale": SCALE}),
        "scaled_grad": _GRADIENT,
        "scaled_inside": ({"fun": loss, "loss_scale": 8}, {"fun": FUNCTION, "loss_scale": SCALE}),
        "value_and_scaled_grad": _GRADIENT,
        "select_tree": (
            {"pred": True, "on_true": PARAMS, "on_false": PARAMS},
            {
                "pred": (None, *BOOL_SCALAR),
                "on_true": ("a", jnp.ones(3), PARAMS.astype(jnp.float16)),
                "on_false": ("a", jnp.ones(3), [], PARAMS.astype(jnp.float16)),
            },
        ),
        "serialize": ({}, {"loss_scale": LOSS_SCALE}),
    },
    "diagnostics": {
        **{
            name: ({}, dict.fromkeys(inspect.signature(getattr(jls.diagnostics, name)).parameters, JUST_STORED))
            for name in (
                *("AutocastReport", "OperationPrecision", "ProductFacts"),
                *("ExponentHistogram", "GradientComparison", "LeafGradientError", "LeafReport"),
                *("LossScaleSuggestion", "NonfiniteReport", "OperationRange", "RangeReport", "Simulation", "Underflow"),
            )
        },
        "autocast_report": (
            {"fun": loss, "args": (jnp.float32(1.0),)},
            {
                "fun": FUNCTION,
                "argnums": ARGNUMS,
                "has_aux": FLAG,
                "dtype": DTYPE,
                "policy": POLICY,
                "args": PASSED_ON,
                "kwargs": PASSED_ON,
            },
        ),
        "find_precision": (
            {"fun": loss, "args": (jnp.float32(1.0),)},
            {
                "fun": FUNCTION,
                "argnums": ARGNUMS,
                "has_aux": FLAG,
                "dtype": DTYPE,
                "tolerance": ("3", True, NAN, INF, 0, -1, [0.1]),
                "batches": (3, "x", []),
                "progress": FLAG,
                "args": PASSED_ON,
                "kwargs": PASSED_ON,
            },
        ),
        "compare_gradients": (
            {"fun": loss, "args": (jnp.float32(1.0),)},
            {
                "fun": FUNCTION,
                "argnums": ARGNUMS,
                "has_aux": FLAG,
                "dtype": DTYPE,
                "loss_scales": ("8", 8, [], [0.0], [NAN], [True], ["a"], [-1.0], [INF]),
                "reference": OPTIONAL_FUNCTION,
                "progress": OPTIONAL_FUNCTION,
                "args": PASSED_ON,
                "kwargs": PASSED_ON,
            },
        ),
        "explain": ({}, {"opt_state": OPT_STATE, "params": ANY_TREE}),
        "exponent_histogram": ({"tree": PARAMS}, {"tree": ANY_TREE, "per_leaf": FLAG}),
        "first_nonfinite": ({"tree": PARAMS}, {"tree": ANY_TREE, "axis_name": BY_JAX}),
        "in_precision": ({"fun": loss}, {"fun": FUNCTION, "dtype": DTYPE}),
        "leaf_path": (
            {"tree": [PARAMS]},
            {"tree": ANY_TREE, "index": ("0", None, 0.5, 5, -2, jnp.ones(2), [0])},
        ),
        "nonfinite_report": ({}, {"grads": ANY_TREE}),
        "range_report": (
            {"fun": loss, "args": (jnp.float32(1.0),)},
            {
                "fun": FUNCTION,
                "argnums": ARGNUMS,
                "has_aux": FLAG,
                "dtype": DTYPE,
                "loss_scale": tuple(each for each in SCALE if each is not None),  # which is the default
                "progress": FLAG,
                "args": PASSED_ON,
                "kwargs": PASSED_ON,
            },
        ),
        "simulate": (
            {"loss_scale": jls.AutoLossScale(), "largest": [1.0]},
            {
                "loss_scale": LOSS_SCALE,
                "grads_finite": "below, since either is given",
                "largest": MAGNITUDES,
                "inside": (*MAGNITUDES, [1.0, 2.0]),
                "dtype": DTYPE,
            },
        ),
        "suggest_loss_scale": (
            {"grads": PARAMS},
            {"grads": ANY_TREE, "dtype": DTYPE, "headroom": (*NUMBER, None, 0, 0.5)},
        ),
        "underflow_fraction": ({"grads": PARAMS}, {"grads": ANY_TREE, "dtype": DTYPE, "per_leaf": FLAG}),
    },
    "plotting": {
        "plot_exponents": (
            {"tree_or_histogram": PARAMS},
            {
                "tree_or_histogram": ("x", 3, None, []),
                "loss_scale": SCALE,
                "dtype": DTYPE,
                "yscale": ONE_OF_SOME,
                "ax": AXES,
            },
        ),
        "plot_gradient_error": ({}, {"comparison": (None, 3, "x"), "ax": "checked as those of the others"}),
        "plot_loss_scale": (
            {"loss_scale": [1.0, 2.0]},
            {"loss_scale": (None, 3, "x", []), "skipped": ("x", 3, [True], [NAN, True]), "ax": AXES},
        ),
        "plot_run": (
            {"history": {"loss": [1.0]}},
            {"history": (None, 3, "x", [], {}, [3]), "axes": (3, "x", [3, 4])},
        ),
    },
    "interop.torch": {
        "from_torch": (
            {"state_dict": in_module("interop.torch").to_torch(jls.DynamicLossScale(min_loss_scale=2.0**-126))},
            {"state_dict": MAPPING, "min_loss_scale": POSITIVE},
        ),
        "to_torch": ({}, _TRANSFER),
    },
    "interop.keras": {
        "from_keras": (
            {"config": {"initial_scale": 8.0, "dynamic_growth_steps": 3}},
            {"config": MAPPING, "state": MAPPING[1:], "min_loss_scale": POSITIVE},
        ),
        "to_keras": ({}, _TRANSFER),
    },
    "interop.tensorflow": {
        "from_tensorflow": (
            {"config": {"initial_loss_scale": 8.0, "increment_period": 3, "multiplier": 2.0}},
            {"config": MAPPING, "state": MAPPING[1:]},
        ),
        "to_tensorflow": ({}, _TRANSFER),
    },
    "interop.flax": {
        "Optimizer": ({}, {"args": PASSED_ON, "kwargs": PASSED_ON}),
        "TrainState": (
            {},
            dict.fromkeys(inspect.signature(in_module("interop.flax").TrainState).parameters, JUST_STORED),
        ),
        "from_flax": ({}, {"dynamic_scale": LOSS_SCALE}),
        "register": ({}, {"kind": (3, None, "x", int, jls.DynamicLossScale())}),
        "to_flax": ({}, _TRANSFER),
    },
    "interop.jmp": {"from_jmp": ({}, {"loss_scale": LOSS_SCALE}), "to_jmp": ({}, _TRANSFER)},
    "interop.equinox": {
        "filter_value_and_scaled_grad": (
            {"fun": loss, "loss_scale": 8},
            {"fun": FUNCTION, "loss_scale": SCALE, "has_aux": BY_JAX},
        )
    },
}

# Methods, which have no row of their own above.
_TOLD = {
    "value": ("1", [1.0], 1j, True, jnp.ones(2), len),
    **dict.fromkeys(("skip_if", "grads_finite"), BOOL_SCALAR),
    "state": OPT_STATE,
}
METHODS = {
    "update": (TX.update, {"updates": PARAMS, "state": STATE, "params": PARAMS}, _TOLD),
    "update_and_apply": (
        TX.update_and_apply,
        {"scaled_grads": PARAMS, "state": STATE, "params": PARAMS},
        {
            **_TOLD,
            "params": (None,),
        },  # their structure is the chain's affair: see optax.lookahead
    ),
    "simulate, told the verdicts": (
        jls.diagnostics.simulate,
        {"loss_scale": jls.DynamicLossScale()},
        {"grads_finite": ("x", 3, [1.5], [[True]], ["three"], True, [None], [2])},
    ),
    "DynamicLossScale.adjust": (jls.DynamicLossScale().adjust, {}, {"grads_finite": (None, *BOOL_SCALAR)}),
    "AutoLossScale.adjust": (
        jls.AutoLossScale().adjust,
        {"grads_finite": True},
        {"grads_finite": (None, *BOOL_SCALAR), "largest": ("1", [1.0], 1j, True, jnp.ones(2), len)},
    ),
    **{
        f"{kind.__name__}.from_config": (kind.from_config, {}, {"config": (None, 3, "ab", [1], {"other": 1}, {3: 4})})
        for kind in (jls.AutoLossScale, jls.DynamicLossScale, jls.FixedLossScale, jls.NoOpLossScale)
    },
    **{
        f"dataclasses.replace of {name}": (
            functools.partial(dataclasses.replace, kind()),
            {},
            dict.fromkeys(leaves, (None,)),
        )
        for name, kind, leaves in (
            ("DynamicLossScale", jls.DynamicLossScale, ("current_loss_scale", "num_good_steps")),
            ("AutoLossScale", jls.AutoLossScale, ("current_loss_scale", "log2_peak", "num_finite_steps")),
        )
    },
}
