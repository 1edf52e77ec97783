"""The training step and the evaluation function: pure functions of arrays, compiled once for a mesh."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from grlab import parallel
from grlab.model import Decoder, token_nats
from grlab.ops.mesh import SEEDS_AXIS, traced_for
from grlab.params import fold
from grlab.train import optimizer

# What every step reports; it adds the means of the layers' statistics, such as a router's.
STEP_METRICS = ("loss", "grad_norm", "lr", "squares")


class State(NamedTuple):
    """All that an update changes."""

    params: nnx.State
    opt_state: optax.OptState
    step: jax.Array  # updates done


class Trainer(NamedTuple):
    """What a run needs of the model: its shapes, and functions compiled for the mesh.

    Of one seed, or of several that are trained together: all that `init` and `step` take and return then has the seeds
    along a first axis.
    """

    abstract: State  # shapes, dtypes and shardings
    init: Callable[[], State]
    step: jax.stages.Wrapped  # (State, batch) -> (State, metrics); the State is donated
    nats: jax.stages.Wrapped  # (params, tokens_BxT, targets_BxT) -> nats_BxT, with the parameters of one seed
    greedy: jax.stages.Wrapped  # (params, tokens_BxT, targets_BxT) -> hit_BxT: the target has the largest logit
    of_one: State  # shapes, dtypes and shardings of one seed's part
    take: Callable[[State, int], State]  # the part of the i-th seed
    join: Callable[[Sequence[State]], State]  # the whole of the parts


def make_trainer(config, vocab: int, mesh: Mesh, separator: int = 0, together: Sequence[int] | None = None) -> Trainer:
    """Builds everything from the resolved config; nothing is computed yet.

    `separator` is the token between two documents; `together` the seeds to train in one program, in place of
    config.seed alone. Raises UsageError for a model that cannot be.
    """

    def key_of(seed: int):
        return fold(jax.random.key(seed), "params")

    def build(key):
        return Decoder(config.model, config.residual, vocab, key, separator)

    graphdef, shapes = nnx.split(nnx.eval_shape(lambda: build(key_of(config.seed))))
    tx = optimizer.make(config.optim, config.steps, shapes)
    rate = optimizer.schedule(config.optim, config.steps)

    whole = parallel.replicated(mesh)
    everything = State(shapes, jax.eval_shape(tx.init, shapes), jax.ShapeDtypeStruct((), jnp.int32))
    shardings = parallel.shardings(everything, mesh, config.rules)

    def init(key) -> State:
        params = nnx.state(build(key))
        return State(params, tx.init(params), jnp.zeros((), jnp.int32))

    def loss_fn(params, batch):
        """What is minimised, and what is reported: the loss alone, and the means of the layers' statistics."""
        model = nnx.merge(graphdef, params)
        logits_BxTxV, statistics = model.with_statistics(batch["tokens_BxT"])
        loss = jnp.mean(token_nats(logits_BxTxV, batch["targets_BxT"]))
        return loss + model.auxiliary_loss(statistics), {"loss": loss} | jax.tree.map(jnp.mean, statistics)

    def metrics_and_grads(params, batch):
        parts = config.optim.accumulate
        of_part = jax.value_and_grad(loss_fn, has_aux=True)

        def part_metrics_and_grads(params, part):
            (_, metrics), grads = of_part(params, part)
            return metrics, grads

        if parts == 1:
            return part_metrics_and_grads(params, batch)
        # Every part takes rows from all over the batch, so that each device keeps the rows that it holds.
        split = jax.tree.map(lambda x: jnp.swapaxes(x.reshape(-1, parts, *x.shape[1:]), 0, 1), batch)

        def add(total, part):
            return jax.tree.map(jnp.add, total, part_metrics_and_grads(params, part)), None

        one_part = jax.tree.map(lambda x: x[0], split)
        shapes = jax.eval_shape(part_metrics_and_grads, params, one_part)
        total, _ = jax.lax.scan(add, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), split)
        return jax.tree.map(lambda x: x / parts, total)

    def step(state: State, batch):
        with traced_for(mesh):
            metrics, grads = metrics_and_grads(state.params, batch)
        squares = jax.tree.map(lambda g: jnp.sum(jnp.square(g.astype(jnp.float32))), grads)
        metrics |= {
            "grad_norm": jnp.sqrt(sum(jax.tree.leaves(squares))),
            "lr": rate(state.step),
            "squares": jax.tree.leaves(squares),
        }
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state, state.step + 1), metrics

    def logits(params, tokens_BxT):
        with traced_for(mesh):
            return nnx.merge(graphdef, params)(tokens_BxT)

    def nats(params, tokens_BxT, targets_BxT):
        return token_nats(logits(params, tokens_BxT), targets_BxT)

    def greedy(params, tokens_BxT, targets_BxT):
        return jnp.argmax(logits(params, tokens_BxT), axis=-1) == targets_BxT

    def abstract(init, key, shardings):
        shapes = jax.eval_shape(init, key)
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)

    of_one = abstract(init, key_of(config.seed), shardings)
    if together is None:
        key, of_all = key_of(config.seed), shardings
        take, join = (lambda state, i: state), (lambda states: states[0])
    else:
        key, of_all = jnp.stack([key_of(seed) for seed in together]), parallel.of_seeds(shardings)
        init, step = (jax.vmap(f, spmd_axis_name=SEEDS_AXIS) for f in (init, step))
        take = jax.jit(lambda state, i: jax.tree.map(lambda x: x[i], state), out_shardings=shardings)
        join = jax.jit(lambda states: jax.tree.map(lambda *xs: jnp.stack(xs), *states), out_shardings=of_all)
    jit_init = jax.jit(init, out_shardings=of_all)
    return Trainer(
        abstract=abstract(init, key, of_all),
        init=lambda: jit_init(key),
        step=jax.jit(step, donate_argnums=0, out_shardings=(of_all, whole)),
        nats=jax.jit(nats, out_shardings=whole),
        greedy=jax.jit(greedy, out_shardings=whole),
        of_one=of_one,
        take=take,
        join=join,
    )


def param_names(params: nnx.State) -> list[str]:
    """The dotted path of each parameter, in the order of `jax.tree.leaves`."""
    paths = jax.tree.leaves_with_path(params, is_leaf=lambda v: isinstance(v, nnx.Variable))
    return [".".join(str(getattr(k, "key", getattr(k, "name", k))) for k in path) for path, _ in paths]


def first_bad(names: list[str], squares: list[np.ndarray]) -> str:
    """The first parameter whose gradient is not finite."""
    return next((n for n, s in zip(names, squares, strict=True) if not np.isfinite(s)), "none: the loss alone")
