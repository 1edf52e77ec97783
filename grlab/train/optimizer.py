"""AdamW or Muon with linear warm-up, on the groups that the parameters ask for."""

import optax
from flax import nnx
from optax.contrib import MuonDimensionNumbers, muon
from optax.transforms import MaskedNode

from grlab.params import Fixed, map_params

# Muon's update has about the size of AdamW's (arXiv 2502.16982, section 2.2), so that one learning rate and one weight
# decay serve both groups.
MUON_RMS = 0.2


def schedule(optim, steps: int) -> optax.Schedule:
    """The learning rate of update 0 .. steps − 1: linear from 0, then constant, or a cosine to `final_lr` of it."""
    peak = optim.lr * optim.lr_factor
    if optim.schedule == "constant":
        warmup = optax.linear_schedule(0.0, peak, max(optim.warmup, 1))
        return optax.join_schedules([warmup, optax.constant_schedule(peak)], [optim.warmup])
    return optax.warmup_cosine_decay_schedule(0.0, peak, optim.warmup, steps, peak * optim.final_lr)


def group(optim, variable: nnx.Param) -> str:
    """What updates a parameter: adamw, muon (where optim.name is muon and the parameter asks for it) or fixed."""
    if isinstance(variable, Fixed):
        return "fixed"
    return "muon" if optim.name == "muon" and variable.muon else "adamw"


def make(optim, steps: int, params: nnx.State) -> optax.GradientTransformation:
    """The optimizer of `config.optim`: clipping by global norm, then AdamW (arXiv 1711.05101) or Muon.

    Muon orthogonalises the momentum of each matrix by itself: a stack of layers or heads is a batch of matrices. What
    does not ask for it has AdamW: embedding, head, gates, vectors and GR's projections (report on GR, section 3.1).
    """
    rate = schedule(optim, steps)
    decayed = map_params(lambda v: v.decay, params)
    adamw = optax.adamw(rate, b1=optim.b1, b2=optim.b2, eps=optim.eps, weight_decay=optim.weight_decay, mask=decayed)
    transforms = {"adamw": adamw, "fixed": optax.set_to_zero()}
    if optim.name == "muon":
        axes = map_params(lambda v: MuonDimensionNumbers(*v.muon) if v.muon else MaskedNode(), params)
        transforms["muon"] = muon(
            rate, weight_decay=optim.weight_decay, muon_weight_dimension_numbers=axes, consistent_rms=MUON_RMS
        )
    groups = map_params(lambda v: group(optim, v), params)
    return optax.chain(optax.clip_by_global_norm(optim.clip), optax.partition(transforms, groups))


def describe_groups(optim, params: nnx.State) -> str:
    """One line for each module and group, of optimizer and weight decay: how many parameters, and which."""
    modules: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for path, variable in nnx.to_flat_state(params):
        *parents, name = (str(p) for p in path)
        kind = group(optim, variable)
        if kind != "fixed":
            kind += ", weight decay" if variable.decay else ", no decay"
        modules.setdefault((kind, ".".join(parents) or "model"), []).append((name, variable.size))
    lines = []
    for kind in ("muon, weight decay", "adamw, weight decay", "adamw, no decay", "fixed"):
        of_kind = {module: members for (k, module), members in sorted(modules.items()) if k == kind}
        if of_kind:
            lines.append(f"{kind:<20} {sum(size for members in of_kind.values() for _, size in members):>13,}")
        for module, members in of_kind.items():
            names = ", ".join(name for name, _ in members)
            lines.append(f"  {module:<28} {sum(size for _, size in members):>9,}  {names}")
    return "\n".join(lines)
