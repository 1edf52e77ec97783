"""The read of manifold-constrained Hyper-Connections (mHC) as one operation.

arXiv 2512.24880, eq. 5-8. Dimensions: B batch, T time or all tokens, N streams, D width, I = N·D, P = N², and O the
2N + P logits of a token: those of H_pre, of H_post and of H_res row by row.
"""

import functools
import math

import jax

from grlab.ops import manifold_tpu
from grlab.ops import streams as ops
from grlab.ops.manifold_tpu import Settings
from grlab.ops.mesh import on_each_device
from grlab.ops.sinkhorn import sinkhorn, sinkhorn_v4
from grlab.ops.tpu import where_it_fits


def read(
    stream_BxTxNxD: jax.Array,
    phi_IxO: jax.Array,
    alpha_O: jax.Array,
    b_O: jax.Array,
    gain_D: jax.Array,
    settings: Settings,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The normed sum of the streams, and the maps of the write.

        H̃ = α ⊙ (RMSNorm(vec R) φ) + b;   H_pre = σ(H̃_pre);   H_post = 2σ(H̃_post);   H_res = Sinkhorn-Knopp(exp H̃_res)
        x = RMSNorm(Σ_i H_pre,i R_i) ⊙ (1 + gain)

    All in float32, whatever the dtype of the streams.

    Returns:
      x [B, T, D] in `settings.dtype`, H_post [B, T, N] and H_res [B, T, N, N] in float32.
    """
    plain, fused = functools.partial(_plain, settings=settings), functools.partial(_fused, settings)
    weights = (phi_IxO, alpha_O, b_O, gain_D)
    if not _has_kernels(stream_BxTxNxD):
        return plain(stream_BxTxNxD, *weights)

    def here(stream_BxTxNxD, *weights):
        # The choice is outside of the derivative: that of the plain path is of its parts, and keeps what they keep.
        return where_it_fits(_has_kernels(stream_BxTxNxD), fused, plain, stream_BxTxNxD, *weights)

    return on_each_device(here, (stream_BxTxNxD,), weights)


def _has_kernels(stream_BxTxNxD):
    *lead, n, d = stream_BxTxNxD.shape
    return manifold_tpu.fits(math.prod(lead), n, d, stream_BxTxNxD.dtype)


def logits(stream_BxTxNxD, phi_IxO, alpha_O, b_O, eps):
    """H̃ [B, T, O] in float32."""
    return b_O + alpha_O * ops.rms_project(ops.flatten(stream_BxTxNxD), phi_IxO, eps)


def maps(logits_O, n: int, iterations: int, v4_eps: float | None):
    """(H_pre [.., N], H_post [.., N], H_res [.., N, N]) of logits [.., O]."""
    pre_N, post_N, res_P = logits_O[..., :n], logits_O[..., n : 2 * n], logits_O[..., 2 * n :]
    res_NxN = res_P.reshape(*res_P.shape[:-1], n, n)
    h_pre_N, h_post_N = jax.nn.sigmoid(pre_N), 2 * jax.nn.sigmoid(post_N)
    if v4_eps is None:
        return h_pre_N, h_post_N, sinkhorn(res_NxN, iterations)
    return h_pre_N + v4_eps, h_post_N, sinkhorn_v4(res_NxN, iterations, v4_eps)


def _plain(stream_BxTxNxD, phi_IxO, alpha_O, b_O, gain_D, *, settings):
    n = stream_BxTxNxD.shape[-2]
    logits_BxTxO = logits(stream_BxTxNxD, phi_IxO, alpha_O, b_O, settings.eps)
    pre_BxTxN, post_BxTxN, res_BxTxNxN = maps(logits_BxTxO, n, settings.iterations, settings.v4_eps)
    u_BxTxD = ops.combine(pre_BxTxN, stream_BxTxNxD)
    return ops.rms_norm(u_BxTxD, gain_D, settings.norm_eps).astype(settings.dtype), post_BxTxN, res_BxTxNxN


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(settings, stream_BxTxNxD, phi_IxO, alpha_O, b_O, gain_D):
    return _forward(settings, stream_BxTxNxD, phi_IxO, alpha_O, b_O, gain_D)[0]


def _forward(settings, stream_BxTxNxD, *weights):
    *lead, n, d = stream_BxTxNxD.shape
    stream_TxNxD = stream_BxTxNxD.reshape(-1, n, d)
    x_TxD, post_NxT, res_PxT, out_OxT, scale_1xT = manifold_tpu.forward(stream_TxNxD, *weights, settings)
    maps = post_NxT.T.reshape(*lead, n), res_PxT.T.reshape(*lead, n, n)
    return (x_TxD.reshape(*lead, d), *maps), (stream_BxTxNxD, *weights, out_OxT, scale_1xT)


def _backward(settings, kept, cotangents):
    stream_BxTxNxD, *others = kept
    dx_BxTxD, dpost_BxTxN, dres_BxTxNxN = cotangents
    n, d = stream_BxTxNxD.shape[-2:]
    dstream_TxNxD, *of_weights = manifold_tpu.backward(
        *(stream_BxTxNxD.reshape(-1, n, d), *others),
        *(dx_BxTxD.reshape(-1, d), dpost_BxTxN.reshape(-1, n).T, dres_BxTxNxN.reshape(-1, n * n).T),
        settings,
    )
    return dstream_TxNxD.reshape(stream_BxTxNxD.shape), *of_weights


_fused.defvjp(_forward, _backward)
