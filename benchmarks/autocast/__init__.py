"""`jls.autocast` beside the same models cast by hand, and beside other ways to compute in half precision.

Reading order: `models` and `programs` are what is computed, `ways` how; `interpreter` evaluates programs by the rules
of others; `counting` reads what comes of it: products, casts, bytes kept; `gradients` measures errors; `mesh` shares
the weights among devices; `gpu` compiles for an H100 that is not there, and times where there is a GPU; `tables` is
``python -m benchmarks autocast``.
"""

from benchmarks.autocast.tables import run

__all__ = ["run"]
