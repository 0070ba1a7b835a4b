"""What `compare_gradients` gives: what it found, and the errors of the gradients by leaf and scale."""

from __future__ import annotations

import dataclasses

from jax_lossscale.diagnostics._report import Report, percent, power_of_two
from jax_lossscale.diagnostics.programs._facts import ProductFacts

_MOST_ROWS = 12
# Where a few units in the last place of float32 change the reference by so much, there is no true gradient to compare.
_MOSTLY_ROUNDING = 0.05


@dataclasses.dataclass(frozen=True)
class LeafGradientError:
    """The errors of the gradients of one leaf.

    Attributes:
      path: where the leaf is, as `jax.tree_util.keystr` writes it.
      shape: its shape.
      norm: the Euclidean norm of the reference.
      largest: the largest magnitude of the reference; 0 if there is none.
      smallest: its smallest magnitude that is not zero; 0 if there is none.
      nonzero: how many of its numbers are not zero.
      relative_error: for each loss scale, the norm of the difference from the reference over the norm of the reference;
        infinite where a gradient is not finite.
      lost: for each loss scale, the share of the reference's non-zero numbers that are zero.
      nonfinite: for each loss scale, the share of all numbers that are not finite.
      rounding: the relative change of the reference when the parameters are changed by a few units in the last place of
        float32. If it is large, the true gradient is nothing but rounding (a bias in front of a batch normalization has
        such a gradient), and its errors mean nothing.
    """

    path: str
    shape: tuple[int, ...]
    norm: float
    largest: float
    smallest: float
    nonzero: int
    relative_error: tuple[float, ...]
    lost: tuple[float, ...]
    nonfinite: tuple[float, ...]
    rounding: float

    @property
    def is_rounding(self) -> bool:
        """Whether the true gradient is nothing but rounding."""
        return self.rounding > _MOSTLY_ROUNDING


@dataclasses.dataclass(frozen=True, repr=False)
class GradientComparison(Report[LeafGradientError]):
    """Gradients in float16 compared with those in float32: whether it will train, and the numbers that show it.

    Printed, or shown in a notebook, it says how many products are in half precision, where the first is that is not,
    and whether the function will train. A table of the leaves follows, the worst first. Iterating over it gives a
    `LeafGradientError` for each leaf.

    Attributes:
      verdict: in a sentence or two: whether it will train, from which scale on; or why not, and what would help.
      cause: ``"none"``, ``"nothing narrow"``, ``"reference not finite"``, ``"no gradients"``, ``"forward overflow"``,
        ``"backward overflow"``, ``"underflow"``, ``"starving branch"``, or ``"forward rounding"``.
      will_train: whether there is a loss scale with which all gradients are right.
      loss_scale: the scale to start from, a power of two if the scales compared are; ``None`` if no scale helps.
      suffering: the paths of the leaves that are wrong at the best of the scales.
      dtype: the name of the narrow dtype.
      loss_scales: the scales that were compared, in ascending order.
      leaves: a `LeafGradientError` for each leaf, the worst first.
      total: the same for all leaves together.
      value: the value of the function, which a loss scale does not change.
      reference_value: that of the reference.
      as_they_are: the operations that `in_precision` could not follow; they are narrow in the reference, too.
      facts: how many products there are, how many are in the dtype, and where the first other gets its float32 from.
      working_scales: those of the scales compared at which all gradients are right.
    """

    verdict: str
    cause: str
    will_train: bool
    loss_scale: float | None
    suffering: tuple[str, ...]
    dtype: str
    loss_scales: tuple[float, ...]
    leaves: tuple[LeafGradientError, ...]
    total: LeafGradientError
    value: float
    reference_value: float
    as_they_are: tuple[str, ...]
    facts: ProductFacts = ProductFacts()
    working_scales: tuple[float, ...] = ()

    def _entries(self) -> tuple[LeafGradientError, ...]:
        return self.leaves

    def _summary(self) -> str:
        lines = [str(self.facts), self.verdict, f"Loss: {self.value:.6g}; reference: {self.reference_value:.6g}."]
        if self.will_train and len(self.working_scales) > 1:
            ends = (power_of_two(scale) for scale in (self.working_scales[0], self.working_scales[-1]))
            lines.append(f"Of the loss scales compared, those from {' to '.join(ends)} work.")
        if self.as_they_are:
            lines.append(f"Not followed, and narrow in the reference, too: {', '.join(self.as_they_are)}.")
        if any(leaf.is_rounding for leaf in self):
            lines.append("*: its true gradient is nothing but rounding, in float32 too, so its errors say nothing.")
        lines.append("Relative error of the gradients, by loss scale (lost: zero, where the reference is not):")
        return "\n".join(lines)

    def _rows(self) -> list[list[str]]:
        scales = [power_of_two(scale) for scale in self.loss_scales]
        rows = [["leaf", "shape", "largest", "smallest", *scales]]
        rows.append(["all leaves", "", *_magnitudes(self.total), *_errors(self.total)])
        rows.append(["  lost", "", "", "", *(f"{share:.1%}" for share in self.total.lost)])
        for leaf in self.leaves[:_MOST_ROWS]:
            name = (leaf.path or "the only leaf") + (" *" if leaf.is_rounding else "")
            rows.append([name, str(list(leaf.shape)), *_magnitudes(leaf), *_errors(leaf)])
        if len(self) > _MOST_ROWS:
            rows.append([f"... {len(self) - _MOST_ROWS} more", *[""] * (3 + len(scales))])
        return rows


def _magnitudes(leaf: LeafGradientError) -> tuple[str, str]:
    return f"{leaf.largest:.1e}", f"{leaf.smallest:.1e}"


def _errors(leaf: LeafGradientError) -> list[str]:
    pairs = zip(leaf.relative_error, leaf.nonfinite, strict=True)
    return ["overflow" if nonfinite else percent(error) for error, nonfinite in pairs]
