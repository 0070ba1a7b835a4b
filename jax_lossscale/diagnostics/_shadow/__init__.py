"""A program evaluated in float32 beside itself: how far off each result is, and with which operation that begins."""
