"""Reference values for the residual systems, from code that is not this project's: transformers' own modules.

    pip install torch==2.13.0 transformers==5.24.0        # the CPU build of torch is enough; 6 s to run
    python tests/goldens/make_goldens.py                  # rewrites tests/goldens/{gr,mhc}_*.npz

The tests read only the .npz files, so neither package is needed to run them. Regenerate only when a case is added or
changed: with the versions above the files come out the same.

Each file is one decoder layer of `qwen4_exp` (GR) or `deepseek_v4` (mHC), with the attention and the FFN replaced by
constants: they record the input that the residual connection hands them and return a given y. So the read, the write
and their order in the layer are transformers' code, and only the sublayers are ours. The layer is followed by the
model's collapse. The scalar that is differentiated is <x0, cot/x0> + <x1, cot/x1> + <stream2, cot/stream> + <collapse,
cot/collapse>.

    in/stream [B,T,N,D]; in/y0, in/y1 [B,T,D]             the stream before the layer, the two sublayers' outputs
    param/NAME                                            transformers' names and layouts (torch: [out, in])
    cot/x0, cot/x1, cot/collapse [B,T,D]; cot/stream      the cotangents
    RUN/x0, RUN/stream1, RUN/x1, RUN/stream2, RUN/collapse         for RUN in f32, f64, bf16
    grad/NAME, grad/stream, grad/y0, grad/y1              of the f64 run, stored as float32
    meta                                                  JSON: versions, shapes, seed, eps, the largest error of f32

f64 is the truth: the same modules with everything that they cast to float32 left in float64. bf16 runs the modules as
transformers would (GR: parameters and arithmetic in bf16; mHC: parameters and maps float32, streams bf16). Inputs,
parameters and cotangents are all representable in bf16, so that the three runs are of the same function at one point.
f32's own gradients are not kept, only how far they and its values are from f64's: max|a - b| / max|b|, the worst array.
"""

import json
import pathlib
import platform
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import transformers
from transformers.models.deepseek_v4 import configuration_deepseek_v4, modeling_deepseek_v4
from transformers.models.qwen4_exp import configuration_qwen4_exp, modeling_qwen4_exp

B, T = 2, 2
# n streams, width d, rank r, scale of the streams, seed. At a scale of 2e-3 the norm's eps of 1e-6 is a fifth of the
# mean square. Seeds are such that no scalar's gradient is a sum that cancels: f32 keeps within 1e-6 of f64.
CASES = [(4, 32, 8, 1.0, 16), (2, 24, 5, 4.0, 1), (3, 16, 4, 2e-3, 16)]
QWEN = configuration_qwen4_exp.Qwen4ExpTextConfig
DEEPSEEK = configuration_deepseek_v4.DeepseekV4Config


class Constant(torch.nn.Module):
    """A sublayer that keeps its input and returns the given output, in the form that the layer expects."""

    def __init__(self, y: torch.Tensor, returns_weights: bool):
        super().__init__()
        self.y, self.returns_weights = y, returns_weights

    def forward(self, x: torch.Tensor, *_args, **_kwargs):
        self.x = x
        return (self.y, None) if self.returns_weights else self.y


def bare(cls: type, **modules) -> torch.nn.Module:
    """An instance of `cls` that has only `modules`: its own constructor would build attention and experts."""
    layer = cls.__new__(cls)
    torch.nn.Module.__init__(layer)
    for name, module in modules.items():
        setattr(layer, name, module)
    return layer


