"""Training steps whose gradients are computed by a trainer or another library, not by `value_and_scaled_grad`.

`mixed_precision` contains `MixedPrecision`, for trainers that also apply the optimizer themselves. `scaled_backward`
contains the transformation of the same name, for libraries that only compute the gradients.
"""
