"""To and from other libraries: one peer a file, each imported only by whoever uses it."""
