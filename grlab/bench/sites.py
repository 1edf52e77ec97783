"""One site, forward and backward, beside the public modules of the same system, at the same shapes."""

from collections.abc import Callable

import jax
from flax import nnx

from grlab import residual
from grlab.bench import peers
from grlab.bench.timing import Times, side_by_side

TOKENS, WIDTH, STREAMS = 512, 256, 4
SYSTEMS = {"gr": {"rank": WIDTH // 8}, "mhc": {}, "mhc (DeepSeek-V4)": {"form": "deepseek_v4"}, "hc": {}}
# What a peer is compared with: how many times our site's time it takes.
OURS = {"transformers GR": "gr", "transformers mHC": "mhc (DeepSeek-V4)", "lucidrains HC": "hc"}
OURS |= {"lucidrains mHC": "mhc", "MaxText mHC": "mhc"}


def measure(rounds: int, with_peers: bool, say: Callable[[str], None]) -> Times:
    """Times each system's site and, with `with_peers`, those of the public modules that are installed; float32.

    What is timed: the read, an identity for the sublayer, the write, and the gradients of streams and parameters of the
    product of the new streams with a given cotangent; ours and MaxText's compiled, the others' operation by operation.
    """
    calls = {name: _site(name.split(" ")[0], switches) for name, switches in SYSTEMS.items()}
    if with_peers:
        found, missing = peers.calls(TOKENS, WIDTH, STREAMS)
        calls |= found
        for name, why in missing.items():
            say(f"{name}: left out, {why}")
    say(f"{rounds} rounds of {', '.join(calls)}")
    return side_by_side(calls, rounds)


def compared(names) -> dict[str, str]:
    """What each of the peers among `names` is compared with."""
    return {name: OURS[name] for name in names if name in OURS}


def _site(kind: str, switches: dict) -> Callable[[], object]:
    fields = {"kind": kind, "streams": STREAMS, **switches}
    site = residual.build(fields, width=WIDTH, layers=1, key=jax.random.key(0)).site(1, jax.random.key(1))
    graphdef, params = nnx.split(site)
    shape = (1, TOKENS, STREAMS, WIDTH)
    stream_BxTxNxD, cotangent_BxTxNxD = (jax.random.normal(jax.random.key(i), shape) for i in (2, 3))

    @jax.jit
    def forward_backward(params, stream_BxTxNxD, cotangent_BxTxNxD):
        def connection(params, stream_BxTxNxD):
            site = nnx.merge(graphdef, params)
            x_BxTxD, gates = site.read(stream_BxTxNxD)
            return site.write(stream_BxTxNxD, x_BxTxD, gates)

        out_BxTxNxD, vjp = jax.vjp(connection, params, stream_BxTxNxD)
        return out_BxTxNxD, vjp(cotangent_BxTxNxD)

    return lambda: forward_backward(params, stream_BxTxNxD, cotangent_BxTxNxD)
