"""Functions that compute gradients of the scaled loss by scaling cotangents in the backward pass."""
