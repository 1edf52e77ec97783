"""The gated delta rule, by chunks of tokens and token by token. arXiv 2412.06464.

    S_t = α_t S_{t−1} + k_t (β_t (v_t − (α_t S_{t−1})ᵀ k_t))ᵀ,   o_t = S_tᵀ q_t,   α = exp g

Dimensions: B batch, T time, H key heads, G value heads a key head, K and V channels of a key and of a value, C tokens
of a chunk, N chunks. Everything is float32. A document's state starts at zero: `documents_BxT`, which does not
decrease, says which document a token is of (None: one).
"""

import jax
import jax.numpy as jnp

from grlab.ops.streams import EXACT, F32


def recurrent(q_BxTxHxK, k_BxTxHxK, v_BxTxHxGxV, g_BxTxHxG, beta_BxTxHxG, documents_BxT=None) -> jax.Array:
    """The rule as it is written, one token after the other: [B, T, H, G, V]. The reference for `chunked`."""
    b, t, h, k = k_BxTxHxK.shape
    groups, v = v_BxTxHxGxV.shape[3:]
    documents_BxT = jnp.zeros((b, t), jnp.int32) if documents_BxT is None else documents_BxT
    goes_on_BxT = jnp.pad(documents_BxT[:, 1:] == documents_BxT[:, :-1], ((0, 0), (1, 0)))

    def step(s_BxHxGxKxV, token):
        q_BxHxK, k_BxHxK, v_BxHxGxV, g_BxHxG, beta_BxHxG, goes_on_B = token
        alpha_BxHxG = jnp.exp(g_BxHxG) * goes_on_B[:, None, None]
        s_BxHxGxKxV = alpha_BxHxG[..., None, None] * s_BxHxGxKxV
        known_BxHxGxV = jnp.einsum("bhgkv,bhk->bhgv", s_BxHxGxKxV, k_BxHxK, precision=EXACT)
        write_BxHxGxV = beta_BxHxG[..., None] * (v_BxHxGxV - known_BxHxGxV)
        s_BxHxGxKxV = s_BxHxGxKxV + k_BxHxK[:, :, None, :, None] * write_BxHxGxV[..., None, :]
        return s_BxHxGxKxV, jnp.einsum("bhgkv,bhk->bhgv", s_BxHxGxKxV, q_BxHxK, precision=EXACT)

    tokens = [x.astype(F32) for x in (q_BxTxHxK, k_BxTxHxK, v_BxTxHxGxV, g_BxTxHxG, beta_BxTxHxG, goes_on_BxT)]
    start = jnp.zeros((b, h, groups, k, v), F32)
    return jnp.moveaxis(jax.lax.scan(step, start, [jnp.moveaxis(x, 1, 0) for x in tokens])[1], 0, 1)


