"""What a tree of gradients holds: how large its numbers are, what a narrow dtype would lose, what is not finite."""
