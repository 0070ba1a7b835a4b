"""Patterns of all lines that `explain` prints, which translate each line into a short name."""

from fnmatch import fnmatchcase

# Patterns of the lines below the scale and the steps, and a short name for each pattern. The name is "" if the line
# continues the previous line.
LINES = {
    "The last step was skipped because *.": "skipped",
    "The last * steps were skipped, the last one because *.": "skipped in a row",
    "The last step was applied although *.": "applied",
    "The parameters are still finite.": "finite",
    "The parameters are probably no longer finite. Restart from a checkpoint. To skip such steps, *": "lost",
    # Suggestions.
    "The loss scale is at its lower bound.": "no lower",
    "Skipping steps is how the loss scale adapts to the size of the gradients. You do not *": "an overflow",
    "If an overflow was the cause, a lower loss scale will fix the problem. *": "perhaps an overflow",
    "A lower loss scale fixes an overflow, but no other problem. *": "other",
    "If the gradients are infinite but the loss is finite, decrease `min_loss_scale`.": "a lower floor",
    "If the gradients overflow even at a loss scale of 1, check whether the loss is a sum *": "",
    'Use a smaller loss scale, or the "dynamic" loss scale, which finds a suitable value.': "a fixed scale",
    "If several optimizers use the same `MixedPrecision` object, * inside `optax.MultiSteps`, *": "shared",
    "Check how the argument `grads_finite` is computed.": "grads_finite",
    "`skip_if` is your own condition, and it does not change the loss scale.": "skip_if",
    "The loss does not depend on the loss scale. `compare_gradients(loss_fn, params, batch)` shows *": "loss",
    "If `skip_if` was false, the loss was not finite.": "loss or skip_if",
    "If the loss is not finite in float32 either, check the batch for NaN, *": "",
    # Earlier steps.
    "The last non-finite or skipped step was * ago: *.": "bad step ago",
    "All later losses that were passed to `update` were finite. *": "one loss",
    "A later step at the same or a higher loss scale, with gradients at least as large, was finite.": "the batch",
    "A later step at the same or a higher loss scale was finite, so * is a possible cause.": "perhaps the batch",
    "All later steps were finite, but the loss scale or the gradients were smaller.": "unknown",
    "Therefore, the cause may have been an overflow or the batch.": "",
    "Therefore, the cause was the batch, not the loss scale.": "",
    "If this happens again, check the batch for NaN *": "",
    "As is usual after an overflow, the loss scale is now lower, and all later steps were finite.": "scale is lower",
    "The loss scale is at its lower bound, so *": "at the floor",
    "To find the non-finite leaf, call `nonfinite_report(grads)`, or use *": "not recorded",
    "*% of all steps were skipped.": "often",
    "Other steps at the same loss scales are finite, so the loss scale is not the cause.": "not the scale",
    "Check the skipped batches for NaN *": "",
    "If the skipped batches are always of the same kind, the model does not learn from them.": "log the batches",
    'To log them, see the section "Which batches are skipped?" in the guide "Skipped steps".': "",
    "If overflows are the cause, increase `increment_period` to make them less frequent.": "rarer",
    # The gradients and the parameters.
    "The largest gradient of the last step was *.": "largest",
    "The largest gradient would not overflow in float16 even if the loss scale were 2^* times larger.": "room",
    "The loss scale times the largest gradient is *, far below the float16 maximum.": "not scaled",
    "In the first steps, the loss scale increased, and the largest gradient decreased by *": "",
    "Compute the gradients with `jls.value_and_scaled_grad`, clip them *": "",
    "If the loss does not decrease, check whether the gradients are scaled. Compute *": "question",
    "The last step was applied, although its gradients were not finite.": "not measured",
    "If you passed `grads_finite=True` to `update`, that value was incorrect.": "",
    "All gradients of the last step were exactly zero.": "all zero",
    "`compare_gradients(loss_fn, params, batch)` shows whether they are zero in float32.": "",
    "If the gradients are zero in float32, the loss does not depend on the parameters, *": "",
    "If the gradients are nonzero in float32, they underflowed in float16 or were not scaled. *": "",
    "Some parameters in * are not finite, so *. Restart from a checkpoint.": "parameters",
    "Most likely, a step with non-finite gradients was applied. To skip such steps, *": "not skipped",
    "Check the initial parameters and the learning rate, and make sure that `value_and_scaled_grad` *": "initial",
    "*, which is not trained, is not finite. Reset it.": "not trained",
    "If a skipped step changed it, pass `restore_from=nnx.clone(model)` to `update` in each step.": "",
    "The largest parameter is *, in *, and may overflow in float16 if it is multiplied.": "large",
    "If it became this large during training, restart from a checkpoint with a smaller learning rate.": "",
}
NO_PLAIN_WORDS = ("{", "verdict", "facts", "the others", "so does", "trial")


def statements_of(text):
    """Return the names of the lines of a text, in order and without the lines about the scale and the steps."""
    scale, steps, *lines = str(text).splitlines()
    assert fnmatchcase(scale, "The loss scale is * (*).") or fnmatchcase(scale, "There is no loss scale, and * (*).")
    assert fnmatchcase(steps, "Of * step*, * w* applied and * w* skipped.")
    names = []
    for line in lines:
        matching = [name for pattern, name in LINES.items() if fnmatchcase(line, pattern)]
        assert len(matching) == 1, f"{len(matching)} patterns match this line: {line}"
        (name,) = matching
        assert line[-1] in ".:", line
        assert not [word for word in NO_PLAIN_WORDS if word in line], line
        names += [name] if name else []
    return " | ".join(names)