class GR(torch.nn.Module):
    """Two `Qwen4ExpTextGatedResidual` in a layer and the one that ends the model."""

    def __init__(self, n: int, d: int, r: int):
        super().__init__()
        config = SimpleNamespace(hc_count=n, hidden_size=d, hc_lowrank=r, rms_norm_eps=QWEN.rms_norm_eps)
        block = modeling_qwen4_exp.Qwen4ExpTextGatedResidual
        self.attn_hyper_connection = block(config)
        self.mlp_hyper_connection = block(config)
        self.hyper_connection_mixer = block(config, use_combine=False)
        self.second = self.mlp_hyper_connection

    def scale(self, name: str, n: int, d: int, r: int) -> float:
        """Standard deviations that put the logits of every gate at about 2."""
        return {
            "hc_norm": 1.0,
            "input_mix_weight_down": 1.5 * n / (n * d) ** 0.5,
            "input_mix_weight_up": 2 / r**0.5,
            "block_inject_weight": 1.5 * n / (n * d) ** 0.5,
        }[name.split(".")[1]]

    def run(self, stream: torch.Tensor, attention: Constant, ffn: Constant) -> tuple[torch.Tensor, torch.Tensor]:
        layer = bare(
            modeling_qwen4_exp.Qwen4ExpTextDecoderLayer,
            attn_hyper_connection=self.attn_hyper_connection,
            mlp_hyper_connection=self.mlp_hyper_connection,
            self_attn=attention,
            mlp=ffn,
        )
        layer.layer_type, layer.ple = "full_attention", None
        out = layer.forward(stream.flatten(-2), position_embeddings=None)
        return out, self.hyper_connection_mixer(out)


class MHC(torch.nn.Module):
    """Two `DeepseekV4HyperConnection` with the pre-norms of their layer, the head and the final norm."""

    def __init__(self, n: int, d: int, r: int):
        super().__init__()
        config = SimpleNamespace(
            hc_mult=n, hidden_size=d, rms_norm_eps=DEEPSEEK.rms_norm_eps,
            hc_eps=DEEPSEEK.hc_eps, hc_sinkhorn_iters=DEEPSEEK.hc_sinkhorn_iters,
        )  # fmt: skip
        norm = modeling_deepseek_v4.DeepseekV4RMSNorm
        self.attn_hc = modeling_deepseek_v4.DeepseekV4HyperConnection(config)
        self.ffn_hc = modeling_deepseek_v4.DeepseekV4HyperConnection(config)
        self.hc_head = modeling_deepseek_v4.DeepseekV4HyperHead(config)
        self.input_layernorm = norm(d, eps=config.rms_norm_eps)
        self.post_attention_layernorm = norm(d, eps=config.rms_norm_eps)
        self.norm = norm(d, eps=config.rms_norm_eps)
        self.second = self.ffn_hc

    def scale(self, name: str, n: int, d: int, r: int) -> float:
        """Standard deviations that put the logits of every map at about 1.5: H_res is asymmetric and not converged."""
        return 1.0 / (n * d) ** 0.5 if name.endswith("fn") else 1.0

    def run(self, stream: torch.Tensor, attention: Constant, ffn: Constant) -> tuple[torch.Tensor, torch.Tensor]:
        layer = bare(
            modeling_deepseek_v4.DeepseekV4DecoderLayer,
            attn_hc=self.attn_hc,
            ffn_hc=self.ffn_hc,
            input_layernorm=self.input_layernorm,
            post_attention_layernorm=self.post_attention_layernorm,
            self_attn=attention,
            mlp=ffn,
        )
        out = layer.forward(stream)
        return out, self.norm(self.hc_head(out))


