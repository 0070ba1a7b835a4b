"""Benchmarks that compile programs for an H100 and analyze the compiled programs without running them."""
