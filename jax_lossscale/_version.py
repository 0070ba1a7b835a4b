"""Version of the package. The package metadata and the wheel read it from this file."""

__version__ = "0.5.0"
