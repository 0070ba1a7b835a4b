"""Automatic mixed precision: `autocast` rewrites a float32 function so that its matmuls are in half precision.

Terms that are used in this package:

- *Half precision*: the dtype of `autocast`, float16 or bfloat16.
- *Matmul*: a matrix multiplication or a convolution (`primitives.is_matmul`).
- *Graph*: the equations of a jaxpr as a list of *nodes*, with calls to jitted functions inlined (`_program.inline`).
- *Data movement*: an operation that only moves numbers, such as a transpose, or selects them with a mask.
- *Selection*: an operation that compares numbers and returns some of them, such as a maximum or a relu. The results of
  data movement and selections have the dtype of the operands.
- *Plan*: the dtype of every value of a graph, and how every node is evaluated (`plan`). `planner` creates plans.
  `node_planner` decides which matmuls are in half precision, based on the rule of `autocast` and on a
  `PrecisionPolicy`. `rewrite` evaluates the plans.
- *Segment*: a group of nodes that are evaluated together, usually the operations between matmuls and the matmuls that
  use their results. The backward pass recomputes the operations of a segment together (`segments`).
- *Saved* value: a value that the forward pass stores for the backward pass. The backward pass recomputes all other
  values that it needs. `min_cut` selects the saved values.
- *Rounding* of a value: the same value after a cast to half precision.
- *Residual stream*: the float32 sums that each block of a network with skip connections passes to the next block. The
  residual stream is stored in half precision if the policy sets ``half_residual_stream=True``.
- *Reason*: why a matmul stays in float32. If a program is traced for a report, the reason is added to the name stack of
  the matmul (`reasons`).
"""

from jax_lossscale._autocast.half_function import in_half
from jax_lossscale._autocast.policy import PrecisionPolicy, PrecisionRule, keep_float32
from jax_lossscale._autocast.transform import autocast

__all__ = ["PrecisionPolicy", "PrecisionRule", "autocast", "in_half", "keep_float32"]
