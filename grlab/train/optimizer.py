"""AdamW with linear warm-up and cosine decay; weight decay on the parameters that ask for it."""

import optax
from flax import nnx

from grlab.params import map_params


def schedule(optim, steps: int) -> optax.Schedule:
    """The learning rate of update 0 .. steps − 1: linear from 0, then a cosine to `final_lr` of the peak."""
    return optax.warmup_cosine_decay_schedule(0.0, optim.lr, optim.warmup, steps, optim.lr * optim.final_lr)


def make(optim, steps: int, params: nnx.State) -> optax.GradientTransformation:
    """The optimizer of `config.optim`: clipping by global norm, then AdamW (arXiv 1711.05101)."""
    decayed = map_params(lambda v: v.decay, params)
    adamw = optax.adamw(
        schedule(optim, steps),
        b1=optim.b1,
        b2=optim.b2,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        mask=decayed,
    )
    return optax.chain(optax.clip_by_global_norm(optim.clip), adamw)


def describe_groups(params: nnx.State) -> str:
    """One line for each module and weight-decay group: how many parameters, and which."""
    groups: dict[tuple[str, bool], list[tuple[str, int]]] = {}
    for path, variable in nnx.to_flat_state(params):
        *parents, name = (str(p) for p in path)
        groups.setdefault((".".join(parents) or "model", variable.decay), []).append((name, variable.size))
    lines = []
    for decay in (True, False):
        total = sum(size for (_, d), members in groups.items() if d is decay for _, size in members)
        lines.append(f"{'weight decay' if decay else 'no decay':<12} {total:>13,}")
        for (module, d), members in sorted(groups.items()):
            if d is decay:
                names = ", ".join(name for name, _ in members)
                lines.append(f"  {module:<28} {sum(size for _, size in members):>9,}  {names}")
    return "\n".join(lines)
