"""A haiku graph network, trained in float16 to predict the motion of masses that are connected by springs.

Each system is a graph whose nodes are masses and whose edges are springs with different stiffnesses and lengths. In
each of a few rounds, the network computes a message for each edge and adds up the messages at the nodes. It then
predicts the displacement of each mass in one second. As in jraph, the graphs of a batch are combined into one large
graph. The network and the loss are written in float32, and `jls.autocast` computes their matrix multiplications in
``--dtype``. The sums over edges stay in float32.

References:
  Battaglia et al., Interaction Networks, NeurIPS 2016, arXiv 1612.00222.
  Sanchez-Gonzalez et al., Learning to Simulate Complex Physics with Graph Networks, ICML 2020, arXiv 2002.09405.
"""

from typing import Any

import command_line
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track

import jax_lossscale as jls

MASSES, SPRINGS = 8, 12  # in each system
BATCH_SIZE, TRAIN_EXAMPLES, TEST_EXAMPLES = 32, 4096, 256  # systems
WIDTH, ROUNDS = 64, 3
TIME_STEP, TIME_STEPS = 0.02, 50

Graph = dict[str, jax.Array]


def accelerations(graph: Graph, positions: jax.Array) -> jax.Array:
    """Return the accelerations of the masses at the given positions ``[masses, 2]``."""
    apart = positions[graph["senders"]] - positions[graph["receivers"]]
    length = jnp.sqrt(jnp.sum(apart**2, axis=1, keepdims=True) + 0.01)  # The constant prevents a length of 0.
    pulls = graph["stiffnesses"] * (length - graph["lengths"]) * apart / length
    return jax.ops.segment_sum(pulls, graph["receivers"], MASSES) / graph["masses"]


