"""Rules name the places where `autocast`'s one rule is not what is wanted; a mark keeps a place float32."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self, TypeVar, overload

import jax
import numpy as np

from jax_lossscale._check import check_flag, check_function, is_number, nonnegative_number, positive_normal_number
from jax_lossscale._program.location import Location

_Function = TypeVar("_Function", bound=Callable[..., Any])
KEEP_FLOAT32 = "keep_float32"
_PRECISIONS = ("half", "float32", "float32_result")


@dataclasses.dataclass(frozen=True)
class PrecisionRule:
    """What is computed in which precision, of the operations that match every pattern.

    In a pattern, ``*`` stands for any number of characters and ``?`` for one character. All other characters match
    literally, brackets too: ``layer="blocks[0]"`` matches only that block, ``layer="blocks[*]"`` matches all of them.
    Every layer, function and line that a report prints can therefore be used as a pattern.

    Args:
      precision: ``"half"`` for the dtype of `autocast`, ``"float32"``, or, for matrix multiplications and convolutions,
        ``"float32_result"``: operands in half precision and a float32 result. For `in_half`, ``"float32"`` and
        ``"float32_result"`` both mean ``fallback``. Whatever the rule, an operation stays in float32 if half precision
        cannot represent one of its constant operands.
      layer: the path of scopes (flax, haiku, `jax.named_scope`) or the classes of modules that were being called
        (equinox, nnx), as `autocast_report` shows it. What lies below a layer matches, too.
      operation: the name of the primitive, such as ``"dot_general"`` or ``"exp"``.
      source: file and line, such as ``"model.py:41"`` or ``"model.py:*"``. It is compared with the end of the absolute
        path, at whole directory names, so it does not depend on the working directory.
      parameter: the path of the leaf of an argument that the operation takes, such as ``"[7]['w']"``, as
        `compare_gradients` shows it: what tells layers apart that share a line. As it stands, or a pattern; "" for an
        operation that takes none.
      function: the name of a function that was running, such as ``"RungeKutta.step"``, of whatever library.
      reason: why. It is shown, and changes nothing.

    Raises:
      ValueError: if ``precision`` is none of the three, or another argument is not a string.

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
                f"{self.precision!r}."
            )
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, str) or (not value and field.default != "" and field.name != "parameter"):
                raise ValueError(
                    f"`PrecisionRule({field.name}=...)` must be a pattern, such as 'a*', got {value!r}. To match "
                    "everything, leave it out."
                )

    def __repr__(self) -> str:
        arguments = [f"{name}={value!r}" for name, value in self.get_config().items() if name != "precision"]
        return f"PrecisionRule({', '.join([repr(self.precision), *arguments])})"

    def matches(self, operation: str, location: Location) -> bool:
        """Tell whether the rule speaks of an operation at a place."""
        # A place contains the path of the file relative to the working directory.
        source = os.path.abspath(location.source) if location.source else ""
        return (
            _fits(operation, self.operation)
            and (_fits(location.layer, self.layer) or _fits(location.layer, f"{self.layer}/*"))
            and (_fits(source, self.source) or _fits(source, f"*/{self.source}"))
            and _fits(location.parameter, self.parameter)
            and (self.function == "*" or any(_fits(name, self.function) for name in location.functions))
        )

    def get_config(self) -> dict[str, str]:
        """Return the constructor's arguments, as far as they are not the defaults."""
        values = {field.name: (getattr(self, field.name), field.default) for field in dataclasses.fields(self)}
        return {name: value for name, (value, default) in values.items() if value != default}


