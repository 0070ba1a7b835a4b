"""Questions that a reader brings, what they type into the search box, and the page that answers."""

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
# What a reader types who does not know our words. Its page must come first.
IN_OTHER_WORDS = [
    Question("My loss is NaN.", "loss is nan", "wrong/"),
    Question("I train only the last layer.", "freeze parameters", "guide/recipes/"),
    Question("And when the training is over?", "inference", "guide/recipes/"),
    Question("What do I gain?", "is it faster", "performance/"),
    Question("My job was killed.", "resume training", "guide/recipes/"),
]
MORE_OF_OUR_OWN = [
    Question("What does autocast compute in float16?", "autocast", "guide/precision/"),
    Question("Is my network float16 at all?", "is it float16", "guide/precision/"),
    Question("I start from somebody else's weights.", "fine-tune a pretrained model", "guide/recipes/"),
    Question("Can I take a bad step again?", "retry a step", "guide/recipes/"),
    Question("I use variational inference.", "numpyro SVI", "guide/libraries/"),
    Question("I use a sampler.", "blackjax", "guide/libraries/"),
    Question("I do variational Monte Carlo.", "NetKet", "guide/libraries/"),
    Question("Only the names, please.", "cheat sheet", "cheat_sheet/"),
    Question("What is a cotangent?", "cotangent", "glossary/"),
    Question("My average of parameters was poisoned.", "moving average EMA", "guide/skipped_steps/"),
    Question("How do I log the norm?", "gradient norm", "guide/clipping/"),
    Question("How does it get into my dashboard?", "tensorboard wandb", "guide/logging/"),
    Question("I have Keras code.", "Keras", "migrating/"),
    Question("And float8?", "float8", "faq/"),
    Question("My GPU is old.", "V100 T4", "why/"),
    Question("Why 32768 and not 30000?", "power of two", "faq/"),
    Question("I train ten networks at once.", "ensemble", "guide/several/"),
    Question("My parameters are sharded.", "FSDP", "guide/devices/"),
    Question("I use a second-order method.", "line search lbfgs", "guide/step/"),
    Question("My batch does not fit.", "micro-batch", "guide/accumulation/"),
]
QUESTIONS = [*ASKED_ELSEWHERE, *OUR_OWN, *IN_OTHER_WORDS, *MORE_OF_OUR_OWN]
