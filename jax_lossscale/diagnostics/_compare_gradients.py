"""Comparison of half-precision gradients with float32 gradients, for each leaf and each loss scale."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_lossscale._check import check_function, is_number
from jax_lossscale.diagnostics._finding import Finder
from jax_lossscale.diagnostics._gradient_errors import LARGE_ERROR, LARGE_LEAF_ERROR, LeafGradientError, errors_by_scale
from jax_lossscale.diagnostics._in_precision import checked_precision
from jax_lossscale.diagnostics._loss_call import check_call, with_unambiguous_options
from jax_lossscale.diagnostics._operations import MatmulSummary
from jax_lossscale.diagnostics._report import Report, percent_of_error, power_of_two, progress_bar
from jax_lossscale.diagnostics._traced_gradients import TracedGradients

_MOST_ROWS = 12


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class GradientComparison(Report[LeafGradientError]):
    """The result of `compare_gradients`: a verdict and the errors of the gradients of each leaf.

    The printed report first shows the number of matrix multiplications and convolutions (matmuls) in half precision and
    the verdict on whether training will work. The report then lists the gradient errors of the leaves in a table, with
    the largest errors first. Notebooks display the report as HTML. Iterating over a `GradientComparison` yields one
    `LeafGradientError` per leaf.

    Reports are created only by this library. Their attributes are guaranteed, but their text may change.

    Attributes:
      verdict: a few sentences that state whether the function will train. The sentences recommend an initial loss
        scale, or explain why the function will not train and suggest a fix.
      cause: the main numerical problem: ``"none"``, ``"no half precision"``, ``"reference not finite"``,
        ``"no gradients"``, ``"forward overflow"``, ``"backward overflow"``, ``"underflow"``, ``"branch underflow"``,
        ``"forward rounding"``, or ``"run-time error"``. The function can train in spite of a problem that a loss scale
        solves, such as an underflow.
      will_train: whether all gradients are accurate with at least one of the loss scales compared.
      loss_scale: the recommended initial loss scale, or ``None`` if no loss scale helps. The recommended loss scale is
        a power of two if all ``loss_scales`` are powers of two.
      inaccurate_leaves: the paths of the leaves whose gradients are wrong even at the best loss scale; empty if
        ``will_train`` is True.
      dtype: the name of the half-precision dtype.
      loss_scales: the loss scales that were compared, in ascending order.
      leaves: a `LeafGradientError` for each leaf, with the largest errors first. Leaves whose float32 gradients consist
        of rounding errors come last.
      total: a `LeafGradientError` for all leaves together.
      value: the value of the function in half precision, which does not depend on the loss scale.
      reference_value: the value of the float32 reference.
      opaque_operations: the operations that `in_precision` cannot evaluate in float32. The reference also computes
        these operations in half precision.
      summary: the number of matmuls, the number of matmuls in ``dtype``, and the location of the first matmul in
        another dtype, with the reason.
      working_scales: the loss scales at which all gradients are accurate.
      run_time_errors: a pair ``(loss_scale, message)`` for each loss scale at which the program raised an error. These
        errors count as overflows. The ``message`` is the first sentence of the error message.
    """

    verdict: str
    cause: str
    will_train: bool
    loss_scale: float | None
    inaccurate_leaves: tuple[str, ...]
    dtype: str
    loss_scales: tuple[float, ...]
    leaves: tuple[LeafGradientError, ...]
    total: LeafGradientError
    value: float
    reference_value: float
    opaque_operations: tuple[str, ...]
    summary: MatmulSummary = MatmulSummary()
    working_scales: tuple[float, ...] = ()
    run_time_errors: tuple[tuple[float, str], ...] = ()

    _entries: ClassVar[str] = "leaves"

    def _header(self) -> str:
        losses = f"Loss: {self.value:.6g}; float32 reference: {self.reference_value:.6g}."
        lines = [str(self.summary), self.verdict, losses]
        working, scales = self.working_scales, self.loss_scales
        is_range = len(working) > 1 and working == scales[scales.index(working[0]) : scales.index(working[-1]) + 1]
        if self.will_train and is_range:
            ends = (power_of_two(scale) for scale in (working[0], working[-1]))
            lines.append(
                f"At all compared loss scales between {' and '.join(ends)}, the error of all gradients together is at "
                f"most {LARGE_ERROR:.0%}, and the error of each leaf is at most {LARGE_LEAF_ERROR:.0%}."
            )
        if self.run_time_errors and self.cause != "run-time error":
            (first, message), *_ = self.run_time_errors
            lines.append(
                f"At a loss scale of {power_of_two(first)}, the program raises an error, which counts as an overflow: "
                f"{message} A training step at this loss scale would raise the same error. If equinox raises the error "
                "(lineax, optimistix and diffrax use equinox), set the environment variable EQX_ON_ERROR=nan so that "
                "the step is skipped instead."
            )
        if self.opaque_operations:
            names = ", ".join(self.opaque_operations)
            lines.append(f"The float32 reference also computes these operations in half precision: {names}.")
        if any(leaf.is_rounding for leaf in self):
            lines.append(
                "*: Even in float32, rounding errors change this gradient by more than 5%, so its errors are "
                "meaningless."
            )
        if any("-" in row for row in self._rows()):
            lines.append("-: This error is above 1000%.")
        lines.append(
            "Relative errors of the gradients at the loss scales where they change (lost: nonzero elements that become "
            "zero):"
        )
        return "\n".join(lines)

    def _rows(self) -> list[list[str]]:
        shown_leaves = [leaf for leaf in self if not leaf.is_zero or all(leaf.nonfinite)]
        zero = len(self) - len(shown_leaves)
        leaves = [self.total, *shown_leaves[:_MOST_ROWS]]
        shown = self._shown(leaves)

        def row(name: str, shape: str, leaf: LeafGradientError) -> list[str]:
            errors = ("overflow" if leaf.nonfinite[n] else percent_of_error(leaf.relative_error[n], "-") for n in shown)
            return [name, shape, f"{leaf.largest:.1e}", f"{leaf.smallest:.1e}", *errors]

        rows = [["leaf", "shape", "largest", "smallest", *(power_of_two(self.loss_scales[n]) for n in shown)]]
        rows.append(row("all leaves", "", self.total))
        rows.append(["  lost", "", "", "", *(f"{self.total.lost[n]:.1%}" for n in shown)])
        for leaf in leaves[1:]:
            name = (leaf.path or "the only leaf") + (" *" if leaf.is_rounding else "")
            rows.append(row(name, str(list(leaf.shape)), leaf))
        rest = [f"... {len(shown_leaves) - _MOST_ROWS} more"] * (len(shown_leaves) > _MOST_ROWS)
        rest += [f"{zero} {'leaf' if zero == 1 else 'leaves'} with zero gradients in float32"] * (zero > 0)
        return [*rows, *([name, *[""] * (3 + len(shown))] for name in rest)]

    def _shown(self, leaves: Sequence[LeafGradientError]) -> list[int]:
        """Return the indices of the loss scales to print.

        If consecutive loss scales have identical cells in the table, only the first and the last of them are printed.
        """
        numbers = range(len(self.loss_scales))
        cells = [[(leaf.nonfinite[n] > 0, f"{leaf.relative_error[n]:.0e}") for leaf in leaves] for n in numbers]
        return sorted({0, *(n for m in numbers[1:] if cells[m - 1] != cells[m] for n in (m - 1, m)), numbers[-1]})


@with_unambiguous_options
def compare_gradients(
    fun: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    dtype: DTypeLike = jnp.float16,
    loss_scales: Sequence[float] | None = None,
    reference: Callable[..., Any] | None = None,
    progress: bool | Callable[[Sequence[Any]], Iterable[Any]] | None = None,
    **kwargs: Any,
) -> GradientComparison:
    """Compare the half-precision gradients of a function with its float32 gradients at several loss scales.

    The comparison shows whether training in half precision will work, and with which initial loss scale. The result is
    valid for one batch and one set of parameters, so repeat the comparison after some training.

    Args:
      fun: a scalar-valued function that casts to ``dtype`` internally, as it does in the training step.
      *args: the positional arguments of ``fun``: the float32 parameters (or a whole model) and one batch. Leaves that
        have no gradients, such as functions, random keys and counters, and nnx variables that are not parameters, such
        as batch statistics, are passed to ``fun`` unchanged.
      argnums: the positions of the differentiated arguments, as in `jax.value_and_grad`.
      has_aux: whether ``fun`` also returns auxiliary data, as in `jax.value_and_grad`.
      dtype: the half-precision dtype that ``fun`` uses.
      loss_scales: the loss scales to compare, a sequence of positive numbers. By default, powers of two between
        ``2**-8`` and ``2**24`` are compared. If the largest scale at which no gradient overflows is below ``2**-4``,
        or above ``2**20`` as is usual in bfloat16, powers of two around this scale are also compared.
      reference: a float32 version of ``fun`` with the same arguments. It is called in a context in which the precision
        of matmuls is `jax.lax.Precision.HIGHEST`, because GPUs and TPUs otherwise round their operands. By default, the
        reference is ``fun`` with float32 in place of half precision, as computed by `in_precision`.
      progress: whether to show a progress bar, which needs tqdm (the extra ``progress``). By default, the bar is shown
        in terminals and notebooks after five seconds if tqdm is installed. If ``progress`` is a function, such as
        ``rich.progress.track``, this function wraps the sequence of loss scales.
      **kwargs: the keyword arguments of ``fun``. If ``fun`` has a parameter with the name of an option, wrap ``fun`` in
        a ``lambda`` or a nested function that sets this parameter.

    Returns:
      A `GradientComparison`.

    Raises:
      ImportError: if ``progress`` is True and tqdm is not installed.
      ValueError: if ``dtype`` is not a real floating dtype, if ``loss_scales`` is empty or contains anything other than
        positive finite numbers, if there are no gradients, or if the function is called inside `jax.jit` or another
        transformation.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> def loss_fn(weights, x):
      ...     weights, x = jls.cast_floating((weights, x), jnp.float16)
      ...     return 1e-6 * jnp.mean((x @ weights).astype(jnp.float32) ** 2)
      >>> comparison = jls.diagnostics.compare_gradients(
      ...     loss_fn, jnp.ones((4, 2)), jnp.ones((8, 4))
      ... )
      >>> comparison.will_train, comparison.loss_scale
      (True, 536870912.0)

    Notes:
      The relative error of a leaf at the loss scale ``s`` is

          norm(unscale(grad(s * fun)) - reference) / norm(reference)

      where ``reference`` is the float32 gradient. The dependence of this error on the loss scale reveals its cause:

      - If the error decreases as the scale increases, the gradients underflow. Loss scaling solves this problem.
      - If the error is equally large at all scales, it is caused by rounding in the forward pass.
      - If the error is infinite at large scales, the backward pass overflows.
      - If the error of all leaves together is small, but the error of some leaves is 1, these leaves receive no
        gradients.

      Two programs are compiled: the function, with the loss scale as an argument, and the reference. Both are compiled
      with the default options of XLA, like the program of the user. XLA may therefore omit the rounding of an
      intermediate result.

      By default, the float32 gradients are computed twice, and the half-precision gradients 10 to 15 times.

      The parameters and gradients need at most three times the memory of the parameters, in addition to the memory of
      the activations.
    """
    if reference is not None:
        check_function(reference, "compare_gradients(reference=...)")
        # By default, GPUs and TPUs round the operands of float32 matmuls.
        reference = jax.default_matmul_precision("highest")(reference)
    shown = progress_bar("compare_gradients", progress)
    dtype = checked_precision(dtype, "compare_gradients(dtype=...)")
    scales = None if loss_scales is None else _checked_scales(loss_scales)
    options = args, kwargs, argnums, has_aux
    call = check_call("compare_gradients", fun, *options)
    in_float32 = None if reference is None else check_call("compare_gradients", reference, *options)
    gradients = TracedGradients(call, dtype, in_float32)
    call.check_has_gradients("compare_gradients")
    errors = errors_by_scale(gradients, scales, shown)
    finding = Finder(errors).found()
    at = finding.at
    leaves = sorted(errors.leaves, key=lambda leaf: (leaf.is_rounding, -min(leaf.relative_error[at], 1e30), -leaf.norm))
    return GradientComparison(
        verdict=" ".join(filter(None, finding.sentences)),
        cause=finding.cause,
        will_train=finding.will_train,
        loss_scale=finding.loss_scale,
        inaccurate_leaves=tuple(leaf.path for leaf in finding.leaves),
        dtype=dtype.name,
        loss_scales=tuple(errors.scales),
        working_scales=tuple(errors.scales[n] for n in errors.working()),
        run_time_errors=tuple(errors.run_time_errors.items()),
        leaves=tuple(leaves),
        total=errors.total,
        value=errors.value,
        reference_value=errors.reference_value,
        opaque_operations=errors.opaque_operations,
        summary=gradients.matmuls,
    )


def _checked_scales(loss_scales: Sequence[float]) -> list[float]:
    numbers = np.asarray(loss_scales, object).ravel().tolist() if np.ndim(loss_scales) == 1 else []
    scales = sorted({float(scale) for scale in numbers if is_number(scale)})
    are_positive = all(0 < scale <= float(np.finfo(np.float32).max) for scale in scales)
    if not scales or not are_positive or not all(map(is_number, numbers)):
        raise ValueError(
            f"`compare_gradients(loss_scales=...)` must be a sequence of positive finite numbers, got {loss_scales!r}. "
            "Omit this argument to use the default scales."
        )
    return scales
