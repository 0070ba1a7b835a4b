"""`keep_float32` and the rules of a policy: the operations that they match, and their effect on these operations."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reading import distance, equations, matmul_dtypes
from small_programs import W, X, shard_map

import jax_lossscale as jls
from jax_lossscale._program.location import Location

HALF, FLOAT32 = "float16", "float32"


def multiplied(w, x):
    return x @ w


@jls.keep_float32
def saved(w, x):
    return x @ w


@jax.custom_vjp
def with_a_rule(w, x):
    return x @ w


def backward_in_a_layer(saved, y):
    with jax.named_scope("backward"):
        return saved[1].T @ y, y @ saved[0].T


with_a_rule.defvjp(lambda w, x: (x @ w, (w, x)), backward_in_a_layer)
compiled = jax.jit(multiplied)


def following(precision, **patterns):
    return functools.partial(jls.autocast, policy=jls.PrecisionPolicy([jls.PrecisionRule(precision, **patterns)]))


def dtypes_of(name, function, *args):
    eqns = [eqn for eqn in equations(jax.make_jaxpr(function)(*args)) if eqn.primitive.name == name]
    return [tuple(atom.aval.dtype.name for atom in (*eqn.invars, eqn.outvars[0])) for eqn in eqns]


def cached(w, x):
    """Call a jitted function inside and outside of `keep_float32`. Its jaxpr is cached and is therefore the same."""
    x = compiled(w, x)
    with jls.keep_float32():
        x = compiled(w, x)
    return compiled(w, x)


def in_scan(w, x):
    return jax.lax.scan(lambda x, _: (saved(w, x), None), x, length=2)[0] @ w


def around_a_loop(w, x):
    with jls.keep_float32():
        x = jax.lax.fori_loop(0, 2, lambda _, x: x @ w, x)
    return x @ w


# Functions that use `keep_float32`, and the dtypes of the matmuls of the forward pass.
MARKED = {
    "context": (lambda w, x: jls.keep_float32(multiplied)(w, x) @ w, [FLOAT32, HALF]),
    "below jit": (lambda w, x: jax.jit(saved)(w, x) @ w, [FLOAT32, HALF]),
    "around jit": (lambda w, x: jls.keep_float32(jax.jit(multiplied))(w, x) @ w, [FLOAT32, HALF]),
    "a cached function": (cached, [HALF, FLOAT32, HALF]),
    "below vmap": (lambda w, x: jax.vmap(saved, (None, 0))(w, x) @ w, [FLOAT32, HALF]),
    "below grad": (lambda w, x: x @ jax.grad(lambda w: jnp.sum(jnp.sin(saved(w, x))))(w), [FLOAT32, FLOAT32, HALF]),
    "below remat": (lambda w, x: jax.checkpoint(saved)(w, x) @ w, [FLOAT32, HALF]),
    "around remat": (lambda w, x: jls.keep_float32(jax.checkpoint(multiplied))(w, x) @ w, [FLOAT32, HALF]),
    "below scan": (in_scan, [FLOAT32, HALF]),
    "around a loop": (around_a_loop, [FLOAT32, HALF]),
    "around custom_vjp": (lambda w, x: jls.keep_float32(with_a_rule)(w, x) @ w, [FLOAT32, HALF]),
    "nested": (lambda w, x: jls.keep_float32(saved)(w, x) @ w, [FLOAT32, HALF]),
}


@pytest.mark.parametrize(("function", "expected"), MARKED.values(), ids=MARKED)
def test_matmuls_in_keep_float32_stay_float32(function, expected):
    """Without `autocast`, `keep_float32` has no effect."""
    assert set(matmul_dtypes(function, W, X)) == {FLOAT32}
    assert matmul_dtypes(jls.autocast(function), W, X) == expected
    assert matmul_dtypes(jls.autocast(jax.jit(function)), W, X) == expected
    assert matmul_dtypes(jax.jit(jls.autocast(function)), W, X) == expected
    loss = jls.autocast(lambda w, x: jnp.sum(function(w, x)))
    found = matmul_dtypes(jax.grad(loss, (0, 1)), W, X)
    assert set(found) == {HALF, FLOAT32}
    assert found.count(FLOAT32) >= 2 * expected.count(FLOAT32)


@pytest.mark.parametrize(
    "name", ["keep_float32_not", "no keep_float32", "keep_float32[0]", "keep_float32.head", "(keep_float32)"]
)
def test_scope_whose_name_contains_keep_float32_has_no_effect(name):
    def function(w, x):
        with jax.named_scope(name):
            return x @ w

    assert matmul_dtypes(jls.autocast(function), W, X) == [HALF]


def test_float32_operands_in_keep_float32_are_not_rounded():
    def function(w, x):
        return saved(w.T, jnp.sin(x)), w @ w

    np.testing.assert_array_equal(jls.autocast(function)(W, X)[0], function(W, X)[0])


def network(w, x):
    with jax.named_scope("encoder"):
        with jax.named_scope("first"):
            x = jnp.tanh(x @ w)
        with jax.named_scope("second"):
            x = jnp.tanh(x @ w)
    with jax.named_scope("encoder_head"):
        return head(w, x)


def head(w, x):
    return x @ w


FIRST_LINE = network.__code__.co_firstlineno + 3
RULES = {
    "a layer and its sublayers": ([{"layer": "encoder"}], [FLOAT32, FLOAT32, HALF]),
    "a path": ([{"layer": "encoder/first"}], [FLOAT32, HALF, HALF]),
    "a pattern": ([{"layer": "*/second"}], [HALF, FLOAT32, HALF]),
    "an operation": ([{"operation": "dot_general"}], [FLOAT32] * 3),
    "a line": ([{"source": f"test_policy.py:{FIRST_LINE}"}], [FLOAT32, HALF, HALF]),
    "a file": ([{"source": "test_policy.py:*"}], [FLOAT32] * 3),
    "a file with its folder": ([{"source": "autocast/test_policy.py:*"}], [FLOAT32] * 3),
    "a function": ([{"function": "head"}], [HALF, HALF, FLOAT32]),
    "all patterns": ([{"layer": "encoder", "operation": "dot*", "function": "network"}], [FLOAT32, FLOAT32, HALF]),
    "two rules": ([{"layer": "encoder/first"}, {"function": "head"}], [FLOAT32, HALF, FLOAT32]),
    "the first that matches": ([{"precision": "half", "layer": "*/first"}, {"layer": "*"}], [HALF, FLOAT32, FLOAT32]),
}


@pytest.mark.parametrize(("rules", "expected"), RULES.values(), ids=RULES)
def test_rule_matches_operations(rules, expected):
    policy = jls.PrecisionPolicy([{"precision": "float32", **rule} for rule in rules])
    half = functools.partial(jls.autocast, policy=policy)
    assert matmul_dtypes(half(network), W, X) == expected
    assert matmul_dtypes(half(jax.jit(network)), W, X) == expected
    in_a_loop = half(lambda w, x: jax.lax.scan(lambda x, _: (network(w, x), None), x, length=2)[0])
    assert matmul_dtypes(in_a_loop, W, X) == expected
    found = matmul_dtypes(jax.grad(lambda w, x: jnp.sum(half(network)(w, x))), W, X)
    assert found.count(FLOAT32) + found.count(HALF) == len(found)


@pytest.mark.parametrize("rule", [{"layer": "encoder"}, {"function": "unreadable"}, {"operation": "dot*"}], ids=str)
def test_rule_matches_code_without_a_source_file(rule):
    names = {"jax": jax}
    exec("def unreadable(w, x):\n    with jax.named_scope('encoder'):\n        return x @ w", names)
    policy = jls.PrecisionPolicy([jls.PrecisionRule("float32", **rule)])
    assert matmul_dtypes(jls.autocast(names["unreadable"], policy=policy), W, X) == [FLOAT32]


def in_blocks(w, x):
    for number in range(3):
        with jax.named_scope(f"blocks[{number}]"):
            x = jnp.tanh(x @ w)
    return x


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        ("blocks[1]", [HALF, FLOAT32, HALF]),
        ("blocks[*]", [FLOAT32, FLOAT32, FLOAT32]),
        ("*[2]", [HALF, HALF, FLOAT32]),
        ("blocks[?]", [FLOAT32, FLOAT32, FLOAT32]),
    ],
)
def test_brackets_in_a_pattern_match_literally(layer, expected):
    assert matmul_dtypes(following("float32", layer=layer)(in_blocks), W, X) == expected


def test_brackets_match_literally_in_parameters_and_functions():
    def loss(params, x):
        return [x @ w for w in params["w"]]

    half = following("float32", parameter="['w'][1]", function="*<locals>.loss")(loss)
    assert matmul_dtypes(half, {"w": [W, W + 1]}, X) == [HALF, FLOAT32]


MODEL = """
class Block:
    def __call__(self, w, x):
        return project(w, x)

