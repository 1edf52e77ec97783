"""The sites of public code, where it is installed: what ours are timed beside.

    pip install torch==2.13.0 transformers==5.24.0 hyper-connections==0.4.11

MaxText is taken where its source is on the path (`PYTHONPATH=.../maxtext/src`).
"""

import importlib
from collections.abc import Callable
from types import SimpleNamespace

import jax
import jax.numpy as jnp

from grlab.train.rundir import cores


def calls(tokens: int, width: int, streams: int) -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
    """(a call for each peer: one site forward and backward, in float32; why others are left out)."""
    found, missing = {}, {}
    for name, make in _PEERS.items():
        try:
            found[name] = make(tokens, width, streams)
        except ImportError as e:
            missing[name] = f"{e.name} is not installed"
    return found, missing


def _torch(site, parameters, shape: tuple[int, ...]) -> Callable[[], object]:
    """A call of site(streams) -> streams and its backward pass."""
    torch = importlib.import_module("torch")
    torch.set_num_threads(cores())
    torch.manual_seed(0)
    stream = torch.randn(shape, requires_grad=True)
    cotangent = torch.randn(shape)
    leaves = [stream, *parameters]
    return lambda: torch.autograd.grad(site(stream), leaves, cotangent)


def _transformers_gr(tokens, width, streams):
    modeling = importlib.import_module("transformers.models.qwen4_exp.modeling_qwen4_exp")
    config = SimpleNamespace(hc_count=streams, hidden_size=width, hc_lowrank=width // 8, rms_norm_eps=1e-6)
    block = modeling.Qwen4ExpTextGatedResidual(config)

    def site(stream):
        x, stream, s = block(stream)
        return stream + (s.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2)

    return _torch(site, list(block.parameters()), (1, tokens, streams * width))


def _transformers_mhc(tokens, width, streams):
    modeling = importlib.import_module("transformers.models.deepseek_v4.modeling_deepseek_v4")
    torch = importlib.import_module("torch")
    config = SimpleNamespace(
        hc_mult=streams, hidden_size=width, rms_norm_eps=1e-6, hc_eps=1e-6, hc_sinkhorn_iters=20
    )  # fmt: skip
    block, norm = modeling.DeepseekV4HyperConnection(config), modeling.DeepseekV4RMSNorm(width, eps=1e-6)
    for p in block.parameters():  # they are made without values
        torch.nn.init.normal_(p, std=0.02)

    def site(stream):
        post, comb, x = block(stream)
        return post.unsqueeze(-1) * norm(x).unsqueeze(-2) + torch.matmul(comb.transpose(-1, -2), stream)

    return _torch(site, [*block.parameters(), *norm.parameters()], (1, tokens, streams, width))


def _lucidrains(module: str, tokens, width, streams):
    connections = importlib.import_module(f"hyper_connections.{module}")
    torch = importlib.import_module("torch")
    name = "ManifoldConstrainedHyperConnections" if module.startswith("manifold") else "HyperConnections"
    norm = torch.nn.RMSNorm(width)
    block = getattr(connections, name)(streams, dim=width, layer_index=1, branch=norm)
    return _torch(block, list(block.parameters()), (streams, tokens, width))


def _maxtext_mhc(tokens, width, streams):
    mhc = importlib.import_module("maxtext.layers.mhc")
    common = importlib.import_module("maxtext.common.common_types")
    nnx = importlib.import_module("flax.nnx")
    config = SimpleNamespace(
        sinkhorn_iterations=20, mhc_expansion_rate=streams, dtype=jnp.float32, weight_dtype=jnp.float32,
        matmul_precision="highest", normalization_layer_epsilon=1e-6, enable_mhc_lite=False,
    )  # fmt: skip
    block = mhc.ManifoldConstrainedHyperConnections(config, width, None, nnx.Rngs(0))
    norm = nnx.RMSNorm(width, epsilon=1e-6, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split((block, norm))
    shape = (1, tokens, streams, width)
    stream, cotangent = (jax.random.normal(jax.random.key(i), shape) for i in (2, 3))

    @jax.jit
    def forward_backward(params, stream, cotangent):
        def connection(params, stream):
            block, norm = nnx.merge(graphdef, params)
            return block(norm, lambda inputs: inputs, stream, common.HyperConnectionType.MLP_DENSE)[0]

        out, vjp = jax.vjp(connection, params, stream)
        return out, vjp(cotangent)

    return lambda: forward_backward(params, stream, cotangent)


_PEERS = {
    "transformers GR": _transformers_gr,
    "transformers mHC": _transformers_mhc,
    "lucidrains HC": lambda *sizes: _lucidrains("hyper_connections", *sizes),
    "lucidrains mHC": lambda *sizes: _lucidrains("manifold_constrained_hyper_connections", *sizes),
    "MaxText mHC": _maxtext_mhc,
}
