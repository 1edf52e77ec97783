"""Reference values for AltUp's predict and correct, from transformers' `Gemma3nTextAltUp`.

    pip install torch==2.13.0 transformers==5.24.0        # the CPU build of torch is enough
    python tests/goldens/make_altup.py                    # rewrites tests/goldens/altup_k3_d8.npz

Gemma3n makes its coefficients from the data, by a router. With the router's output held at a constant they are AltUp's
learned constants, p = I + coefficients and g = 1 + coefficients, and its two steps are the paper's. The layer between
them is <active block> + y, as any layer with a residual. Everything is in float64; the scalar that is differentiated
is <new, cot>.

    in/stream [B,T,K,D], in/y [B,T,D]; p [K,K], g [K]; cot [B,T,K,D]; new [B,T,K,D]; grad/stream, grad/y, grad/p, grad/g
"""

import pathlib
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from transformers.models.gemma3n import modeling_gemma3n

B, T, K, D, ACTIVE = 2, 2, 3, 8, 1


def main() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    config = SimpleNamespace(
        hidden_size=D, altup_num_inputs=K, rms_norm_eps=1e-6, altup_active_idx=ACTIVE, altup_coef_clip=None
    )
    module = modeling_gemma3n.Gemma3nTextAltUp(config)
    modalities = torch.randn(K)
    stream, y, cot = torch.randn(B, T, K, D), torch.randn(B, T, D), torch.randn(B, T, K, D)
    stream.requires_grad_(), y.requires_grad_()
    # The router's output is the constant; Linear layers with one free matrix each make p - I and g - 1 of it.
    p_less_i = (0.5 * torch.randn(K, K)).requires_grad_()
    g_less_1 = (0.5 * torch.randn(K)).requires_grad_()
    share = modalities / modalities.dot(modalities)
    constant = lambda x: modalities.expand(*x.shape[:-1], K)  # noqa: E731
    # coefficients = weight @ modalities, so weight = wanted ⊗ modalities / |modalities|²
    prediction = lambda m: m @ (p_less_i.reshape(-1, 1) * share).T  # noqa: E731
    correction = lambda m: m @ (g_less_1.reshape(-1, 1) * share).T  # noqa: E731
    with mock.patch.multiple(module, compute_router_modalities=constant):
        module._modules["prediction_coefs"], module._modules["correction_coefs"] = prediction, correction
        blocks = stream.permute(2, 0, 1, 3)
        predictions = module.predict(blocks)
        new = module.correct(predictions, blocks[ACTIVE] + y).permute(1, 2, 0, 3)
    (new * cot).sum().backward()
    arrays = {"in/stream": stream, "in/y": y, "cot": cot, "new": new, "p": torch.eye(K) + p_less_i, "g": 1 + g_less_1}
    grads = {"grad/stream": stream.grad, "grad/y": y.grad, "grad/p": p_less_i.grad, "grad/g": g_less_1.grad}
    path = pathlib.Path(__file__).parent / f"altup_k{K}_d{D}.npz"
    np.savez(path, active=ACTIVE, **{k: v.detach().numpy() for k, v in (arrays | grads).items()})
    print(path, f"p - I: {p_less_i.detach().abs().max():.2f}, g: {(1 + g_less_1).detach().numpy().round(2)}")


if __name__ == "__main__":
    main()
