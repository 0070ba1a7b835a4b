"""Benchmarks of the optimizer step and its parts, with other libraries for comparison."""
