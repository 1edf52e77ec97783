"""The tensors of mHC in a `deepseek_v4` checkpoint (transformers' `DeepseekV4ForCausalLM`) as our parameters.

Their norms hold the scale itself, ours the scale less one.
"""

from collections.abc import Iterator

import numpy as np

from grlab.errors import UsageError
from grlab.interop.public_config import PublicConfig
from grlab.interop.tensors import Tensor, TensorFolder
from grlab.residual.mhc import V4_EPS

MODEL_TYPES = ("deepseek_v4",)


def read_config(theirs: PublicConfig) -> tuple[dict[str, object], int, int, float]:
    """(`config.residual`, the layers, the width, the norms' eps); UsageError for what our mHC does not have."""
    hc_eps = theirs.get("hc_eps", float, default=V4_EPS)
    if hc_eps != V4_EPS:
        raise UsageError(f"{theirs.file}: hc_eps", hc_eps, f"this model has {V4_EPS} alone")
    fields = {
        "kind": "mhc",
        "form": "deepseek_v4",
        "streams": theirs.get("hc_mult", int, above=0),
        "iterations": theirs.get("hc_sinkhorn_iters", int, above=0),
    }
    layers, width = (theirs.get(name, int, above=0) for name in ("num_hidden_layers", "hidden_size"))
    return fields, layers, width, theirs.get("rms_norm_eps", float, above=0)


def residual(folder: TensorFolder, layers: int, d: int, n: int) -> Iterator[Tensor]:
    """mHC's maps of each site with the norm after them, and the head with the final norm."""
    prefix = "" if "norm.weight" in folder.shapes else "model."

    def cut(t):
        return np.split(t, [n, 2 * n])

    for k in range(2 * layers):
        block = "ffn" if k % 2 else "attn"
        layer = f"{prefix}layers.{k // 2}"

        def parts(*leaves, k=k):
            return tuple((("site", k, *leaf.split(".")), ()) for leaf in leaves)

        name = f"{layer}.hc_{block}"
        columns = n * n + 2 * n
        yield Tensor(
            f"{name}_fn",
            (columns, n * d),
            parts("phi_pre", "phi_post", "phi_res"),
            lambda t: [rows.T for rows in cut(t)],
        )
        yield Tensor(
            f"{name}_base",
            (columns,),
            parts("b_pre", "b_post", "b_res"),
            lambda t: [*cut(t)[:2], cut(t)[2].reshape(n, n)],
        )
        scales = parts("alpha_pre", "alpha_post", "alpha_res")
        yield Tensor(f"{name}_scale", (3,), scales, lambda t: [t[i : i + 1].reshape(()) for i in range(3)])
        yield Tensor(f"{layer}.{block}_norm.weight", (d,), parts("norm.gain"), lambda t: [t])
    head = f"{prefix}hc_head_" if f"{prefix}hc_head_fn" in folder.shapes else f"{prefix}hc_head.hc_"
    for theirs, leaf, shape, view in (
        ("fn", "phi_head", (n, n * d), lambda t: [t.T]),
        ("base", "head_b", (n,), lambda t: [t]),
        ("scale", "head_alpha", (1,), lambda t: [t.reshape(())]),
    ):
        yield Tensor(head + theirs, shape, ((("residual", leaf), ()),), view)
    yield Tensor(f"{prefix}norm.weight", (d,), ((("residual", "final_norm", "gain"), ()),), lambda t: [t])