@dataclasses.dataclass(frozen=True)
class PrecisionPolicy:
    """Exceptions from the rule of `autocast`: the first rule that matches an operation decides about it.

    An immutable, hashable value. Without rules, `autocast` does what it does by itself.

    Args:
      rules: each a `PrecisionRule`, or the dictionary of one.
      recompute: whether the backward pass may recompute values. With True, each value is saved (in half precision if it
        is rounded for a matmul anyway) or recomputed, whichever moves fewer bytes. With False, all values are saved. A
        number is the price of a saved byte, relative to a byte that is moved. 1 is the same as True, and 2 saves fewer
        values, which takes less memory and more time. Matmuls and other expensive operations are never recomputed.
      loss_scale: the loss scale with which it was found to be right, by `jls.diagnostics.find_precision`. It is shown,
        and changes nothing: policies that differ in nothing else are equal.
      half_residual_stream: whether to store the residual stream in half precision. The residual stream consists of the
        float32 sums that each block of a network passes to the next one (skip connections). They then take half the
        memory, and the result is as accurate as that of manual casts. A carry of a scan is part of the residual stream
        if each iteration adds something to it and also uses it for something else. This includes the parameters of an
        inner loop, to which updates are added.
      errors: how far value and gradients were from float32 without the rules, and are with them; likewise.

    Raises:
      ValueError: if an argument is not of its kind.

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
    loss_scale: float | None = dataclasses.field(default=None, compare=False)
    half_residual_stream: bool = False
    errors: tuple[float, float] | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        check_flag(self.half_residual_stream, "PrecisionPolicy(half_residual_stream=...)")
        object.__setattr__(self, "half_residual_stream", bool(self.half_residual_stream))
        object.__setattr__(self, "recompute", _checked_recompute(self.recompute))
        if isinstance(self.rules, (str, Mapping)) or not isinstance(self.rules, Iterable):
            raise ValueError(
                f"`PrecisionPolicy(rules=...)` must be a sequence of `PrecisionRule`, got {self.rules!r}. Put a single "
                "one into a list."
            )
        object.__setattr__(self, "rules", tuple(map(_as_rule, self.rules)))
        if self.loss_scale is not None:
            loss_scale = positive_normal_number(self.loss_scale, "PrecisionPolicy(loss_scale=...)")
            object.__setattr__(self, "loss_scale", loss_scale)

        if self.errors is not None:
            if not isinstance(self.errors, (tuple, list)) or len(self.errors) != 2:
                raise ValueError(f"`PrecisionPolicy(errors=...)` must be two numbers, got {self.errors!r}.")
            errors = tuple(nonnegative_number(error, "PrecisionPolicy(errors=...)") for error in self.errors)
            object.__setattr__(self, "errors", errors)

    def __str__(self) -> str:
        lines = list(map(_sentence, self.rules)) or ["No exceptions from the rule of `autocast`."]
        if self.errors is not None and self.rules:
            lines = [f"Error against float32: {' -> '.join(map(_percent, self.errors))}.", *lines]
        if not self.recompute:
            lines.append("Nothing is computed again in the backward pass.")
        elif self.recompute != 1:
            lines.append(f"A byte kept for the backward pass counts as {self.recompute:g} bytes moved.")
        if self.half_residual_stream:
            lines.append("What goes from block to block is stored in half precision.")
        if self.loss_scale is not None:
            lines.append(f"Found to be right at a loss scale of 2^{math.log2(self.loss_scale):g}.")
            if self.loss_scale < 1:
                lines.append(
                    'That is below 1: the loss scale `"auto"` goes there, `DynamicLossScale` with a `min_loss_scale`.'
                )
        return "\n".join(lines)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments, of values that JSON can hold."""
        config = {"rules": [rule.get_config() for rule in self.rules], "recompute": self.recompute}
        errors = None if self.errors is None else list(self.errors)
        optional = {"loss_scale": self.loss_scale, "half_residual_stream": self.half_residual_stream, "errors": errors}
        return config | {name: value for name, value in optional.items() if value not in (None, False)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Make the policy that `get_config` described; a `ValueError` names what is not known."""
        try:
            return cls(**config)
        except TypeError as error:
            raise ValueError(f"Could not make a `PrecisionPolicy` of the config {config!r}: {error}.") from error


def _fits(name: str, pattern: str) -> bool:
    """Whether a name matches a pattern, in which brackets have no special meaning."""
    return fnmatch.fnmatchcase(name, pattern.replace("[", "[[]"))


def _checked_recompute(recompute: Any) -> bool | float:
    if isinstance(recompute, (bool, np.bool_)) or (is_number(recompute) and recompute in (0, 1)):
        return bool(recompute)
    if not is_number(recompute) or not 0 < float(recompute) < math.inf:
        raise ValueError(
            f"`PrecisionPolicy(recompute=...)` must be True or False, or the price of a byte that is kept, a positive "
            f"number, got {recompute!r}."
        )
    return float(recompute)


def _as_rule(rule: Any) -> PrecisionRule:
    if isinstance(rule, PrecisionRule):
        return rule
    if not isinstance(rule, Mapping):
        raise ValueError(f"`PrecisionPolicy(rules=...)` must hold `PrecisionRule`s, or dictionaries, got {rule!r}.")
    try:
        return PrecisionRule(**rule)
    except TypeError as error:
        raise ValueError(f"`PrecisionPolicy(rules=...)` must hold `PrecisionRule`s, got {rule!r}: {error}.") from error


def _percent(error: float) -> str:
    return f"{100 * error:.2g}%" if error < 1 else "wrong altogether"


def _sentence(rule: PrecisionRule) -> str:
    config = rule.get_config()
    reason = f" ({config.pop('reason')})" if rule.reason else ""
    precision = config.pop("precision")
    if precision == "float32_result":
        precision = "half-precision operands, float32 result"
    names = ", ".join(f"{name} {value!r}" for name, value in config.items() if value)
    return f"{precision}: {names or 'everything'}{reason}"


@overload
def keep_float32() -> contextlib.AbstractContextManager[None]: ...
@overload
def keep_float32(function: _Function) -> _Function: ...
def keep_float32(function: Any = None) -> Any:
    """Keep what is computed inside in float32, under `autocast`.

    To cast a float32 array to float32 leaves no trace in a program, so `autocast` cannot see it. This does: it writes a
    scope around the operations, which is found again below `jax.jit`, `jax.vmap`, `jax.grad` and in loops. Matrix
    multiplications and convolutions inside are computed in float32. Their operands may have been rounded outside.
    Without `autocast` nothing changes.

    Args:
      function: what is to be computed in float32. Without it, the result is a context manager.

    Returns:
      The function, or ``with jls.keep_float32():``.

    Raises:
      ValueError: if ``function`` cannot be called.

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
    if function is None:
        return jax.named_scope(KEEP_FLOAT32)
    check_function(function, "keep_float32(function=...)")

    @functools.wraps(function)
    def in_float32(*args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(KEEP_FLOAT32):
            return function(*args, **kwargs)

    return in_float32
