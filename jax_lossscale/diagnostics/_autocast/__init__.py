"""What `autocast` makes of a function."""
