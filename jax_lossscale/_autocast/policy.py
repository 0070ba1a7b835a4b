"""Exceptions to the default behavior of `autocast`: `PrecisionPolicy`, the rules of a policy, and `keep_float32`."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import math
import os
from collections.abc import Iterable, Mapping
from typing import Any, Self, overload

import jax
import numpy as np

from jax_lossscale._check import Function, check_flag, check_function, did_you_mean, is_number
from jax_lossscale._program.location import Location

KEEP_FLOAT32 = "keep_float32"
_PRECISIONS = ("half", "float32", "float32_result")


@dataclasses.dataclass(frozen=True)
class PrecisionRule:
    """The precision of the operations that match a set of patterns.

    A rule applies to an operation if all patterns of the rule match the operation. In a pattern, ``*`` stands for any
    number of characters and ``?`` for one character. All other characters match literally, including brackets:
    ``layer="blocks[0]"`` matches only that block, and ``layer="blocks[*]"`` matches all blocks. Every layer, function
    and line that a report prints can therefore be used as a pattern.

    Args:
      precision: ``"half"`` (the dtype of `autocast`), ``"float32"``, or ``"float32_result"``. The value
        ``"float32_result"`` applies to matrix multiplications and convolutions: their operands are in half precision,
        and their result is in float32. For `in_half`, both ``"float32"`` and ``"float32_result"`` select ``fallback``.
        An operation always stays in float32 if one of its constant operands is known to be outside the range of half
        precision.
      layer: the path of scopes (flax, haiku, `jax.named_scope`), or the classes of the modules that were being called
        (equinox, nnx), as shown by `autocast_report`. The pattern also matches all layers below this layer.
      operation: the name of the primitive, such as ``"dot_general"`` or ``"exp"``.
      source: file and line, such as ``"model.py:41"`` or ``"model.py:*"``. The pattern is compared with the last
        components of the file's absolute path, so the match does not depend on the working directory. ``source`` is
        experimental: a later version may change it without a new major version.
      parameter: the path of the argument leaf that is an operand of the operation, such as ``"[7]['w']"``, as shown by
        `compare_gradients`. Use ``parameter`` to distinguish layers that run the same line of code. ``parameter`` can
        be a literal path or a pattern. An empty string matches operations that do not have an argument leaf as an
        operand.
      function: the name of a function that was running, such as ``"RungeKutta.step"``. The named function can belong to
        any library.
      reason: the reason for the rule. The reason is printed in reports, but has no other effect.

    Raises:
      ValueError: if ``precision`` is not one of these three values, if another argument is not a string, or if a
        pattern other than ``parameter`` is empty.

    Examples:
      >>> import jax_lossscale as jls
      >>> jls.PrecisionRule("float32", layer="decoder/head")
      PrecisionRule('float32', layer='decoder/head')
    """

    precision: str
    layer: str = "*"
    operation: str = "*"
    source: str = "*"
    parameter: str = "*"
    function: str = "*"
    reason: str = ""

    def __post_init__(self) -> None:
        if self.precision not in _PRECISIONS:
            raise ValueError(
                f"`PrecisionRule(precision=...)` must be one of {', '.join(map(repr, _PRECISIONS))}, got "
                f"{self.precision!r}.{did_you_mean(self.precision, _PRECISIONS)}"
            )
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, str) or (not value and field.default != "" and field.name != "parameter"):
                raise ValueError(
                    f"`PrecisionRule({field.name}=...)` must be a pattern, such as 'a*', got {value!r}. To match "
                    f"all operations, omit `{field.name}`."
                )

    def __repr__(self) -> str:
        arguments = [f"{name}={value!r}" for name, value in self.get_config().items() if name != "precision"]
        return f"PrecisionRule({', '.join([repr(self.precision), *arguments])})"

    def matches(self, operation: str, location: Location) -> bool:
        """Return whether the rule applies to an operation at a location."""
        # A location contains the path of the source file relative to the working directory.
        source = os.path.abspath(location.source) if location.source and self.source != "*" else ""
        return (
            _fits(operation, self.operation)
            and (_fits(location.layer, self.layer) or _fits(location.layer, f"{self.layer}/*"))
            and (_fits(source, self.source) or _fits(source, f"*/{self.source}"))
            and _fits(location.parameter, self.parameter)
            and (self.function == "*" or any(_fits(name, self.function) for name in location.functions))
        )

    def get_config(self) -> dict[str, str]:
        """Return the constructor arguments that differ from their defaults."""
        return {name: value for name, value in vars(self).items() if value != getattr(type(self), name, None)}


@dataclasses.dataclass(frozen=True)
class PrecisionPolicy:
    """Exceptions to the rule of `autocast`.

    If several rules match an operation, the first one applies. A policy is immutable and hashable. The default policy
    has no rules and does not change the behavior of `autocast`.

    Args:
      rules: a sequence of `PrecisionRule` objects, or of dictionaries with their arguments.
      recompute: whether the backward pass may recompute values. If ``recompute`` is True, each value is either saved or
        recomputed, whichever moves fewer bytes. If a value is an operand of a matrix multiplication or a convolution in
        half precision, its rounded copy is saved. If ``recompute`` is False, all values that the backward pass needs
        are saved. A positive number specifies the cost of each byte that is saved for the backward pass, relative to
        the cost of reading or writing a byte. ``recompute=1`` is the same as ``recompute=True``. With ``recompute=2``,
        fewer values are saved, which takes less memory but more time. Numeric values are experimental: a later version
        may change their meaning without a new major version. Matmuls and other expensive operations are never
        recomputed.
      half_residual_stream: whether to store the residual stream in half precision. The residual stream consists of the
        float32 sums that each block of a network with skip connections passes to the next block. In half precision, the
        residual stream takes half the memory, and the result is as accurate as with manual casts. A carry of a scan is
        part of the residual stream if each iteration adds a value to the carry and also uses the carry in another
        operation. For example, the parameters in an inner training loop are part of the residual stream, because each
        iteration adds an update to the parameters.

    Raises:
      ValueError: if an argument has the wrong type or is out of range.

    Examples:
      >>> import jax_lossscale as jls
      >>> policy = jls.PrecisionPolicy(
      ...     [jls.PrecisionRule("float32", layer="head", reason="logits of 1e5")]
      ... )
      >>> print(policy)
      float32: layer 'head' (logits of 1e5)
      >>> jls.PrecisionPolicy.from_config(policy.get_config()) == policy
      True
    """

    rules: tuple[PrecisionRule, ...] = ()
    recompute: bool | float = True
    half_residual_stream: bool = False

    def __post_init__(self) -> None:
        check_flag(self.half_residual_stream, "PrecisionPolicy(half_residual_stream=...)")
        object.__setattr__(self, "half_residual_stream", bool(self.half_residual_stream))
        object.__setattr__(self, "recompute", _checked_recompute(self.recompute))
        if isinstance(self.rules, (str, Mapping)) or not isinstance(self.rules, Iterable):
            raise ValueError(
                f"`PrecisionPolicy(rules=...)` must be a sequence of `PrecisionRule` objects, got {self.rules!r}. To "
                "pass a single rule, put it in a list."
            )
        object.__setattr__(self, "rules", tuple(map(_as_rule, self.rules)))

    def __str__(self) -> str:
        lines = list(map(_sentence, self.rules)) or ["This policy has no rules."]
        if not self.recompute:
            lines.append("No values are recomputed in the backward pass.")
        elif self.recompute != 1:
            lines.append(f"Saving a byte for the backward pass counts as moving {self.recompute:g} bytes.")
        if self.half_residual_stream:
            lines.append("The residual stream is stored in half precision.")
        return "\n".join(lines)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor arguments as values that can be stored in JSON."""
        config = {"rules": [rule.get_config() for rule in self.rules], "recompute": self.recompute}
        return config | ({"half_residual_stream": True} if self.half_residual_stream else {})

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Return the policy that ``config`` from `get_config` describes, or raise a `ValueError` if it is invalid."""
        try:
            # Version 0.6.0 also saved the measurements of `find_precision`, which had no effect on the policy.
            return cls(**{name: config[name] for name in config if name not in ("loss_scale", "errors")})
        except TypeError as error:
            raise ValueError(f"Could not create a `PrecisionPolicy` from the config {config!r}: {error}.") from error


def _fits(name: str, pattern: str) -> bool:
    """Return whether a name matches a pattern in which brackets have no special meaning."""
    return pattern == "*" or fnmatch.fnmatchcase(name, pattern.replace("[", "[[]"))


def _checked_recompute(recompute: Any) -> bool | float:
    is_valid = isinstance(recompute, (bool, np.bool_)) or (is_number(recompute) and 0 <= float(recompute) < math.inf)
    if not is_valid:
        raise ValueError(
            f"`PrecisionPolicy(recompute=...)` must be True, False, or a positive number (the cost of saving a byte), "
            f"got {recompute!r}."
        )
    return bool(recompute) if recompute in (0, 1) else float(recompute)


def _as_rule(rule: Any) -> PrecisionRule:
    try:
        return rule if isinstance(rule, PrecisionRule) else PrecisionRule(**rule)
    except TypeError as error:
        raise ValueError(
            f"`PrecisionPolicy(rules=...)` must contain `PrecisionRule` objects or dictionaries with their arguments, "
            f"got {rule!r}: {error}."
        ) from error


def _sentence(rule: PrecisionRule) -> str:
    config = rule.get_config()
    reason = f" ({config.pop('reason')})" if rule.reason else ""
    precision = config.pop("precision")
    if precision == "float32_result":
        precision = "half-precision operands, float32 result"
    names = ", ".join(f"{name} {value!r}" if value else f"no {name}" for name, value in config.items())
    return f"{precision}: {names or 'everything'}{reason}"


@overload
def keep_float32() -> contextlib.AbstractContextManager[None]: ...
@overload
def keep_float32(function: Function) -> Function: ...
def keep_float32(function: Any = None) -> Any:
    """Compute part of a function in float32 under `autocast`.

    Matrix multiplications and convolutions (matmuls) in a ``with jls.keep_float32():`` block, or in a function with the
    decorator ``@jls.keep_float32``, are computed in float32. The operands of a matmul in the block may have been
    rounded before the block. The ``with`` block is recorded as a `jax.named_scope`, so it also works inside `jax.jit`,
    `jax.vmap`, `jax.grad` and loops. Casting an array to float32 would not have the same effect, because JAX removes
    the cast of a float32 array to float32 before `autocast` processes the program. Without `autocast`, `keep_float32`
    has no effect.

    On A100 and newer GPUs and on TPUs, JAX rounds the operands of float32 matmuls by default. If a matmul needs the
    full precision of its operands on this hardware, pass ``precision="highest"`` to the matmul.

    Args:
      function: the function to compute in float32. If ``function`` is omitted, `keep_float32` returns a context
        manager.

    Returns:
      A function with the same arguments and results as ``function``, or a context manager.

    Raises:
      ValueError: if ``function`` is not callable.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> def distance(x, y):
      ...     with jls.keep_float32():
      ...         return jnp.sum(x * x) + jnp.sum(y * y) - 2 * x @ y
      >>> x = jnp.full(3, 100.0) + jnp.arange(3)
      >>> float(jls.autocast(distance)(x, x + 0.5))
      0.75
    """
    scope = jax.named_scope(KEEP_FLOAT32)
    if function is None:
        return scope
    check_function(function, "keep_float32(function=...)")
    return scope(function)
