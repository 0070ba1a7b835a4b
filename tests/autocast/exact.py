"""Evaluation of jaxprs on the host, one operation at a time, to find values with too many significant bits."""

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from jax_lossscale._program.subjaxprs import subjaxprs


class InexactError(Exception):
    """A value has more significant bits than its dtype can represent."""


def evaluated(closed, inputs, check=lambda within, inputs, outputs: None, within=()):
    """Return the outputs of a jaxpr.

    ``check`` is called for each operation with three arguments: the list of enclosing equations (from the outermost
    equation to the operation itself), the operands, and the results.
    """
    given = map(np.asarray, [*closed.consts, *inputs])
    values = dict(zip([*closed.jaxpr.constvars, *closed.jaxpr.invars], given, strict=True))

    def read(atom):
        return np.asarray(atom.val).astype(atom.aval.dtype) if isinstance(atom, Literal) else values[atom]

    for eqn in closed.jaxpr.eqns:
        outputs = _outputs(eqn, [read(atom) for atom in eqn.invars], check, (*within, eqn))
        values.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in closed.jaxpr.outvars]


def _outputs(eqn, inputs, check, within):
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        return _scan(eqn, inputs, check, within)
    if name == "while":
        first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        carry = inputs[second:]
        while evaluated(params["cond_jaxpr"], [*inputs[:first], *carry], check, within)[0]:
            carry = evaluated(params["body_jaxpr"], [*inputs[first:second], *carry], check, within)
        return carry
    if name == "cond":
        branch = int(np.clip(inputs[0], 0, len(params["branches"]) - 1))
        return evaluated(params["branches"][branch], inputs[1:], check, within)
    # The operations jit, checkpoint, custom_jvp and custom_vjp have one of these two parameters.
    for inside in (params.get("jaxpr"), params.get("call_jaxpr")):
        if inside is not None:
            closed = inside if isinstance(inside, ClosedJaxpr) else ClosedJaxpr(inside, ())
            return evaluated(closed, inputs, check, within)
    outputs = _operation(eqn, inputs)
    check(within, inputs, outputs)
    return outputs


def _scan(eqn, inputs, check, within):
    _, carried, sliced, length = subjaxprs(eqn)
    first, second = sliced.start - len(carried), sliced.start
    carry, stacked = inputs[first:second], [None] * length
    order = range(length)
    for n in reversed(order) if eqn.params["reverse"] else order:
        slices = [each[n] for each in inputs[second:]]
        outputs = evaluated(eqn.params["jaxpr"], [*inputs[:first], *carry, *slices], check, within)
        carry, stacked[n] = outputs[: len(carry)], outputs[len(carry) :]
    return [*carry, *map(np.stack, zip(*stacked, strict=True))]


@np.errstate(over="ignore", invalid="ignore")  # Values that are not selected may overflow.
def _operation(eqn, inputs):
    on_host = _ON_HOST.get(eqn.primitive.name)
    if on_host is not None:
        return [np.asarray(on_host(*inputs, **eqn.params), eqn.outvars[0].aval.dtype)]
    outputs = eqn.primitive.bind(*inputs, **eqn.params)
    return [np.asarray(each) for each in (outputs if eqn.primitive.multiple_results else [outputs])]


def _matmul(a, b, dimension_numbers, **_):
    (of_a, of_b), (batch_a, batch_b) = dimension_numbers
    axes_a, axes_b = list(range(a.ndim)), list(range(a.ndim, a.ndim + b.ndim))
    shared = (*batch_a, *of_a)
    for n, m in zip(shared, (*batch_b, *of_b), strict=True):
        axes_b[m] = n
    free = [n for n in axes_a + axes_b if n not in shared]
    float32 = [each.astype(np.result_type(each.dtype, np.float32)) for each in (a, b)]
    return np.einsum(float32[0], axes_a, float32[1], axes_b, [*batch_a, *free])


def _broadcast(x, shape, broadcast_dimensions, **_):
    sizes = dict(zip(broadcast_dimensions, np.shape(x), strict=True))
    return np.broadcast_to(np.reshape(x, [sizes.get(n, 1) for n in range(len(shape))]), shape)


def _plain(function):
    return lambda *operands, **_: function(*operands)


def _the_same(x, **_):
    return x


# NumPy versions of the most frequent operations and of the collectives, which are identities on a single device. All
# other operations are evaluated by JAX.
_ON_HOST = {
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda *parts, dimension: np.concatenate(parts, dimension),
    **dict.fromkeys(("convert_element_type", "pcast", "psum", "psum_invariant", "pvary", "reshard"), _the_same),
    "dot_general": _matmul,
    "reduce_max": lambda x, axes, **_: np.max(x, axes),
    "reduce_sum": lambda x, axes, **_: np.sum(x, axes),
    "reshape": lambda x, new_sizes, **_: np.reshape(x, new_sizes),
    "rev": lambda x, dimensions: np.flip(x, dimensions),
    "select_n": lambda which, *cases: np.choose(np.asarray(which, int), cases),
    "slice": lambda x, start_indices, limit_indices, strides: x[
        tuple(map(slice, start_indices, limit_indices, strides or [None] * x.ndim))
    ],
    "transpose": lambda x, permutation: np.transpose(x, permutation),
    **{
        name: _plain(function)
        for name, function in {
            **{"add": np.add, "add_any": np.add, "div": np.divide, "eq": np.equal, "exp": np.exp, "gt": np.greater},
            **{"lt": np.less, "max": np.maximum, "min": np.minimum, "mul": np.multiply, "ne": np.not_equal},
            **{"neg": np.negative, "sub": np.subtract},
        }.items()
    },
}
_SUMS = {"add_any", "conv_general_dilated", "cumsum", "dot_general", "reduce_sum"}


def exact_in(dtype):
    """Return a check for `evaluated`: ``dtype`` can represent every float32 value, and every sum in any order.

    Inside the scope "float32_range", values may have up to 20 significant bits, which is fewer than float32 allows.
    """
    largest_sum = 2 / float(jnp.finfo(dtype).eps)

    @np.errstate(over="ignore", invalid="ignore")
    def check(within, inputs, outputs):
        eqn = within[-1]
        in_float32 = [value for value in outputs if value.dtype == np.float32]
        are_exact = all((value.astype(dtype).astype(np.float32) == value).all() for value in in_float32)
        if are_exact and eqn.primitive.name in _SUMS and outputs[0].dtype == np.float32:
            are_exact = np.max(_operation(eqn, [abs(value) for value in inputs])[0]) <= largest_sum
        is_float32 = not are_exact and any("float32_range" in str(each.source_info.name_stack) for each in within)
        if not are_exact and not (is_float32 and all(map(_has_places, outputs))):
            raise InexactError(eqn.primitive.name)

    return check


def _has_places(array):
    mantissa, _ = np.frexp(array)
    return bool(np.all(mantissa * 2.0**20 == np.round(mantissa * 2.0**20)))
