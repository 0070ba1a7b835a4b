"""Entry point of ``python -m jax_lossscale``, which runs the demo in `jax_lossscale.demo`."""

import sys

from jax_lossscale.demo import main

if __name__ == "__main__":
    sys.exit(main())
