"""Patterns of all lines that `explain` prints, which translate each line into a short name."""

from fnmatch import fnmatchcase

# Patterns of the lines below the scale and the steps, and a short name for each pattern. The name is "" if the line
# continues the previous line.
LINES = {
    "The last step was skipped: *.": "skipped",
    "The last * steps were skipped, the last one because *.": "skipped in a row",
    "In the last step *, and the step was applied.": "applied",
    "In the last step *. It was applied, and the parameters are finite all the same.": "applied, finite",
    "The parameters are lost. Restart from a checkpoint. To have such steps skipped, take *": "lost",
    # Suggestions.
    "Where it was, only `record_bad_steps=True` keeps.": "not recorded",
    "The scale cannot go lower.": "no lower",
    "That is how the scale finds what the gradients tolerate: there is nothing to do.": "an overflow",
    "If that came of an overflow, it goes away when the scale falls, *": "perhaps an overflow",
    "Ask `nonfinite_report(grads)` which leaf it is, or have it kept: `record_bad_steps=True`.": "gradients stay",
    "An overflow goes away when the scale falls, and this NaN does not. *": "a NaN stays",
    "The gradients overflow almost without a scale. *": "an infinity stays",
    "Or allow a lower scale with `min_loss_scale`. *": "",
    "Allow a lower one with `min_loss_scale`.": "a high floor",
    'Take a smaller one, or "dynamic", which finds one.': "a fixed scale",
    "That is a condition of your own; the scale stays.": "skip_if",
    "No loss scale changes the loss. `compare_gradients(loss_fn, params, batch)` says *": "loss",
    "If it was the loss: No loss scale changes the loss. *": "loss or skip_if",
    "If it is not, look for NaN in the batch, for a logarithm or a division of zero, and at the learning rate.": "",
    # Earlier steps.
    "The last bad step was * ago: *.": "bad step ago",
    "Losses have been finite since, *: so it was that batch, and not the scale.": "one loss",
    "The scale is again as high as on that step (* now, * then), *": "scale is back",
    "If it comes again, look in that batch for NaN, *": "",
    "The scale has been lower since, and no step was bad, as after an overflow.": "scale was lower",
    "The scale is at its floor. *": "at the floor",
    "Which leaf it was, and whether NaN or infinity, `record_bad_steps=True` keeps.": "have it kept",
    "*% of all steps were skipped.": "often",
    "They come at scales at which other steps are finite, so the scale is not the cause.": "not the scale",
    "Look in those batches for NaN, *": "",
    "If these are always batches of the same kind, the model does not learn from this kind. *": "log the batches",
    "If these are overflows, a longer `increment_period` makes them rarer.": "rarer",
    # The gradients and the parameters.
    "The largest gradient of the last step was *.": "largest",
    "The scale is 2^* below what that would allow in float16.": "room",
    "The scale times the largest gradient is *, far below float16's limit, *": "not scaled",
    "Compute the gradients with `jls.value_and_scaled_grad`, clip them *": "",
    "If the loss does not fall: are the gradients scaled? Compute *": "question",
    "The largest gradient of the last step could not be measured. *": "not measured",
    "All gradients of the last step were exactly zero. *": "all zero",
    "If they are not, float16 lost them, or they were never scaled: *": "",
    "The parameters themselves are not finite, first in *. Most likely a step *": "parameters",
    "The parameters themselves are not finite, first in *. Look at how they began, *": "parameters, skipping",
    "A parameter is as large as *, in *. It leaves float16's range *": "large",
    "If training brought it there, restart from a checkpoint. Take a smaller learning rate.": "",
}
NO_PLAIN_WORDS = ("{", "verdict", "facts", "the others", "so does", "trial")


def told_in(text):
    """Return the names of the lines of a text, in order and without the lines about the scale and the steps."""
    scale, steps, *lines = text.splitlines()
    assert fnmatchcase(scale, "The loss scale is * (*).") or fnmatchcase(scale, "There is no loss scale, and * (*).")
    assert fnmatchcase(steps, "Of * step*, * were applied and * skipped.")
    names = []
    for line in lines:
        # The line must match exactly one pattern.
        (name,) = (name for pattern, name in LINES.items() if fnmatchcase(line, pattern))
        assert line[-1] in ".:", line
        assert not [word for word in NO_PLAIN_WORDS if word in line], line
        names += [name] if name else []
    return " | ".join(names)
