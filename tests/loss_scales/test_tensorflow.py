"""What TensorFlow's own tests state of its loss scales."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kinds import F32_MAX, Dynamic, Fixed, grads_of, named, through_config

import jax_lossscale as jls


def dynamic(initial=1, period=2, multiplier=2):  # the defaults of their helper
    return Dynamic(initial, period, multiplier)


@pytest.mark.parametrize(
    ("loss_scale", "grads", "expected"),
    named(
        [
            ("fixed_basic", Fixed(1000), grads_of("TF"), [1000, 1000, 1000]),
            ("fixed_serialization", through_config(jls.get(123)), [], [123]),
            ("call_type_fixed", Fixed(123), [], [123]),
            ("call_type_dynamic", Dynamic(), [], [2**15]),
            ("increase", dynamic(), grads_of("TTTTTT"), [1, 1, 2, 2, 4, 4, 8]),
            (
                "increasing_until_capped",
                dynamic(F32_MAX / 4),
                grads_of("TTTTTT"),
                [F32_MAX / 4, F32_MAX / 4, F32_MAX / 2, F32_MAX / 2, F32_MAX, F32_MAX, F32_MAX],
            ),
            ("decrease_every_step", dynamic(1024), grads_of("FFFFFF"), [1024, 512, 256, 128, 64, 32, 16]),
            ("decreasing_until_one", dynamic(16), grads_of("FFFFFF"), [16, 8, 4, 2, 1, 1, 1]),
            ("nan_clears_good_steps", dynamic(), grads_of("TTTFT"), [1, 1, 2, 2, 1, 1]),
            ("update_each_step", dynamic(1, 1), grads_of("TTTFTT"), [1, 2, 4, 8, 4, 8, 16]),
            ("alternating_each_step", dynamic(1, 1), grads_of("TFTFTFTFT"), [1, 2, 1, 2, 1, 2, 1, 2, 1, 2]),
            ("alternating_every_other", dynamic(32), grads_of("TFTFTFT"), [32, 32, 16, 16, 8, 8, 4, 4]),
            ("nondefault_multiplier", dynamic(4, 2, 3), grads_of("TTFTT"), [4, 4, 12, 4, 4, 12]),
            ("random_mix", dynamic(4), grads_of("FTTTFTFTTTF"), [4, 2, 2, 4, 4, 2, 2, 1, 1, 2, 2, 1]),
            ("single_tensor_grad", Dynamic(), [np.float32(4)], [2**15, 2**15]),
            ("dynamic_serialization", through_config(dynamic(1, 2, 3)), grads_of("TT"), [1, 1, 3]),
            ("none_grads", Dynamic(), [[None]], [2**15, 2**15]),
            ("get_dynamic", jls.get("dynamic"), grads_of("F"), [2**15, 2**14]),
        ]
    ),
)
def test_tensorflow_fact(loss_scale, grads, expected, update):
    scales, applied = [loss_scale()], []
    for grad in grads:
        loss_scale, should_apply = update(loss_scale, grad)
        scales.append(loss_scale())
        applied.append(should_apply)
    always_applies = isinstance(loss_scale, Fixed)
    assert [float(scale) for scale in scales] == expected
    finite = [all(np.isfinite(jax.tree.leaves(grad))) for grad in grads]
    assert [bool(flag) for flag in applied] == [always_applies or flag for flag in finite]
    chex.assert_type([*scales, *applied], [jnp.float32] * len(scales) + [jnp.bool_] * len(applied))
    chex.assert_shape([*scales, *applied], ())
