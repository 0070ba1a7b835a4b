"""The errors of gradients, leaf by leaf, as a function of the loss scale."""
