"""Direct preference optimization with `DPOTrainer` of tunix: a tiny Llama 3 prefers counting to random tokens."""

# /// trainer
# environment = "tunix"
# install = ["google-tunix"]
# where = "`DPOTrainer(..., optimizer=mp.optimizer)`, `trainer.with_loss_fn(mp.loss(trainer.loss_fn), has_aux=True)`"
# tolerance = 0.05
# ///

import numpy as np
import optax
from _mode import Half, report
from _tunix import VOCABULARY, Losses, llama, sequences
from tunix.sft.dpo import dpo_trainer

half = Half(optax.adamw(3e-4))
config = dpo_trainer.DPOTrainingConfig(eval_every_n_steps=1000, max_steps=100)
trainer = dpo_trainer.DPOTrainer(llama(seed=0), llama(seed=0), half.optimizer, config)
trainer.with_loss_fn(half.loss(trainer.loss_fn), has_aux=True)
losses = Losses()
trainer.with_training_hooks(losses)
rng = np.random.default_rng(0)
batches = []
for _ in range(100):
    tokens = sequences(rng, 8)
    prompts, chosen = tokens[:, :4], tokens[:, 4:]
    rejected = rng.integers(3, VOCABULARY, chosen.shape)
    with_masks = [array for tokens in (prompts, chosen, rejected) for array in (tokens, np.ones_like(tokens))]
    batches.append(dpo_trainer.TrainingInput(*with_masks))
trainer.train(batches, None)
report("google-tunix", losses.values, trainer.optimizer.opt_state)
