"""What the backward pass has of the forward pass, and what it computes again: `model.remat`."""

import jax
from jax.ad_checkpoint import checkpoint_name

_SAVE = jax.checkpoint_policies
_SUBLAYER = "sublayer"

POLICIES = {
    "none": None,  # keep every activation
    "dots": _SAVE.dots_with_no_batch_dims_saveable,  # keep the products with weights
    # Keep what sublayers compute, and one stream a block of layers: compute the connections again.
    "streams": _SAVE.save_from_both_policies(
        _SAVE.dots_with_no_batch_dims_saveable, _SAVE.save_only_these_names(_SUBLAYER)
    ),
    "full": _SAVE.nothing_saveable,  # compute each layer again from its input
}


def keep(x: jax.Array) -> jax.Array:
    """x, which remat=streams keeps: for what a sublayer computes by other means than a product with weights."""
    return checkpoint_name(x, _SUBLAYER)


def periods_of_a_block(periods: int, period: int, n: float, most: int = 0) -> int:
    """How many of a stack's periods are a block: of the stream in it, remat=streams keeps what goes into it.

    While the backward pass is in a block, there are the block's streams and what its sites make of them beside those
    that were kept: n L/L_r + (n + 2) L_r arrays of the model's width, for L sites in blocks of L_r. Of the divisors of
    `periods` the one for which that is least; any L_r would do for L_r = √(n L/(n + 2)) (mHC, arXiv 2512.24880, section
    4.3.2).

    Args:
      periods: of the layer pattern in the stack.
      period: the layers of the pattern, two sites each.
      n: how many times as wide as the model the stream is.
      most: layers that a block has at most, a period at least; 0: as many as are cheapest.
    """
    divisors = [k for k in range(1, periods + 1) if periods % k == 0]
    if most:
        return max(k for k in divisors if k == 1 or k * period <= most)
    sites = 2 * period * periods
    return min(divisors, key=lambda k: n * sites / (2 * period * k) + (n + 2) * 2 * period * k)