def chunked(q_BxTxHxK, k_BxTxHxK, v_BxTxHxGxV, g_BxTxHxG, beta_BxTxHxG, documents_BxT=None, chunk: int = 64):
    """The same by chunks: within one the writes depend on each other by a triangular system, solved for all chunks at
    once, and only the state goes from chunk to chunk (the UT transform of arXiv 2406.06484, with decay). `chunk` is a
    power of two."""
    b, t, h, k = k_BxTxHxK.shape
    n = -(-t // chunk)

    def chunks(x):  # [B, T, ..] -> [N, B, .., C, (last)]: the tokens behind the heads; what is padded writes nothing
        x = jnp.pad(x.astype(F32), [(0, 0), (0, n * chunk - t)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(b, n, chunk, *x.shape[2:]), 1, 0)

    q = jnp.moveaxis(chunks(q_BxTxHxK), 2, 3)[:, :, :, None]  # [N, B, H, 1, C, K]
    k_ = jnp.moveaxis(chunks(k_BxTxHxK), 2, 3)[:, :, :, None]
    v = jnp.moveaxis(chunks(v_BxTxHxGxV), 2, 4)  # [N, B, H, G, C, V]
    g, beta = (jnp.moveaxis(chunks(x), 2, 4) for x in (g_BxTxHxG, beta_BxTxHxG))  # [N, B, H, G, C]

    # The sums of g from the start of the chunk to each token, in two parts: of multiples of 1/16, whose sums and their
    # differences are exact, and of what is left. Differences of the sums themselves lose digits after strong decays.
    coarse = jax.lax.stop_gradient(jnp.round(16 * g) / 16)
    coarse, fine = jnp.cumsum(coarse, axis=-1), jnp.cumsum(g - coarse, axis=-1)
    earlier_CxC = jnp.tril(jnp.ones((chunk, chunk), bool))
    between = (coarse[..., :, None] - coarse[..., None, :]) + (fine[..., :, None] - fine[..., None, :])
    between = jnp.where(earlier_CxC, between, -jnp.inf)
    from_state, carried = jnp.exp(coarse + fine), jnp.exp(coarse[..., -1] + fine[..., -1])
    to_state = jnp.exp((coarse[..., -1:] - coarse) + (fine[..., -1:] - fine))
    if documents_BxT is not None:
        padded_BxT = jnp.pad(documents_BxT, ((0, 0), (0, n * chunk - t)), mode="edge")
        d = jnp.moveaxis(padded_BxT.reshape(b, n, chunk), 1, 0)[:, :, None, None]  # [N, B, 1, 1, C]
        before = jnp.concatenate([d[:1, ..., :1], d[:-1, ..., -1:]])  # of the token that the state comes from
        between = jnp.where(d[..., :, None] == d[..., None, :], between, -jnp.inf)
        from_state, to_state = from_state * (d == before), to_state * (d == d[..., -1:])
        carried = carried * (d[..., -1] == before[..., 0])
    between = jnp.exp(between)

    def spread(x):  # over the value heads: copies, since the gradient of a broadcast is a slow sum on a CPU
        return jnp.concatenate([x] * v.shape[3], axis=3)

    # What each token writes is v less what is known of it, from the state and from the writes before it in the chunk:
    # (I + A) write = β (v − from_state k S), A strictly lower. `own` is the solution for v, `known` for k.
    a = jnp.tril(beta[..., None] * spread(_product(k_, k_, True)) * between, -1)
    wanted = jnp.concatenate([beta[..., None] * v, (beta * from_state)[..., None] * spread(k_)], axis=-1)
    own, known = jnp.split(_product(unit_lower_inverse(a), wanted), [v.shape[-1]], axis=-1)
    inside = spread(_product(q, k_, True)) * between
    q_state, k_state = from_state[..., None] * spread(q), to_state[..., None] * spread(k_)

    def step(s, chunk_):
        own, known, inside, q_state, k_state, carried = chunk_
        write = own - _product(known, s)
        out = _product(q_state, s) + _product(inside, write)
        return carried[..., None, None] * s + _product(jnp.swapaxes(k_state, -1, -2), write), out

    start = jnp.zeros((*v.shape[1:4], k, v.shape[-1]), F32)
    out = jax.lax.scan(step, start, (own, known, inside, q_state, k_state, carried))[1]  # [N, B, H, G, C, V]
    out = jnp.moveaxis(jnp.moveaxis(out, 4, 2), 0, 1)  # [B, N, C, H, G, V]
    return out.reshape(b, n * chunk, *out.shape[3:])[:, :t]


@jax.custom_vjp
def unit_lower_inverse(a_CxC: jax.Array) -> jax.Array:
    """(I + A)⁻¹ for strictly lower triangular A [.., C, C], C a power of two.

    By blocks: [[P, 0], [R, Q]]⁻¹ = [[P⁻¹, 0], [−Q⁻¹ R P⁻¹, Q⁻¹]], doubled from rows of 8 that are substituted forwards.
    It is as stable as substitution, unlike the product of I + (−A)^(2^i), whose powers grow where the keys of a chunk
    are alike, and it is made of products of matrices, which a triangular solve is not on most devices.
    """
    c = a_CxC.shape[-1]
    size = min(8, c)
    starts = range(0, c, size)
    diagonal = jnp.stack([a_CxC[..., i : i + size, i : i + size] for i in starts], axis=-3)
    rows = [jnp.broadcast_to(jnp.eye(size)[0], diagonal.shape[:-1])]
    for i in range(1, size):
        above = sum(diagonal[..., i, j, None] * rows[j] for j in range(i))
        rows.append(jnp.eye(size)[i] - above)
    diagonal = jnp.stack(rows, axis=-2)
    blocks = [diagonal[..., i, :, :] for i in range(len(starts))]
    while len(blocks) > 1:
        pairs = []
        for i in range(0, len(blocks), 2):
            p, q = blocks[i : i + 2]
            r = a_CxC[..., (i + 1) * size : (i + 2) * size, i * size : (i + 1) * size]
            corner = -_product(q, _product(r, p))
            top = jnp.concatenate([p, jnp.zeros_like(corner)], axis=-1)
            pairs.append(jnp.concatenate([top, jnp.concatenate([corner, q], axis=-1)], axis=-2))
        blocks, size = pairs, 2 * size
    return blocks[0]


def _inverse_forward(a_CxC):
    inverse_CxC = unit_lower_inverse(a_CxC)
    return inverse_CxC, inverse_CxC


def _inverse_backward(inverse_CxC, cotangent_CxC):
    transposed_CxC = jnp.swapaxes(inverse_CxC, -1, -2)
    return (-jnp.tril(_product(transposed_CxC, _product(cotangent_CxC, transposed_CxC)), -1),)


unit_lower_inverse.defvjp(_inverse_forward, _inverse_backward)


def _product(a, b, transposed: bool = False):
    return jnp.matmul(a, jnp.swapaxes(b, -1, -2) if transposed else b, precision=EXACT)