def make_system(key: jax.Array) -> Graph:
    """Return a system of masses at random positions, connected by random springs, with their displacements."""
    keys = jax.random.split(key, 6)
    pairs = jnp.stack(jnp.triu_indices(MASSES, 1))[:, jax.random.permutation(keys[0], MASSES * (MASSES - 1) // 2)]
    ends = jnp.concatenate(
        [pairs[:, :SPRINGS], pairs[::-1, :SPRINGS]], axis=1
    )  # Each spring has an edge in both directions.
    graph = {
        "senders": ends[0],
        "receivers": ends[1],
        "stiffnesses": jnp.tile(jax.random.uniform(keys[1], (SPRINGS, 1), minval=0.5, maxval=2), (2, 1)),
        "lengths": jnp.tile(jax.random.uniform(keys[2], (SPRINGS, 1), minval=0.5, maxval=1.5), (2, 1)),
        "masses": jax.random.uniform(keys[3], (MASSES, 1), minval=0.5, maxval=2),
        "positions": jax.random.normal(keys[4], (MASSES, 2)),
        "velocities": jax.random.normal(keys[5], (MASSES, 2)) / 2,
    }

    def move(now: Any, _: None) -> tuple[Any, None]:
        positions, velocities = now
        velocities = velocities + TIME_STEP * accelerations(graph, positions)
        return (positions + TIME_STEP * velocities, velocities), None

    (positions, _), _ = jax.lax.scan(move, (graph["positions"], graph["velocities"]), length=TIME_STEPS)
    return {**graph, "moved": positions - graph["positions"]}


def as_one(graphs: Graph) -> Graph:
    """Return one graph with all masses and edges of the graphs, whose arrays have a leading axis for the systems."""
    first = MASSES * jnp.arange(len(graphs["masses"]))[:, None]
    graphs = {**graphs, "senders": graphs["senders"] + first, "receivers": graphs["receivers"] + first}
    return {name: leaf.reshape(-1, *leaf.shape[2:]) for name, leaf in graphs.items()}


def network(graph: Graph) -> jax.Array:
    """Return the predicted displacement of each mass, ``[masses, 2]``."""

    def mlp(*inputs: jax.Array) -> jax.Array:
        hidden = hk.nets.MLP([WIDTH, WIDTH])(jnp.concatenate(inputs, axis=1))
        return hk.LayerNorm(-1, create_scale=True, create_offset=True)(hidden)

    senders, receivers, positions = graph["senders"], graph["receivers"], graph["positions"]
    nodes = mlp(graph["masses"], graph["velocities"])
    edges = mlp(graph["stiffnesses"], graph["lengths"], positions[senders] - positions[receivers])
    for _ in range(ROUNDS):
        edges = edges + mlp(edges, nodes[senders], nodes[receivers])
        nodes = nodes + mlp(nodes, jax.ops.segment_sum(edges, receivers, len(nodes)))
    return hk.nets.MLP([WIDTH, 2])(nodes)


model = hk.without_apply_rng(hk.transform(network))


def loss_fn(params: Any, graph: Graph) -> jax.Array:
    """Return the mean squared error."""
    return jnp.mean((model.apply(params, graph) - graph["moved"]) ** 2)


def main(arguments: list[str] | None = None) -> None:
    """Train the model, and print the results."""
    parser = command_line.make_parser(__doc__, steps=1000, figure="some systems, loss and loss scale")
    options = parser.parse_args(arguments)

    dtype = jnp.dtype(options.dtype)
    optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, options.steps))
    tx = jls.loss_scaled(optimizer, jls.loss_scale_for(dtype))  # Only float16 needs a loss scale.

    @jax.jit
    def train_step(params: Any, opt_state: Any, systems: Graph) -> tuple[Any, Any, Any]:
        grad_fn = jls.value_and_scaled_grad(jls.autocast(loss_fn, dtype), opt_state)
        loss, grads = grad_fn(params, as_one(systems))  # the true loss, and gradients of S * loss
        params, opt_state = tx.update_and_apply(grads, opt_state, params, value=loss)
        return params, opt_state, {"loss": loss, **jls.metrics(opt_state)}

    keys = jax.random.split(jax.random.key(0), TRAIN_EXAMPLES + TEST_EXAMPLES)
    data = jax.device_get(jax.jit(jax.vmap(make_system))(keys))
    held_out = as_one({name: leaf[TRAIN_EXAMPLES:] for name, leaf in data.items()})
    params = model.init(jax.random.key(options.seed), held_out)
    opt_state = tx.init(params)
    random = np.random.default_rng(options.seed)
    history = []
    for _ in track(range(options.steps), options.dtype, console=Console(stderr=True)):
        batch = random.choice(TRAIN_EXAMPLES, BATCH_SIZE, replace=False)
        params, opt_state, metrics = train_step(params, opt_state, {name: leaf[batch] for name, leaf in data.items()})
        history.append(metrics)

    found = jax.jit(model.apply)(params, held_out)
    if options.figure:
        figure = Figure(figsize=(8, 7), layout="constrained")
        pictures, curves = figure.subfigures(2)
        for system, ax in enumerate(pictures.subplots(1, 3)):
            here = slice(MASSES * system, MASSES * (system + 1))
            for moved, style in (held_out["moved"], "C0-o"), (found, "C1-x"):
                ways = np.stack([held_out["positions"][here], (held_out["positions"] + moved)[here]])
                ax.plot(*ways.transpose(2, 0, 1), style, markevery=[1])
            ax.set(title="true (o), found (x)" if system == 0 else None, aspect="equal")
        jls.plotting.plot_run(history, axes=curves.subplots(3, sharex=True))
        figure.savefig(options.figure)
    error = jnp.linalg.norm(found - held_out["moved"]) / jnp.linalg.norm(held_out["moved"])
    print(f"relative error: {error:.4f}")
    print(f"loss scale: {history[-1]['loss_scale']:.0f}")
    print(f"skipped steps: {history[-1]['skipped_steps']} of {options.steps}")


if __name__ == "__main__":
    main()
