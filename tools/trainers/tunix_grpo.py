"""Group relative policy optimization with `GRPOLearner` of tunix: a tiny Llama 3 learns to write a certain token.

The first tokens of this model are random, so it is trained with a reward that is frequent in the beginning.
"""

# /// trainer
# environment = "tunix"
# install = ["google-tunix"]
# where = """
# `RLTrainingConfig(actor_optimizer=mp.optimizer)`, `trainer.with_loss_fn(mp.loss(trainer.loss_fn), \
# has_aux=True)` with `trainer = rl_cluster.actor_trainer` after the learner is created"""
# tolerance = 0.1
# ///

import jax
import numpy as np
import optax
from _mode import Half, report
from _tunix import Tokenizer, llama
from jax.sharding import Mesh
from tunix.rl import rl_cluster as rl
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout import base_rollout

rewards = []


def reward(prompts, completions, **kwargs):
    """Return the fraction of the tokens of each completion that are the token 5."""
    fractions = [np.mean([token == "5" for token in completion.split()] or [0.0]) for completion in completions]
    rewards.append(np.mean(fractions))
    return fractions


half = Half(optax.adamw(1e-2))
mesh = Mesh(np.array(jax.devices()).reshape(1, 1), ("fsdp", "tp"))
rl_cluster = rl.RLCluster(
    actor=llama(seed=0),
    reference=llama(seed=0),
    tokenizer=Tokenizer(),
    cluster_config=rl.ClusterConfig(
        role_to_mesh=dict.fromkeys((rl.Role.ACTOR, rl.Role.REFERENCE, rl.Role.ROLLOUT), mesh),
        training_config=rl.RLTrainingConfig(
            actor_optimizer=half.optimizer, eval_every_n_steps=1000, max_steps=100, mini_batch_size=4
        ),
        rollout_config=base_rollout.RolloutConfig(
            max_tokens_to_generate=8, max_prompt_length=8, kv_cache_size=32, temperature=1.0, seed=0
        ),
    ),
)
learner = GRPOLearner(rl_cluster, GRPOConfig(num_generations=4, beta=0.01), reward)
trainer = rl_cluster.actor_trainer
trainer.with_loss_fn(half.loss(trainer.loss_fn), has_aux=True)
rng = np.random.default_rng(0)
prompts = [[" ".join(map(str, rng.integers(3, 32, 4))) for _ in range(4)] for _ in range(100)]
learner.train([{"prompts": np.array(batch)} for batch in prompts])
report("google-tunix", rewards, trainer.optimizer.opt_state)
