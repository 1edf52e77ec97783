"""AltUp, arXiv 2301.13310, Algorithm 1: predict x̂_i = Σ_j p_ij x_j, compute x̃ on j*, correct by g_i (x̃ − x̂_j*)."""

import numpy as np

from tests.residual import starts
from tests.residual.statements import copies, end_of_sum, norm

CASES = [{}, {"streams": 2}, {"select": "same"}, {"select": "layers"}, {"gated_norm": 3}]
SITES = (1, 2)
start = starts.prenorm  # p = I and g = 1: every block gets every output


def site(p, stream, y, *, k, eps, streams, select="alternating", **switches):
    active = {"alternating": k, "layers": k // 2, "same": 0}[select] % streams
    predicted = [sum(p["p"][i, j] * stream[:, :, j] for j in range(streams)) for i in range(streams)]
    computed = stream[:, :, active] + y  # the layer, which has a residual of its own
    new = [predicted[i] + p["g"][i] * (computed - predicted[active]) for i in range(streams)]
    return norm(p, stream[:, :, active], eps), np.stack(new, axis=-2)


def collapse(p, stream, *, eps, **switches):
    return end_of_sum(p, stream, eps)


def expand(x, *, streams, **switches):
    return copies(x, streams)
