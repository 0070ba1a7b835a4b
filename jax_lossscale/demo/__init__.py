"""The main job: a float16 training on real data, with and without loss scaling, beside float32.

`job` is the training, and the file to read; `report` says what came of it, `command` is ``python -m jax_lossscale``.
"""

from jax_lossscale.demo.command import main

__all__ = ["main"]
