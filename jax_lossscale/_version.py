"""Version of the package, which the build system reads from this file."""

__version__ = "0.7.0"
