"""Tools of all benchmarks: a process for each benchmark, timing, tables and marks."""
