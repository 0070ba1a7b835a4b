"""``python -m jax_lossscale``: see `jax_lossscale.demo`."""

import sys

from jax_lossscale.demo import main

if __name__ == "__main__":
    sys.exit(main())
