"""Width only, Report section 2.2 (arXiv 2608.30320): x = norm(Σ_i h_i R_i), y goes to stream k mod n."""

from tests.residual import starts
from tests.residual.statements import copies, end_of_sum, norm

CASES = [{}, {"streams": 2}, {"read_init": "mean"}, {"gated_norm": 3}]
SITES = (1, 2)


def start(model, tokens):
    """n pre-norm networks, each of every n-th sublayer, summed before the final norm."""
    streams = [starts.embed(model, tokens)] * 4
    for k, sublayer in enumerate(starts.sublayers(model)):
        streams[k % 4] = streams[k % 4] + sublayer(starts.norm(streams[k % 4]))
    return starts.norm(sum(streams), 4) @ model.head[...], starts.EXACT


def site(p, stream, y, *, k, eps, streams, **switches):
    new = stream.copy()
    new[:, :, k % streams] += y
    return norm(p, sum(p["h"][i] * stream[:, :, i] for i in range(streams)), eps), new


def collapse(p, stream, *, eps, **switches):
    return end_of_sum(p, stream, eps)


def expand(x, *, streams, **switches):
    return copies(x, streams)
