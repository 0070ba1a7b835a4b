"""Functions that run the classes recorded in ``tests/golden`` again and return the scale after each step."""

import numpy as np

GRADS = {True: np.float32(0.5), False: np.float32(np.nan)}


def tf1_dynamic_loss_scale(config, finite):
    import tensorflow as tf

    loss_scale = tf.compat.v1.mixed_precision.DynamicLossScale(**config)
    for is_finite in finite:
        loss_scale.update([tf.constant(GRADS[is_finite])])
        yield float(loss_scale())


def torch_grad_scaler(config, finite):
    from peers.torch_ import scaler_after

    return scaler_after(*[float(GRADS[is_finite]) for is_finite in finite], **config)[1][1:]


def keras3_loss_scale_optimizer(config, finite):
    from peers.keras_ import scales

    return scales(*[GRADS[is_finite] for is_finite in finite], **config)[1:]
