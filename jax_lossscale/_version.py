"""The version, written once: the package, its metadata and its wheel read it here."""

__version__ = "0.5.0"
