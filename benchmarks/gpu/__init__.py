"""Benchmarks that compile programs for a GPU and analyze the compiled programs without running them."""
