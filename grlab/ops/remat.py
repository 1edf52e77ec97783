"""What a read leaves for the backward pass, by a name that the policy model.remat=reads knows."""

from jax.ad_checkpoint import checkpoint_name

READ = "read"


def of_read(tree):
    """The arrays of `tree`, marked: what a sublayer reads, and the few numbers a token that it was read by."""
    return checkpoint_name(tree, READ)
