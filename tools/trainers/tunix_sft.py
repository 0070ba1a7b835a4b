"""Supervised fine-tuning with `PeftTrainer` of tunix: a tiny Llama 3 learns to count."""

# /// trainer
# environment = "tunix"
# install = ["google-tunix"]
# where = "`PeftTrainer(model, mp.optimizer, ...)`, `trainer.with_loss_fn(mp.loss(trainer.loss_fn))`"
# ///

import numpy as np
import optax
from _mode import Half, report
from _tunix import Losses, inputs_of, llama, sequences
from tunix.sft import peft_trainer

half = Half(optax.adamw(3e-3))
config = peft_trainer.TrainingConfig(eval_every_n_steps=1000, max_steps=100, gradient_accumulation_steps=2)
trainer = peft_trainer.PeftTrainer(llama(seed=0), half.optimizer, config)
trainer.with_loss_fn(half.loss(trainer.loss_fn))
trainer.with_gen_model_input_fn(inputs_of)
losses = Losses()
trainer.with_training_hooks(losses)
tokens = sequences(np.random.default_rng(0), 8 * 200).reshape(200, 8, -1)
trainer.train([peft_trainer.TrainingInput(batch, np.ones_like(batch)) for batch in tokens], None)
report("google-tunix", losses.values, trainer.optimizer.opt_state)