def run(system: GR | MHC, values: dict[str, torch.Tensor], dtype: torch.dtype, backward: bool) -> dict[str, np.ndarray]:
    """One run at `dtype`; `values` are the inputs, parameters and cotangents of the file."""
    leaves = {k: values[f"in/{k}"].detach().to(dtype).requires_grad_() for k in ("stream", "y0", "y1")}
    attention, ffn = Constant(leaves["y0"], returns_weights=True), Constant(leaves["y1"], returns_weights=False)
    between = {}
    hook = system.second.register_forward_pre_hook(lambda _, args: between.update(stream1=args[0]))
    stream, collapse = system.run(leaves["stream"], attention, ffn)
    hook.remove()
    shape = leaves["stream"].shape
    out = {
        "x0": attention.x,
        "stream1": between["stream1"].reshape(shape),
        "x1": ffn.x,
        "stream2": stream.reshape(shape),
        "collapse": collapse,
    }
    saved = {k: v.detach() for k, v in out.items()}
    if backward:
        pairs = [("x0", "x0"), ("x1", "x1"), ("stream2", "stream"), ("collapse", "collapse")]
        system.zero_grad()
        sum((out[k] * values[f"cot/{c}"].to(dtype)).sum() for k, c in pairs).backward()
        saved |= {f"grad/{k}": v.grad for k, v in (leaves | dict(system.named_parameters())).items()}
    return {k: (v.float() if v.dtype == torch.bfloat16 else v).numpy() for k, v in saved.items()}


def golden(kind: str, n: int, d: int, r: int, scale: float, seed: int) -> dict[str, np.ndarray]:
    """The arrays of one file."""
    rng = np.random.default_rng(seed)

    def draw(std: float, *shape: int) -> torch.Tensor:
        return torch.from_numpy(std * rng.standard_normal(shape)).bfloat16().float()

    system = {"gr": GR, "mhc": MHC}[kind](n, d, r)
    # Streams of unequal size, so that a norm over one stream and a norm over all of them differ.
    size_N = torch.from_numpy(scale * 2.0 ** np.linspace(-1, 1, n))[:, None]
    values = {"in/stream": (draw(1.0, B, T, n, d) * size_N).bfloat16().float()}
    values |= {f"in/{k}": draw(scale, B, T, d) for k in ("y0", "y1")}
    values |= {f"cot/{k}": draw(1.0, B, T, d) for k in ("x0", "x1", "collapse")}
    values["cot/stream"] = draw(1.0 / scale, B, T, n, d)
    with torch.no_grad():
        for name, p in system.named_parameters():
            p.copy_(draw(system.scale(name, n, d, r), *p.shape))
            values[f"param/{name}"] = p.clone()

    runs = {"f32": run(system, values, torch.float32, backward=True)}
    with (
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
        mock.patch.object(torch, "float32", torch.float64),
    ):
        runs["f64"] = run(system.double(), values, torch.float64, backward=True)
    assert all(v.dtype == np.float64 for v in runs["f64"].values())
    system = system.bfloat16() if kind == "gr" else system.float()
    runs["bf16"] = run(system, values, torch.bfloat16, backward=False)

    error = {k: float(np.abs(v - runs["f64"][k]).max() / np.abs(runs["f64"][k]).max()) for k, v in runs["f32"].items()}
    meta = {
        "kind": kind, "streams": n, "width": d, "rank": r, "seed": seed, "norm_eps": QWEN.rms_norm_eps,
        "torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__,
        "python": platform.python_version(), "max_relative_error_of_f32": max(error.values()),
    }  # fmt: skip
    arrays = {k: v.numpy() for k, v in values.items()}
    for name, saved in runs.items():
        arrays |= {f"{name}/{k}": v for k, v in saved.items() if not k.startswith("grad/")}
    arrays |= {k: v.astype(np.float32) for k, v in runs["f64"].items() if k.startswith("grad/")}
    return arrays | {"meta": np.array(json.dumps(meta))}


def main() -> None:
    assert QWEN.rms_norm_eps == DEEPSEEK.rms_norm_eps
    torch.set_num_threads(1)
    for kind in ("gr", "mhc"):
        for n, d, r, scale, seed in CASES:
            path = pathlib.Path(__file__).with_name(f"{kind}_n{n}_d{d}.npz")
            arrays = golden(kind, n, d, r, scale, seed)
            np.savez_compressed(path, **arrays)
            print(path.name, path.stat().st_size, json.loads(str(arrays["meta"]))["max_relative_error_of_f32"])


if __name__ == "__main__":
    main()
