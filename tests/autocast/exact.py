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


# Collectives are identities on a single device. Values on the host have no sharding.
_IDENTITIES = ("pcast", "psum", "psum_invariant", "pvary", "reshard")


@np.errstate(over="ignore", invalid="ignore")  # Values that are not selected may overflow.
def _operation(eqn, inputs):
    if eqn.primitive.name in _IDENTITIES:
        return inputs
    params = {name: None if "sharding" in name else value for name, value in eqn.params.items()}
    outputs = eqn.primitive.bind(*inputs, **params)
    return [np.asarray(each) for each in (outputs if eqn.primitive.multiple_results else [outputs])]


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
