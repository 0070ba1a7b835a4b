"""Automatic mixed precision: `autocast` rewrites a float32 function so that its matmuls are in half precision.

Terms that are used in this package:

- *Half precision*: the dtype of `autocast`, float16 or bfloat16.
- *Matmul*: a matrix multiplication or a convolution (`primitives.is_matmul`).
- *Graph*: the equations of a jaxpr as a list of *nodes*, with all calls of `jax.jit` inlined (`_program.inline`).
- *Data movement*: an operation that only moves numbers, such as a transpose, or selects them by a mask.
- *Selection*: an operation that selects some of its numbers by their size, such as a maximum or a relu. Data movement
  and selections have the dtype of their operands.
- *Plan*: the dtype of every value, and the treatment of every node (`plan`). `planner` makes plans by the rule of
  `autocast` (`rule`) and a `PrecisionPolicy`; `rewrite` evaluates them.
- *Segment*: the nodes between matmuls that are evaluated together, and recomputed together in the backward pass.
- *Saved* value: a value that the forward pass stores for the backward pass. All other values that the backward pass
  needs are recomputed. `min_cut` selects the saved values.
- *Reason*: why a matmul is not in half precision. In a program that is traced for a report, the name stack of each such
  matmul contains its reason (`reasons`), and `matmuls` returns all matmuls with their reasons.
"""

from jax_lossscale._autocast.half_function import in_half
from jax_lossscale._autocast.policy import PrecisionPolicy, PrecisionRule, keep_float32
from jax_lossscale._autocast.transform import autocast

__all__ = ["PrecisionPolicy", "PrecisionRule", "autocast", "in_half", "keep_float32"]
