"""A function and its arguments, of which is asked what they do in half precision; what is known before they run."""
