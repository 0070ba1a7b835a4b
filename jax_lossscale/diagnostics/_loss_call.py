"""The loss function and the arguments that the user passes to a report, after they have been checked."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from jax_lossscale import _tree
from jax_lossscale._check import Function, as_argnums, check_flag, check_function
from jax_lossscale._gradients.scaled import value_and_scaled_grad
from jax_lossscale._program import nnx_objects
from jax_lossscale._program.jaxpr import Traced


class LossCall(NamedTuple):
    """A loss function and its arguments, where each differentiated argument is replaced with its `Leaves`.

    A differentiated argument can therefore be a whole model that contains leaves without gradients, such as functions,
    keys and counters.
    """

    fun: Callable[..., Any]  # accepts `Leaves`, and returns the value and auxiliary data, or the value and ``None``
    args: list[Any]
    kwargs: Mapping[str, Any]
    argnums: int | tuple[int, ...]  # the positions of the differentiated arguments, as in `jax.grad`
    positions: list[int]  # the elements of `argnums` that are valid positions, as non-negative numbers
    # The name of each positional argument in the signature of the function. An element of ``*args`` has a name such as
    # "args[1]", where 1 is its position among all positional arguments.
    names: list[str]

    def check_has_gradients(self, caller: str) -> None:
        """Raise a `ValueError` that names the caller if there are no differentiated leaves."""
        if not any(self.args[position] for position in self.positions):
            raise ValueError(
                f"`{caller}(argnums={self.argnums})` selects no floating-point or complex argument. Select an argument "
                "with parameters."
            )

    def value_and_grad(self) -> Traced:
        """Trace the value and the gradients of the loss function without a loss scale."""
        return Traced(jax.value_and_grad(self.fun, self.argnums, has_aux=True), self.args, self.kwargs)

    def scaled(self) -> tuple[Callable[..., Any], list[Any], Mapping[str, Any]]:
        """Return a function that computes the value and the scaled gradients, and its arguments and keyword arguments.

        The first argument of the function is the loss scale.
        """

        def scaled_gradients(scale: jax.Array, /, *args: Any, **kwargs: Any) -> Any:
            return value_and_scaled_grad(self.fun, scale, self.argnums, has_aux=True)(*args, **kwargs)

        return scaled_gradients, [jnp.float32(1), *self.args], self.kwargs

    def named_leaves(self) -> list[list[tuple[str, Any]]]:
        """Return one list of ``(name, leaf)`` pairs for each positional argument and each keyword argument."""
        return [
            [(name + path, leaf) for path, leaf in _tree.named_leaves(argument)]
            for name, argument in [*zip(self.names, self.args, strict=True), *sorted(self.kwargs.items())]
        ]


def value_and_leaves(program: Traced, outputs: Sequence[Any]) -> tuple[Any, dict[str, Any]]:
    """Return the value of a loss function, and a dictionary that maps the path of each leaf to its gradient.

    Args:
      program: the value and the gradients of a `LossCall`, with or without a loss scale.
      outputs: the outputs of the program.
    """
    ((value, _), grads), _ = program.filled(outputs)
    return value, dict(_tree.named_leaves(grads))


def with_unambiguous_options(report: Function) -> Function:
    """Decorate a report so that it raises a `ValueError` if an option can also be a keyword argument of the function.

    This is the case if the function has a parameter with the name of the option, and no positional argument sets this
    parameter.
    """
    options = {*inspect.getfullargspec(report).kwonlyargs}

    @functools.wraps(report)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name in options & {*kwargs}:
            if args and _accepts(args[0], args[1:], name):
                raise ValueError(
                    f"`{report.__name__}({name}=...)` is ambiguous, because `fun` also has a parameter `{name}`. Pass "
                    "a lambda or a nested function that sets this parameter, for example "
                    f"`lambda *args: fun(*args, {name}=...)`. `functools.partial` keeps the parameter in the signature."
                )
        return report(*args, **kwargs)

    return checked  # type: ignore[return-value]


def _accepts(fun: Callable[..., Any], args: Sequence[Any], name: str) -> bool:
    """Return whether a function has a parameter ``name`` that is not set by the positional arguments ``args``."""
    try:
        return name in inspect.signature(fun).bind_partial(*args, **{name: None}).arguments
    except (TypeError, ValueError):  # The function has no signature, or these arguments do not match it.
        return False


def check_call(
    caller: str,
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    argnums: int | Sequence[int],
    has_aux: bool,
    is_run: bool = True,
) -> LossCall:
    """Check the arguments of a report and return a `LossCall` for the loss function.

    Args:
      caller: the name of the report, for error messages.
      fun: the loss function.
      args: its positional arguments.
      kwargs: its keyword arguments.
      argnums: the positions of the differentiated arguments.
      has_aux: whether the function also returns auxiliary data.
      is_run: whether the report runs the function, so that the arguments must contain arrays.
    """
    check_function(fun, f"{caller}(fun=...)")
    argnums = as_argnums(argnums, f"{caller}(argnums=...)")
    check_flag(has_aux, f"{caller}(has_aux=...)")
    leaves = nnx_objects.flattened((args, kwargs)).leaves if is_run else []
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        raise ValueError(
            f"`{caller}(*args)` got traced values. Call `{caller}` outside of `jax.jit` and other transformations."
        )
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        raise ValueError(
            f"`{caller}(*args)` must contain arrays, because `{caller}` runs `fun`; got a `jax.ShapeDtypeStruct`. If "
            "`fun` itself needs the `jax.ShapeDtypeStruct`, bind it to `fun` with `functools.partial`."
        )
    counted = (n + len(args) if n < 0 else n for n in ((argnums,) if isinstance(argnums, int) else argnums))
    # Positions that are out of range are ignored here, because JAX raises an error for them when the program is traced.
    positions = [position for position in counted if 0 <= position < len(args)]
    chosen, rebuild = list(args), dict[int, Callable[[Leaves], Any]]()
    for position in positions:
        chosen[position], rebuild[position] = _selected(args[position])

    def of_leaves(*args: Any, **kwargs: Any) -> Any:
        result = fun(*(rebuild[n](arg) if n in rebuild else arg for n, arg in enumerate(args)), **kwargs)
        return result if has_aux else (result, None)

    try:
        parameters = inspect.signature(fun).parameters.values()
        names = [each.name for each in parameters if each.kind < inspect.Parameter.VAR_POSITIONAL][: len(args)]
    except (TypeError, ValueError):  # The function has no signature.
        names = []
    names += [f"args[{number}]" for number in range(len(names), len(args))]
    call = LossCall(of_leaves, chosen, kwargs, argnums, positions, names)
    if argnums == ():  # `jax.value_and_grad` would raise an error that does not name the argument.
        call.check_has_gradients(caller)
    return call


@jax.tree_util.register_pytree_with_keys_class
class Leaves(dict[str, Any]):
    """A dictionary that maps the paths of the differentiable leaves of an argument to these leaves.

    JAX does not sort the keys of this dictionary, in contrast to those of a plain `dict`. The path of a leaf in this
    dictionary is the same as in the argument.
    """

    def tree_flatten_with_keys(self) -> tuple[list[tuple[str, Any]], tuple[str, ...]]:
        return list(self.items()), tuple(self)

    @classmethod
    def tree_unflatten(cls, paths: tuple[str, ...], leaves: Sequence[Any]) -> Self:
        return cls(zip(paths, leaves, strict=True))


def _selected(argument: Any) -> tuple[Leaves, Callable[[Leaves], Any]]:
    """Return the differentiable leaves of an argument, and a function that inserts such leaves into the argument."""
    with_paths, structure = jax.tree_util.tree_flatten_with_path(argument)
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in with_paths}
    are_trained = dict(zip(leaves, nnx_objects.are_trained(argument), strict=True))
    inexact = [path for path, leaf in leaves.items() if _tree.is_inexact(leaf)]
    arrays = [path for path in inexact if not isinstance(leaves[path], (float, complex))]
    # If an argument contains arrays, its Python floats are not differentiated, because the Python floats in a model are
    # constants, such as a dropout rate.
    # If an nnx model contains parameters, its other variables, such as batch statistics, are not differentiated.
    trained = [path for path in arrays if are_trained[path]]
    chosen = Leaves((path, leaves[path]) for path in trained or arrays or inexact)
    return chosen, lambda moved: jax.tree.unflatten(structure, {**leaves, **moved}.values())
