"""Version of the package, which the build system reads from this file."""

__version__ = "0.8.0"