def project(w, x):
    return x @ w
"""


@pytest.mark.parametrize("folder", [f"{jax.__path__[0]}opt", f"{jls.__path__[0]}_runs"], ids=["jaxopt", "ours"])
def test_package_with_the_prefix_of_a_known_package_is_user_code(folder):
    model = {}
    exec(compile(MODEL, f"{folder}/model.py", "exec"), model)
    policy = jls.PrecisionPolicy([jls.PrecisionRule("float32", function="project")])
    block = model["Block"]()
    report = jls.diagnostics.autocast_report(lambda *args: jnp.sum(block(*args)), jnp.ones((8, 4)), X, policy=policy)
    assert {(operation.layer, operation.dtype) for operation in report.matmuls} == {("Block", FLOAT32)}


def test_source_rule_does_not_depend_on_the_working_directory(monkeypatch, tmp_path):
    file = Path(__file__)
    report = jls.diagnostics.autocast_report(lambda w, x: jnp.sum(network(w, x)), W, X)
    sources = [f"{file}:*", f"autocast/{file.name}:*", f"{file.name}:{FIRST_LINE}", report.matmuls[0].source]
    for folder in ("/", file.parent, file.parents[1], tmp_path):
        monkeypatch.chdir(folder)
        for source in sources:
            assert FLOAT32 in matmul_dtypes(following("float32", source=source)(network), W, X)


def in_a_layer(w, x):
    with jax.named_scope("forward"):
        return jnp.sum(jnp.sin(with_a_rule(w, x)))


def test_layer_rule_that_matches_only_a_backward_rule_does_not_warn():
    loss = following("float32", layer="forward/backward")(in_a_layer)
    assert matmul_dtypes(jax.grad(loss, (0, 1)), W, X) == [HALF, FLOAT32, FLOAT32]
    # The backward rule might contain this operation.
    following("float32", layer="forward", operation="transpose")(in_a_layer)(W, X)


# Functions and rules that match none of their operations.
WITHOUT_A_MATCH = {
    "another layer": (network, "float32", {"layer": "decoder"}),
    "a part of a file name": (network, "float32", {"source": "policy.py:*"}),
    "a file without a line": (network, "float32", {"source": "test_policy.py"}),
    "a part of a folder name": (network, "float32", {"source": f"ocast/test_policy.py:{FIRST_LINE}"}),
    "despite a backward rule": (in_a_layer, "float32", {"layer": "forwards", "operation": "transpose"}),
    "only data movement": (lambda w, x: jnp.sin(x @ w).T @ x, "float32", {"operation": "transpose"}),
    "only a cumulative sum": (lambda w, x: jnp.cumsum(x @ w, axis=1), "half", {"operation": "cumsum"}),
}


@pytest.mark.parametrize(("function", "precision", "patterns"), WITHOUT_A_MATCH.values(), ids=WITHOUT_A_MATCH)
def test_rule_without_a_match_warns_and_has_no_effect(function, precision, patterns):
    of_matmuls = jls.PrecisionRule("half", operation="dot_general")
    policies = [jls.PrecisionPolicy([*rules, of_matmuls]) for rules in ([], [{"precision": precision, **patterns}])]
    expected, half = (jls.autocast(function, policy=policy) for policy in policies)
    with pytest.warns(UserWarning, match=f"no operation matches PrecisionRule\\('{precision}', {next(iter(patterns))}"):
        found = jax.make_jaxpr(half)(W, X)
    jaxprs = jax.make_jaxpr(expected)(W, X), found
    types, others = ([eqn.outvars[0].aval for eqn in equations(jaxpr)] for jaxpr in jaxprs)
    assert types == others


# For each situation: a function, the patterns of a rule for half precision, a primitive, and the dtypes of its operands
# and of its result.
OF_MATMULS = {"operation": "dot_general"}, "dot_general", (HALF, HALF, HALF)
MASK = (jnp.arange(8.0) > 3)[None].astype(jnp.float32)
IN_HALF = {
    "keep_float32": (jls.keep_float32(lambda w, x: jnp.matmul(x, w, precision="highest")), OF_MATMULS),
    "an outer product": (lambda w, x: jax.lax.dot_general(x[0], x[1], (((), ()), ((), ()))) @ w, OF_MATMULS),
    "an outer product with an axis of size 1": (lambda w, x: (x[:, :1] @ w[:1]) @ w, OF_MATMULS),
    "a constant of unknown bounds": (lambda w, x: x @ jnp.linalg.cholesky(8 * jnp.eye(8)), OF_MATMULS),
    "a mask": (lambda w, x: jax.nn.softmax(x @ w - 1e9 * MASK), ({}, *OF_MATMULS[1:])),
    "the largest number": (lambda w, x: jnp.tanh(x @ w - 65504.0 * MASK), ({}, "sub", (HALF,) * 3)),
    "an infinity": (lambda w, x: jnp.tanh(x @ w - jnp.where(MASK > 0, jnp.inf, 0.0)), ({}, "sub", (HALF,) * 3)),
    "too large a number": (lambda w, x: jnp.tanh(x @ w - 65536.0 * MASK), ({}, "sub", (FLOAT32,) * 3)),
    "arithmetic": (network, ({"operation": "tanh"}, "tanh", (HALF, HALF))),
    "integer operands": (
        lambda w, x: jnp.tanh(x @ w).at[jnp.array([3, 1])].get(mode="fill", fill_value=0.1) @ w,
        ({"operation": "gather"}, "gather", (HALF, "int32", HALF)),
    ),
    # JAX does not have complex numbers in half precision.
    "complex numbers": (
        lambda w, x: jnp.abs(jax.lax.complex(x @ w, jnp.sin(x))),
        ({}, "complex", (FLOAT32, FLOAT32, "complex64")),
    ),
    "all operations": (lambda w, x: jnp.mean(network(w, x) ** 2), ({}, "integer_pow", (HALF, HALF))),
}


@pytest.mark.parametrize(("function", "rule"), IN_HALF.values(), ids=IN_HALF)
def test_half_precision_rule(function, rule):
    patterns, primitive, expected = rule
    half = following("half", **patterns)(function)
    assert {*dtypes_of(primitive, half, W, X)} == {expected}
    assert distance(function(W, X), half(W, X)) < 1e-2


def test_half_precision_rule_does_not_apply_to_conversions():
    def with_positions(w, x):
        return jnp.tanh(x + jnp.arange(len(w))[None].astype(jnp.float32) * w[:1]) @ w

    half = following("half")(with_positions)
    assert ("int32", "float32") in dtypes_of("convert_element_type", half, W, X)
    assert dtypes_of("tanh", half, W, X) == [(HALF, HALF)]


@pytest.mark.parametrize("precision", ["half", "float32_result"])
@pytest.mark.parametrize("number", [1e6, 1e-9])
def test_rule_has_no_effect_on_a_matmul_with_a_constant_out_of_range(precision, number):
    policy = jls.PrecisionPolicy([jls.PrecisionRule(precision, operation="dot_general")])

    def loss(x):
        return jnp.sum(x @ jnp.full((8, 8), number)) / number

    plain, found = (jax.value_and_grad(each)(X) for each in (loss, jls.autocast(loss, policy=policy)))
    np.testing.assert_allclose(found[0], plain[0], rtol=1e-6)
    np.testing.assert_allclose(found[1], plain[1], rtol=1e-6)
    for each in jls.diagnostics.autocast_report(loss, X, policy=policy):
        if each.is_matmul:
            outside = "its constant operand is outside the range of float16"
            assert each.reason == f"{outside}, so {policy.rules[0]!r} has no effect on this matmul"
    assert matmul_dtypes(jls.autocast(loss, jnp.bfloat16, policy=policy), X)[0].startswith("bfloat16")


def test_float32_rule_applies_to_all_gather_and_its_gradient():
    for half, dtype in ((jls.autocast, HALF), (following("float32", operation="all_gather"), FLOAT32)):
        assert dtypes_of("all_gather", half(shard_map), W, X) == [(dtype, dtype)]
        assert dtypes_of("reduce_scatter", jax.grad(half(shard_map)), W, X) == [(dtype, dtype)]
        assert matmul_dtypes(half(shard_map), W, X) == [HALF, HALF]


def convolved(w, x):
    image, kernel = jnp.tile(x[:, :, None], (1, 1, 2)), w.reshape(4, 2, 8)
    return jax.lax.conv_general_dilated(image, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))


@pytest.mark.parametrize("function", [multiplied, convolved])
def test_float32_result_rule_keeps_half_precision_operands(function):
    float32_result = following("float32_result", function=function.__name__)(function)
    assert matmul_dtypes(float32_result, W, X) == [f"{HALF} {HALF} {FLOAT32}"]
    assert jnp.all(jnp.isfinite(float32_result(1e3 * W, 1e3 * X)))
    assert not jnp.all(jnp.isfinite(jls.autocast(function)(1e3 * W, 1e3 * X)))
    grads = jax.grad(lambda w, x: jnp.sum(jnp.sin(function(w, x))), (0, 1))(W, X)
    assert distance(grads, jax.grad(lambda w, x: jnp.sum(jnp.sin(float32_result(w, x))), (0, 1))(W, X)) < 2e-3


@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        ({"recompute": 1.0}, {"recompute": True}, "This policy has no rules."),
        (
            {"recompute": np.float32(2.5)},
            {"recompute": 2.5},
            "Saving a byte for the backward pass counts as moving 2.5 bytes.",
        ),
        ({"recompute": 0}, {"recompute": False}, "No values are recomputed"),
        ({"recompute": np.False_}, {"recompute": False}, "No values are recomputed"),
        (
            {"half_residual_stream": np.True_},
            {"recompute": True, "half_residual_stream": True},
            "The residual stream is stored in half precision.",
        ),
    ],
)
def test_options_are_serialized_and_printed(given, options, words):
    policy = jls.PrecisionPolicy(**given)
    config = json.loads(json.dumps(policy.get_config()))
    assert config == {"rules": [], **options}
    assert type(config["recompute"]) is type(options["recompute"])
    assert jls.PrecisionPolicy.from_config(config) == policy
    assert hash(jls.PrecisionPolicy.from_config(config)) == hash(policy)
    assert words in str(policy)


HEAD = jls.PrecisionRule("float32", layer="head", reason="logits of 1e5")
POLICY = jls.PrecisionPolicy([HEAD], recompute=False, half_residual_stream=np.False_)


def test_policy_is_hashable_and_serializable():
    again = jls.PrecisionPolicy.from_config(json.loads(json.dumps(POLICY.get_config())))
    assert again == POLICY
    assert hash(again) == hash(POLICY)
    assert eval(repr(POLICY), vars(jls)) == POLICY
    assert str(POLICY) == "float32: layer 'head' (logits of 1e5)\nNo values are recomputed in the backward pass."
    assert str(jls.PrecisionPolicy()) == "This policy has no rules."


def test_source_of_a_rule_does_not_match_an_operation_without_a_source():
    rule = jls.PrecisionRule("float32", source=Path.cwd().name)
    assert not rule.matches("tanh", Location("", "", "", "", (), False))


def test_config_of_version_0_6_can_be_restored():
    """Version 0.6.0 saved the measurements of `find_precision` together with the policy."""
    config = {**POLICY.get_config(), "loss_scale": 32768.0, "errors": [1.0, 0.01]}
    assert jls.PrecisionPolicy.from_config(config) == POLICY


@pytest.mark.parametrize(
    ("precision", "suggested"),
    [("Float32", "float32"), ("halff", "half"), ("float32_results", "float32_result"), ("narrow", None)],
)
def test_error_for_an_invalid_precision_suggests_the_closest_value(precision, suggested):
    suggestion = rf" Did you mean '{suggested}'\?" if suggested else ""
    message = rf"one of 'half', 'float32', 'float32_result', got '{precision}'\.{suggestion}$"
    with pytest.raises(ValueError, match=message):
        jls.PrecisionRule(precision)


def test_parameter_pattern_may_be_empty():
    policy = jls.PrecisionPolicy([jls.PrecisionRule("float32", layer="a", parameter="")])
    assert str(policy) == "float32: layer 'a', no parameter"
