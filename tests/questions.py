"""Twenty questions that a reader brings, what they type into the search box, and the page that answers."""

from typing import NamedTuple


class Question(NamedTuple):
    """A question, the words that are typed, and where its answer stands."""

    asked: str
    typed: str
    page: str


# What users of other loss scalers ask in their issue trackers, most often first.
ASKED_ELSEWHERE = [
    Question("My loss scale falls to its minimum and never recovers. What now?", "loss scale falls to 1", "wrong/"),
    Question("Does a skipped step advance my schedule?", "learning rate schedule skipped", "guide/skipped_steps/"),
    Question("Do I clip before or after unscaling?", "gradient clipping", "guide/clipping/"),
    Question("How does it go together with accumulation?", "gradient accumulation", "guide/accumulation/"),
    Question("How do I save and resume the scale?", "resume checkpoint", "guide/checkpoints/"),
    Question("One GPU overflows. Do all of them skip?", "shard_map axis_name", "guide/devices/"),
    Question("Which layer has gone NaN?", "which layer NaN", "wrong/"),
    Question("I have a GAN. One scale or two?", "GAN two optimizers", "guide/several/"),
    Question("Batch norm statistics were poisoned by a bad step.", "batch statistics", "guide/skipped_steps/"),
    Question("How do I log the scale without a host sync?", "log loss scale", "guide/logging/"),
]
OUR_OWN = [
    Question("Why float16 when there is bfloat16?", "float16 or bfloat16", "why/"),
    Question("Fixed, dynamic or automatic?", "which loss scale", "choosing/"),
    Question("I have torch code with a GradScaler.", "torch GradScaler", "migrating/"),
    Question("Will my model train in float16?", "will my model train", "wrong/"),
    Question("How do I use it with flax nnx?", "nnx", "frameworks/nnx/"),
    Question("Is unscaling exact?", "unscaling exact", "numerics/"),
    Question("How slow is it?", "overhead performance", "performance/"),
    Question("What does update_and_apply take?", "update_and_apply", "api/optimizer/"),
    Question("How do I write a rule of my own?", "rule of your own", "choosing/"),
    Question("What changed in the last release?", "changelog", "changelog/"),
]
QUESTIONS = [*ASKED_ELSEWHERE, *OUR_OWN]
