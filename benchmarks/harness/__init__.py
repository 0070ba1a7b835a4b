"""Tools that all benchmarks use: a separate process for each benchmark, timing, tables and marks."""
