"""`jls.autocast` beside the same models cast by hand, and beside float32.

Reading order: `models` and `networks` are what is computed, `ways` how; `gpu` compiles training steps for an H100 that
is not there, and times them where there is a GPU; `counting` counts in programs; `gradients` measures errors; `tables`
is ``python -m benchmarks autocast``.
"""

from benchmarks.autocast.tables import run

__all__ = ["run"]
