"""Whether a function will train in half precision; if not, the one cause, its place, and what helps."""
