"""Which operation leaves the range of a dtype, where, and what helps."""
