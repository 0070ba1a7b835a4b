"""Changes of the package that break each promise of `docs/numerics.md`, so that its tests must fail.

The keys of `BREAKS` are the headings of the promises. Each value contains one entry per test that the page names, in
the same order: a file of the package, a piece of code that occurs once in the file, and its replacement.
"""

TREE, STEP, LARGEST = "_tree.py", "_optax/wrapper.py", "_measure/largest.py"
ROUNDING = "_sixteen_bit/rounding.py"
DYNAMIC, AUTO = "_loss_scale/dynamic.py", "_loss_scale/auto.py"
LEAVES_A_CHANGED_STATE = (
    STEP,
    "_no_updates(jax.eval_shape(run)[0]), state.inner_state",
    "_no_updates(jax.eval_shape(run)[0]), jax.tree.map(lambda leaf: leaf + 1, state.inner_state)",
)
NEVER_SKIPS = ("_optax/decision.py", "checks.grads_finite if loss_scale.skip_nonfinite else None", "None")

BREAKS = {
    "Unscaling is exact": [
        (TREE, "_LARGEST_APPLIED = np.float32(2.0**-126), np.float32(2.0**126)", "_LARGEST_APPLIED = -np.inf, np.inf")
    ],
    "Unscaling happens in float32": [
        (
            TREE,
            "arrays = applied(loss_scale), [_at_least_float32(leaf) for leaf in leaves]",
            "arrays = applied(loss_scale), [jnp.asarray(leaf) for leaf in leaves]",
        )
    ],
    "Gradients are divided by the scale with which they were computed": [
        (STEP, "else loss_scale.unscale(scaled_grads)", "else loss_scale.adjust(True).unscale(scaled_grads)")
    ],
    "The returned loss is the true loss": [
        (
            "_gradients/scaled.py",
            "value = seed_gradient(value, loss_scale)",
            "value = value * loss_scale() / loss_scale()",
        )
    ],
    "Scaled gradients are the scale times the gradients": [
        (
            "_gradients/cotangent.py",
            "return _identity(_tree.scale, leaf, summed)",
            "return _identity(_tree.scale, leaf, summed * 1.001)",
        )
    ],
    "Every NaN and every infinity is detected": [
        (LARGEST, "leaf.size - length) for n in range(number))", "leaf.size - length) for n in range(number - 1))"),
        (LARGEST, "jnp.minimum(words, infinity), dtype).max()", "jnp.minimum(words, infinity), dtype).sum()"),
    ],
    "The largest gradient is measured exactly": [
        ("_measure/finite.py", "largest if scale is None else _tree.unscale(largest, scale)", "largest")
    ],
    "Accumulated gradients are added up in float32": [
        (
            "_gradients/accumulation.py",
            "return carry, _tree.widen((value, loss_scale.unscale(_tree.inexact_only(scaled_grads)))), aux",
            "return carry, _tree.cast_floating((value, loss_scale.unscale(scaled_grads)), jnp.float16), aux",
        )
    ],
    "A separate scale for part of a model does not change derivatives": [
        (
            "_gradients/cotangent.py",
            "return jnp.asarray(_tree.unscale(cotangent, scale)).astype(cotangent.dtype)",
            "return cotangent",
        )
    ],
    "The forward and backward pass use the same numbers": [
        (
            "_autocast/marks.py",
            "mlir.register_lowering(_rounded, mlir.lower_fun(_round_again, multiple_results=False))",
            "",
        )
    ],
    "A skipped step leaves parameters and the inner optimizer unchanged": [
        (STEP, "lambda leaf: -jnp.zeros_like(leaf) if", "lambda leaf: jnp.zeros_like(leaf) if"),
        LEAVES_A_CHANGED_STATE,
    ],
    "Non-finite gradients never reach the parameters": [NEVER_SKIPS],
    "Only gradients change the scale": [
        (
            "_optax/decision.py",
            "return adjusted if reacts is None else _tree.select_tree(reacts, adjusted, loss_scale)",
            "return adjusted",
        )
    ],
    "Schedules do not advance on skipped steps": [LEAVES_A_CHANGED_STATE],
    "The counters are consistent": [
        (
            "_optax/state.py",
            "jnp.where(count > largest - increment, largest, count + increment)",
            "count + increment",
        ),
        (
            "_optax/state.py",
            "_saturating_add(state.consecutive_skips, 1) * skipped",
            "_saturating_add(state.consecutive_skips, skipped)",
        ),
    ],
    "The fused step equals the plain step": [
        (
            STEP,
            "        return optax.apply_updates(params, updates)",
            "        return optax.apply_updates(params, jax.tree.map(lambda u: u * 1.001, updates))",
        ),
        (
            "_optax/decision.py",
            "jax.lax.select(should_apply, applied, left)",
            "jax.lax.select(should_apply, applied, applied)",
        ),
    ],
    "The dynamic scale equals TensorFlow's after every step": [
        (DYNAMIC, "num_good_steps >= self.increment_period - 1", "num_good_steps >= self.increment_period"),
        (DYNAMIC, "num_good_steps >= self.increment_period - 1", "num_good_steps >= self.increment_period"),
    ],
    "The scale stays a positive finite number": [
        (
            DYNAMIC,
            "lowered = jnp.maximum(scale * backoff_factor, floor)",
            "lowered = scale * backoff_factor",
        ),
    ],
    "The automatic scale is a power of two within its bounds": [
        (
            AUTO,
            "moved = jnp.clip(power_of_two(log2_scale), self.min_loss_scale, self.max_loss_scale)",
            "moved = jnp.exp2(log2_scale)",
        )
    ],
    "The automatic scale is found within 16 steps": [(AUTO, "LOG2_MOVE = 8", "LOG2_MOVE = 1")],
    "The automatic scale adapts to rare kinds of batches": [
        (AUTO, "(allowance_is_large, margin + LOG2_MOVE, allowance)", "(allowance_is_large, margin, allowance)")
    ],
    "Every optimizer takes the same steps as without loss scaling": [
        (
            STEP,
            "_widened(unscaled(), loss_scale)",
            "_widened(scaled_grads, loss_scale)",
        )
    ],
    "Half-precision parameters have float32 moments": [(STEP, "return _tree.widen(tree, keep=keep)", "return tree")],
    "Without a loss scale, the wrapper adds almost nothing": [
        (
            "_loss_scale/fixed.py",
            "    checks_gradients: ClassVar[bool] = False",
            "    checks_gradients: ClassVar[bool] = True",
        )
    ],
    "Leaves that are not gradients pass through unchanged": [
        (
            TREE,
            "list(map(is_inexact, jax.tree.leaves(tree)))",
            "[hasattr(leaf, 'dtype') for leaf in jax.tree.leaves(tree)]",
        )
    ],
    "Master weights of bfloat16 parameters are exact": [
        (ROUNDING, "lower.astype(jnp.uint16)", "jnp.zeros_like(lower, jnp.uint16)")
    ],
    "Stochastic rounding is unbiased": [
        (ROUNDING, "+ _random_bits(weights, key, counter)", "+ np.uint32(0x8000)"),
        (ROUNDING, "step = _mixed(counter)", "step = np.uint32(0)"),
    ],
    "Random bits do not depend on the devices": [
        (ROUNDING, "step = _mixed(counter)", "step = _mixed(counter + jax.sharding.get_abstract_mesh().size)")
    ],
    "All devices skip together": [
        (
            "_measure/devices.py",
            "lowest = jax.lax.pmin(jnp.stack(numbers), axis_name)",
            "lowest = jnp.stack(numbers)",
        ),
        (
            "_measure/primitive.py",
            "names = tuple(name for name in mesh.axis_names if name in split_over)",
            "names = ()",
        ),
    ],
    "The check costs scalar all-reduces only": [
        (
            "_measure/primitive.py",
            "return largest_on_all(of_local(*shards), names)",
            "return jax.lax.psum(largest_on_all(of_local(*shards), names), names)",
        )
    ],
    "A resumed run gives bitwise identical results": [
        (
            "_loss_scale/base.py",
            # Checkpoint libraries call this function, but compiled programs do not.
            "return tuple(zip(keys, leaves, strict=True)), config",
            "return tuple((key, leaf * (leaf.dtype != np.int32)) for key, leaf in zip(keys, leaves)), config",
        ),
        (
            "_loss_scale/base.py",
            "def __hash__(self)",
            "def __copy__(self): return type(self)(8)\n\n    def __hash__(self)",
        ),
    ],
    "All steps use one compiled program": [(DYNAMIC, "num_good_steps + 1, 0)", "num_good_steps + 1.0, 0)")],
    "A fresh state can be donated": [
        (
            "_loss_scale/base.py",
            "return jnp.asarray(leaf) if isinstance(leaf, np.generic) else leaf",
            "return vars(_as_array).setdefault(repr(leaf), jnp.asarray(leaf)) if np.ndim(leaf) == 0 else leaf",
        ),
        ("_optax/inner.py", "return jnp.copy(leaf)", "return leaf"),
    ],
    "A bad argument raises an error immediately": [
        ("_check.py", "if not at_least <= number <=", "if not -1000 <= number <=")
    ],
    "A configuration can only construct loss scales": [
        (
            "_loss_scale/registry.py",
            'raise ValueError(f"`{name}` must be {_ACCEPTED}; got {shown(identifier)}.")',
            "return NoOpLossScale()",
        ),
        (
            "_loss_scale/registry.py",
            "if not isinstance(class_name, str) or class_name not in kinds:",
            "if False:",
        ),
    ],
}
