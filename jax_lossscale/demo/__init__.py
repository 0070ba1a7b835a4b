"""Demonstration: a network is trained on real data in float32, and in float16 with and without loss scaling.

The demonstration consists of three modules. Start with `job`.

- `job`: the training.
- `report`: functions that output the results as a table and as a plot.
- `command`: the command line, ``python -m jax_lossscale``.
"""

from jax_lossscale.demo.command import main

__all__ = ["main"]
