"""What the statements of attention and of sparse attention share: float64 NumPy, for reading rather than speed."""

import numpy as np

from tests.residual.statements import normalise, sigmoid, softmax


def rope(x_TxHxC, theta, turned, position_T):
    """Channels c and c + turned/2 are a complex number, turned by position · theta^(−2c / turned)."""
    half = turned // 2
    z = x_TxHxC[..., :half] + 1j * x_TxHxC[..., half:turned]
    z = z * np.exp(1j * np.multiply.outer(position_T, theta ** (-2 * np.arange(half) / turned)))[:, None]
    return np.concatenate([z.real, z.imag, x_TxHxC[..., turned:]], axis=-1)


def attention_heads(p, x_TxD, *, theta, turned, eps):
    """q [T, H, C], k and v [T, K, C]."""
    q, k, v = (np.einsum("td,dhc->thc", x_TxD, p[name]) for name in ("query", "key", "value"))
    q, k = (normalise(x, eps) * (1 + p[f"{name}_gain"]) for x, name in ((q, "query"), (k, "key")))
    position_T = np.arange(len(x_TxD))
    return rope(q, theta, turned, position_T), rope(k, theta, turned, position_T), v


def attend(q_HxC, k_TxKxC, v_TxKxC, seen):
    """(the heads' outputs [H, C] of one query over the tokens `seen`, its weights [H, seen])."""
    h, c = q_HxC.shape
    groups = h // k_TxKxC.shape[1]  # of neighbouring heads
    weights = [softmax(k_TxKxC[seen, i // groups] @ q_HxC[i] / np.sqrt(c)) for i in range(h)]
    return np.stack([w @ v_TxKxC[seen, i // groups] for i, w in enumerate(weights)]), np.stack(weights)


def attention_output(p, x_TxD, out_TxHxC):
    if "output_gate" in p:
        out_TxHxC = out_TxHxC * sigmoid(np.einsum("td,dhc->thc", x_TxD, p["output_gate"]))
    return np.einsum("thc,hcd->td", out_TxHxC, p["output"])
