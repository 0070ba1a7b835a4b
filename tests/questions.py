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
    Question("Only the names, please.", "cheat sheet", "api/"),
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
# What readers have typed in vain.
TYPED_IN_VAIN = [
    Question("Why is my model not faster?", "why is my model not faster", "performance/"),
    Question("And my batch norm?", "batch norm", "guide/skipped_steps/"),
    Question("What do I do at evaluation?", "disable for eval", "guide/recipes/"),
    Question("I fine-tune with adapters.", "LoRA", "guide/recipes/"),
    Question("What is this number?", "what does 2^15 mean", "faq/"),
    Question("How much memory do I gain?", "memory saved", "why/"),
    Question("I come from PyTorch.", "pytorch gradscaler", "migrating/"),
    Question("My data may be bad.", "nan in data", "wrong/"),
    Question("My learning rate may be too high.", "learning rate too high", "wrong/"),
    Question("I have an A100.", "A100 bfloat16", "why/"),
    Question("What are float32 products on my GPU?", "TF32", "performance/"),
    Question("Does my GPU matter?", "H100", "performance/"),
    Question("How do I evaluate?", "evaluation", "guide/recipes/"),
    Question("I use dropout.", "dropout", "frameworks/nnx/"),
    Question("I use flash attention.", "attention kernel 16 bits", "guide/precision/"),
    Question("I use DeepSpeed.", "DeepSpeed", "migrating/"),
    Question("Do I lose accuracy?", "accuracy of float16", "accuracy/"),
    Question("What must not be float16?", "what must stay float32", "why/"),
    Question("I write my own training loop.", "by hand", "guide/step/"),
    Question("My run is stuck.", "stuck", "guide/skipped_steps/"),
    Question("Does it compile again and again?", "one compiled program", "numerics/"),
    Question("I save with flax.", "msgpack", "frameworks/nnx/"),
    Question("I use SAM.", "SAM", "frameworks/optax/"),
    Question("Which optimizers work?", "every optimizer", "frameworks/optax/"),
    Question("I have small float16 weights.", "float16 parameters", "faq/"),
    Question("I solve a differential equation.", "diffrax", "frameworks/equinox/"),
    Question("I export my program.", "export", "guide/devices/"),
    Question("How is it installed?", "install", ""),
    Question("Which jax do I need?", "requirements", ""),
]
QUESTIONS = [*ASKED_ELSEWHERE, *OUR_OWN, *IN_OTHER_WORDS, *MORE_OF_OUR_OWN, *TYPED_IN_VAIN]
