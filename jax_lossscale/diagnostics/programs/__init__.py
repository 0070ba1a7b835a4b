"""What a function does in half precision, asked before it is trained: which gradients are wrong, which operation."""
