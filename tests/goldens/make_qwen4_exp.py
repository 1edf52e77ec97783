"""Tiny random checkpoints and what transformers makes of them: whole `qwen4_exp` models, and `deepseek_v4` for its mHC.

    pip install torch==2.13.0 transformers==5.24.0        # the CPU build of torch is enough; 1 minute to run
    python tests/goldens/make_qwen4_exp.py                # rewrites tests/goldens/{qwen4_exp_hc[34],deepseek_v4_hc}/

The tests read only the files, so neither package is needed to run them. Regenerate only when a case is added or
changed: with the versions above the files come out the same.

Each folder is a checkpoint as `save_pretrained` writes it (config.json, several safetensors shards, their index) and an
expected.npz, computed after the checkpoint has been read back. Parameters, arithmetic and arrays are float32, attention
and experts are the eager ones, and there is no cache.

qwen4_exp_hc4 and qwen4_exp_hc3 have every part of the model active: Gated DeltaNet and QSA layers, experts with a
shared one, GR, per-layer n-gram embeddings. L layers, B sequences of T tokens, P positions, N streams of width D.
hc3 has other numbers than hc4 in config.json, two n-gram modules, a last n-gram shard that is shorter, and more than
ten experts and n-gram shards, whose order by name is not their order by number.

    tokens [B,T]                     end-of-sequence tokens lie within the sequences: n-grams do not reach across them
    logits [B,T,V]
    positions [P]                    every 7th and the last: where `streams` and `collapsed` are taken
    streams [L,B,P,N*D]              after each decoder layer
    collapsed [B,P,D]                the streams after GR has collapsed them: the input of lm_head
    balance [L]                      the load balancing loss of each layer alone
    f64_error                        of the logits, from the same model in float64: max|a - b| / max|b|
    meta                             JSON: versions, seed, sizes, what the checks found

What is discrete is far from a tie, so that rounding cannot change it: see `margins`. Every parameter tensor changes the
logits: see `sensitivity`.

deepseek_v4_hc has, for each call of an mHC module of the model, MODULE/ARRAY with MODULE as layers.0.attn_hc,
layers.0.ffn_hc or hc_head:

    tokens [B,T]
    MODULE/stream [B,T,N,D]          what it is given
    MODULE/collapsed [B,T,D]         what it reads from the streams, before the sublayer's norm
    MODULE/post [B,T,N]              what of the sublayer's output it adds to each stream (not for hc_head)
    MODULE/comb [B,T,N,N]            how it mixes the streams, [from, to] (not for hc_head)
    meta
"""

import collections
import contextlib
import copy
import json
import math
import pathlib
import platform
import shutil
from unittest import mock

import numpy as np
import torch
import transformers
from transformers.models.deepseek_v4 import configuration_deepseek_v4, modeling_deepseek_v4
from transformers.models.qwen4_exp import configuration_qwen4_exp, modeling_qwen4_exp

HERE = pathlib.Path(__file__).parent
EOS = 1
T = 101  # a multiple neither of DeltaNet's chunk of 64, nor of the blocks of QSA
# Ends of sequences: two in a row, next to DeltaNet's chunk boundary, as the first token and as the last.
EOS_AT = [(5, 6, 30, 63, 64, 90), (0, 17, 41, 43, 72, 100)]
MARGIN = 2e-4  # relative; a hundred times the error of float32

# Widths are such that no matrix is square, and rows of the experts' are of 16 bytes, which torch's grouped product
# needs. Seeds are the first from 0 for which `margins` finds every choice clear.
CASES = {
    "qwen4_exp_hc4": {
        "seed": 5,
        "max_shard_size": "90KB",
        "config": dict(
            vocab_size=64,
            hidden_size=16,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
            indexer_n_heads=4,
            indexer_kv_heads=1,
            indexer_head_dim=8,
            indexer_budget=8,
            indexer_compress_ratio=4,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            linear_conv_kernel_dim=4,
            output_gate_type="sigmoid",
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=4,
            shared_expert_intermediate_size=8,
            hc_count=4,
            hc_lowrank=5,
            ple_layer_ids=[2],
            ple_embed_dim=32,
            ple_conv_kernel_size=4,
            ngram_size=3,
            heads_per_ngram=2,
            ngram_vocab_size_base=40,
            make_ngram_vocab_size_divisible_by=8,
            split_ngram_parts=4,
            eos_token_id=EOS,
            max_position_embeddings=256,
        ),
    },
    "qwen4_exp_hc3": {
        "seed": 0,
        "max_shard_size": "70KB",
        "config": dict(
            vocab_size=64,
            hidden_size=20,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e3,
                "partial_rotary_factor": 0.25,
                "mrope_section": [1, 1, 0],
                "mrope_interleaved": True,
            },
            rms_norm_eps=1e-3,
            indexer_n_heads=3,
            indexer_kv_heads=1,
            indexer_head_dim=10,
            indexer_budget=12,
            indexer_compress_ratio=3,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=6,
            linear_conv_kernel_dim=3,
            output_gate_type="sigmoid",
            num_experts=12,
            num_experts_per_tok=3,
            moe_intermediate_size=8,
            shared_expert_intermediate_size=12,
            hc_count=3,
            hc_lowrank=6,
            ple_layer_ids=[1, 3],
            ple_embed_dim=24,
            ple_conv_kernel_size=3,
            ngram_size=2,
            heads_per_ngram=4,
            ngram_vocab_size_base=40,
            make_ngram_vocab_size_divisible_by=8,
            split_ngram_parts=11,
            seed=99,
            eos_token_id=EOS,
            max_position_embeddings=256,
        ),
    },
}
DEEPSEEK = {
    "seed": 0,
    "max_shard_size": "40KB",
    "config": dict(
        vocab_size=32,
        hidden_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=3,
        num_attention_heads=4,
        head_dim=8,
        q_lora_rank=8,
        o_groups=2,
        o_lora_rank=4,
        partial_rotary_factor=0.5,
        n_routed_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        mlp_layer_types=["hash_moe", "moe", "moe"],
        compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        sliding_window=4,
        index_n_heads=2,
        index_head_dim=8,
        index_topk=2,
        hc_mult=4,
        max_position_embeddings=64,
    ),
}
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}


def versions() -> dict[str, str]:
    return {
        "torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__,
        "python": platform.python_version(),
    }  # fmt: skip


def draw(name: str, shape: torch.Size, config, rng: np.random.Generator) -> np.ndarray:
    """A value for the parameter of `Qwen4ExpForCausalLM` of this name."""
    module, leaf = name.split(".")[-2:]
    if leaf == "A_log":
        return np.log(rng.uniform(0.5, 16, shape))
    if leaf == "dt_bias":  # softplus of it is in 0.001..0.1: some heads remember a few tokens, some all of them
        dt = np.exp(rng.uniform(math.log(1e-3), math.log(1e-1), shape))
        return dt + np.log(-np.expm1(-dt))
    if "norm" in module:
        center = 1.0 if "linear_attn.norm" in name else 0.0  # the others are held less one
        return center + rng.uniform(-0.3, 0.3, shape)
    if module in ("embed_tokens", "ngram_embedding"):
        return rng.standard_normal(shape)
    # GR divides the products of the gates' weights by the number of streams, and the logits are to have a standard
    # deviation of 1. The sublayers' inputs are means of gated streams, about half as large as a norm's output.
    gain = {
        "input_mix_weight_down": 1.6 * config.hc_count,
        "input_mix_weight_up": 1.0,
        "block_inject_weight": config.hc_count,
        "gate": 4.0,
        "shared_expert_gate": 2.0,
    }.get(module, 1.0)
    return gain / shape[-1] ** 0.5 * rng.standard_normal(shape)


def random_model(name: str, seed: int) -> tuple[torch.nn.Module, torch.Tensor]:
    """The case's model and tokens, drawn with `seed`."""
    config = configuration_qwen4_exp.Qwen4ExpTextConfig(**CASES[name]["config"], **EAGER)
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, config.vocab_size - 1, (len(EOS_AT), T))
    tokens += tokens >= EOS  # all but the end of a sequence, which lies where it is put
    for row, at in zip(tokens, EOS_AT, strict=True):
        row[list(at)] = EOS
    model = modeling_qwen4_exp.Qwen4ExpForCausalLM(config).eval()
    with torch.no_grad():
        for path, p in model.named_parameters():
            p.copy_(torch.from_numpy(draw(path, p.shape, config, rng)))
    return model, torch.from_numpy(tokens)


@torch.no_grad()
def run(model: torch.nn.Module, tokens: torch.Tensor) -> dict:
    """A forward pass: the logits and, of each layer in order, all that the arrays and the checks need.

    scores has, for each query of each QSA layer with more complete blocks than it may keep, their scores and that
    number; selected the layers' masks [B,T,T].
    """
    seen, hooks = collections.defaultdict(list), []

    def on(kind: type | str, see) -> None:
        for path, module in model.named_modules():
            if path.endswith(kind) if isinstance(kind, str) else isinstance(module, kind):
                hooks.append(module.register_forward_hook(see))

    hc = model.config.hc_count
    on(modeling_qwen4_exp.Qwen4ExpTextDecoderLayer, lambda m, args, out: seen["streams"].append(out))
    on(modeling_qwen4_exp.Qwen4ExpTextTopKRouter, lambda m, args, out: seen["router"].append(out[0]))
    on(modeling_qwen4_exp.Qwen4ExpTextQSAIndexer, lambda m, args, out: seen["selected"].append(out[:, 0]))
    on("input_mix_weight_up", lambda m, args, out: seen["read_logits"].append(out))
    on("block_inject_weight", lambda m, args, out: seen["write_logits"].append(out / hc))
    on("ngram_embedding", lambda m, args, out: seen["rows"].append(args[0]))
    on("norm_key", lambda m, args, out: seen["keys"].append(out.unflatten(-1, (hc, -1))))
    on("norm_query", lambda m, args, out: seen["queries"].append(out.unflatten(-1, (hc, -1))))
    on("lm_head", lambda m, args, out: seen.update(collapsed=args[0]))
    for layer in model.model.layers:
        if layer.layer_type == "linear_attention":
            d = layer.linear_attn
            see = lambda m, args, out, d=d: seen["decay"].append(  # noqa: E731
                -d.A_log.exp() * torch.nn.functional.softplus(out + d.dt_bias)
            )
            hooks.append(d.in_proj_a.register_forward_hook(see))
    topk = torch.Tensor.topk

    def ranked(scores: torch.Tensor, k: int, **kwargs):
        """`Tensor.topk`, which only the indexer calls: the router calls `torch.topk`."""
        assert scores.ndim == 1, scores.shape
        if len(scores) > k:
            seen["scores"].append((scores, k))
        return topk(scores, k, **kwargs)

    try:
        with mock.patch.object(torch.Tensor, "topk", ranked):
            seen["logits"] = model(tokens, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    return seen


@contextlib.contextmanager
def in_float64(model: torch.nn.Module):
    """A copy of the model in float64, in which a cast to float32 is one to float64."""
    model = copy.deepcopy(model).double()
    with (
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch, "float", torch.float64),
    ):
        rotary = model.model.rotary_emb
        rotary.inv_freq = rotary.compute_default_rope_parameters(model.config)[0]
        yield model


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def margins(seen: dict, top_k: int) -> dict[str, float]:
    """The smallest relative gap between the last one chosen and the first one not: experts, and QSA's blocks.

    With them the smallest product of key and query in the n-gram layers, which take its root and keep its sign.
    """
    probabilities = torch.cat(seen["router"]).softmax(-1).sort(-1, descending=True).values
    last, first_out = probabilities[:, top_k - 1], probabilities[:, top_k]
    experts = float((1 - first_out / last).min())
    blocks = 1.0
    for scores, k in seen["scores"]:
        ranked = scores.sort(descending=True).values
        # A score is a sum of rectified terms: where the last one chosen is 0, it ties with all that follow.
        blocks = min(blocks, float(1 - ranked[k] / ranked[k - 1]) if ranked[k - 1] > 0 else 0.0)
    pairs = zip(seen["keys"], seen["queries"], strict=True)
    gate = min(float((k * q).sum(-1).abs().min()) / k.shape[-1] ** 0.5 for k, q in pairs)
    return {"margin_of_experts": experts, "margin_of_blocks": blocks, "smallest_ngram_gate": gate}


def sensitivity(model: torch.nn.Module, tokens: torch.Tensor, seen: dict, rng: np.random.Generator) -> dict[str, float]:
    """How much the logits change, relatively, when 0.05 * normal is added to one parameter tensor: the smallest change.

    The indexer's parameters only choose, and that is what is counted for them: the entries of the masks [B,T,T], key
    kept for query or not, that become others.
    """
    changes, choices = {}, {}
    for name, p in model.named_parameters():
        kept = p.detach().clone()
        with torch.no_grad():
            p.add_(0.05 * torch.from_numpy(rng.standard_normal(p.shape)).float())
            other = run(model, tokens)
            p.copy_(kept)
        changes[name] = relative(other["logits"], seen["logits"])
        if ".indexer." in name:
            pairs = zip(other["selected"], seen["selected"], strict=True)
            choices[name] = sum(int((a != b).sum()) for a, b in pairs)
    for name, n in choices.items():
        print(f"    {name}: {n} selections change, the logits by {changes[name]:.1e}")
        assert n > 0, name
    continuous = {name: change for name, change in changes.items() if name not in choices}
    least = sorted(continuous, key=continuous.get)
    print(f"    of {len(continuous)} other tensors the least: " + ", ".join(f"{n} {changes[n]:.1e}" for n in least[:3]))
    assert continuous[least[0]] > 1e-4, least[0]
    return {"least_change": continuous[least[0]], "least_selections_changed": min(choices.values())}


def check(model: torch.nn.Module, tokens: torch.Tensor, seen: dict) -> dict[str, float]:
    """That every part of the model matters for the logits; the figures of that."""
    config = model.config
    found = margins(seen, config.num_experts_per_tok)
    assert min(found.values()) > MARGIN, found

    # Every query keeps as many of the complete blocks before it as it may, and all that is in none.
    ratio, budget = config.indexer_compress_ratio, config.indexer_budget
    visible = torch.arange(1, T + 1)
    kept = torch.minimum(visible // ratio * ratio, torch.tensor(budget)) + visible % ratio
    for mask in seen["selected"]:
        assert (mask.sum(-1) == kept).all()
    assert kept[-1] < T / 4, kept[-1]
    found["keys_kept_by_the_last_query"] = int(kept[-1])
    with mock.patch.object(modeling_qwen4_exp.Qwen4ExpTextQSAIndexer, "forward", _all_visible):
        found["change_without_qsa"] = relative(run_logits(model, tokens), seen["logits"])
    with mock.patch.object(modeling_qwen4_exp.Qwen4ExpTextNGramEmbedding, "_shift_right_ignore_eos", _across_ends):
        found["change_with_ngrams_across_ends"] = relative(run_logits(model, tokens), seen["logits"])
    assert found["change_without_qsa"] > 1e-2, found
    # The end of a sequence is all that a bigram after it could see, and it does see it: only longer ones stop there.
    assert (found["change_with_ngrams_across_ends"] > 1e-2) == (config.ngram_size > 2), found

    for logits in seen["router"]:
        used = logits.topk(config.num_experts_per_tok).indices.unique()
        assert len(used) == config.num_experts, f"of {config.num_experts} experts some are not used: {used}"
    for module in model.modules():
        if isinstance(module, modeling_qwen4_exp.Qwen4ExpTextNGramEmbedding):
            rows = len(module.ngram_embedding.weight)
            part = -(-rows // config.split_ngram_parts)  # as torch.chunk cuts it
            assert -(-rows // part) == config.split_ngram_parts, "a table is cut into fewer parts than config.json says"
            used = seen["rows"][module.ple_layer_index].unique() // part
            assert len(used.unique()) == config.split_ngram_parts, "of an n-gram table some part is not used"
    # The state that DeltaNet carries over the boundary of a chunk: what is left at the last token of the first chunk.
    left = [decay[:, 64:].sum(1).exp().max() for decay in seen["decay"]]
    assert min(left) > 1e-2, left
    found["deltanet_state_left"] = float(min(left))
    for key in ("read_logits", "write_logits"):
        std = [float(logits.std()) for logits in seen[key]]
        assert 0.5 < min(std) and max(std) < 2, (key, std)
        found[f"std_of_{key}"] = [min(std), max(std)]
    found["std_of_router_logits"] = [float(f(x.std() for x in seen["router"])) for f in (min, max)]
    return found


def _all_visible(self, hidden_states: torch.Tensor, position_embeddings, attention_mask: torch.Tensor, cache):
    return (attention_mask == 0).expand(len(hidden_states), -1, -1, -1)


def _across_ends(self, tokens: torch.Tensor, shift: int) -> torch.Tensor:
    return torch.nn.functional.pad(tokens, (shift, 0), value=EOS)[:, : tokens.shape[1]]


@torch.no_grad()
def run_logits(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens, use_cache=False).logits


def save(model: torch.nn.Module, folder: pathlib.Path, max_shard_size: str, least_shards: int) -> torch.nn.Module:
    """Writes the checkpoint and returns the model that is read from it, which must be the same."""
    shutil.rmtree(folder, ignore_errors=True)  # a shard of a former run would be one too many
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    shards = list(folder.glob("*.safetensors"))
    assert len(shards) >= least_shards, shards
    read, info = type(model).from_pretrained(folder, **EAGER, output_loading_info=True)
    assert not any(info.values()), info
    state, state_read = model.state_dict(), read.state_dict()
    assert state.keys() == state_read.keys()
    assert all(torch.equal(v, state_read[k]) for k, v in state.items())
    assert all(p.dtype == torch.float32 for p in read.parameters())
    return read.eval()


def write(folder: pathlib.Path, arrays: dict[str, np.ndarray], meta: dict) -> None:
    np.savez_compressed(folder / "expected.npz", **arrays, meta=np.array(json.dumps(versions() | meta)))
    for path in sorted(folder.iterdir()):
        print(f"  {path.stat().st_size:7} {path.name}")
    print(f"  {sum(path.stat().st_size for path in folder.iterdir()):7} in all; {json.dumps(meta)}")


def qwen4_exp(name: str) -> None:
    case, folder = CASES[name], HERE / name
    print(name)
    model, tokens = random_model(name, case["seed"])
    model = save(model, folder, case["max_shard_size"], least_shards=3)
    config = model.config
    seen = run(model, tokens)
    found = check(model, tokens, seen)
    found |= sensitivity(model, tokens, seen, np.random.default_rng(case["seed"]))
    with in_float64(model) as model_f64:
        seen_f64 = run(model_f64, tokens)
    assert seen_f64["logits"].dtype == torch.float64
    for key in ("streams", "router", "scores"):  # no cast between has made it float32 again
        values = [x[0] if key == "scores" else x for x in seen_f64[key]]
        assert all(x.dtype == torch.float64 for x in values), key
    assert all(torch.equal(a, b) for a, b in zip(seen["selected"], seen_f64["selected"], strict=True))
    error = relative(seen["logits"].double(), seen_f64["logits"])
    streams = [relative(a.double(), b) for a, b in zip(seen["streams"], seen_f64["streams"], strict=True)]
    assert max(error, *streams) < MARGIN / 50, (error, streams)

    positions = np.array(sorted({*range(0, T, 7), T - 1}))
    balance = [
        modeling_qwen4_exp.load_balancing_loss_func((logits,), config.num_experts, config.num_experts_per_tok)
        for logits in seen["router"]
    ]
    arrays = {
        "tokens": tokens.numpy().astype(np.int32),
        "logits": seen["logits"].numpy(),
        "positions": positions.astype(np.int32),
        "streams": torch.stack(seen["streams"])[:, :, positions].numpy(),
        "collapsed": seen["collapsed"][:, positions].numpy(),
        "balance": torch.stack(balance).numpy(),
    }
    assert all(v.dtype == np.float32 for k, v in arrays.items() if k not in ("tokens", "positions"))
    sizes = {k: list(v.shape) for k, v in arrays.items()}
    meta = {"kind": name, "seed": case["seed"], "sizes": sizes, "f64_error_of_streams": max(streams), "checks": found}
    write(folder, arrays | {"f64_error": np.array(error)}, meta | {"f64_error": error})


def deepseek_v4() -> None:
    folder, rng = HERE / "deepseek_v4_hc", np.random.default_rng(DEEPSEEK["seed"])
    print(folder.name)
    config = configuration_deepseek_v4.DeepseekV4Config(**DEEPSEEK["config"], **EAGER)
    tokens = torch.from_numpy(rng.integers(0, config.vocab_size, (2, 9)))
    model = modeling_deepseek_v4.DeepseekV4ForCausalLM(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            module = name.split(".")[-2]
            if "norm" in module:
                value = 1 + rng.uniform(-0.3, 0.3, p.shape)
            else:  # of the maps too: logits of about 1, so that H_res is not symmetric, and has not converged
                gain = 1.0 if p.ndim == 1 or module == "embed_tokens" else p.shape[-1] ** -0.5
                value = rng.uniform(0.7, 1.3, p.shape) if "scale" in name else gain * rng.standard_normal(p.shape)
            p.copy_(torch.from_numpy(value))
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                experts = [rng.permutation(config.n_routed_experts)[: buffer.shape[1]] for _ in range(len(buffer))]
                buffer.copy_(torch.from_numpy(np.stack(experts)))
            elif name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.from_numpy(rng.standard_normal(buffer.shape)))
    model = save(model, folder, DEEPSEEK["max_shard_size"], least_shards=2)

    arrays, hooks = {"tokens": tokens.numpy().astype(np.int32)}, []
    kinds = (modeling_deepseek_v4.DeepseekV4HyperConnection, modeling_deepseek_v4.DeepseekV4HyperHead)
    returned = ("post", "comb", "collapsed")
    for name, module in model.model.named_modules():
        if isinstance(module, kinds):

            def see(module, args, out, name=name):
                values = {"collapsed": out} if name == "hc_head" else dict(zip(returned, out, strict=True))
                arrays.update({f"{name}/{k}": v.numpy() for k, v in ({"stream": args[0]} | values).items()})

            hooks.append(module.register_forward_hook(see))
    run_logits(model, tokens)
    for hook in hooks:
        hook.remove()
    assert len(hooks) == 2 * config.num_hidden_layers + 1
    assert all(v.dtype == np.float32 for k, v in arrays.items() if k != "tokens")
    # The streams start as copies of one another: that they differ after a layer is what mixing can be seen by.
    spread = arrays["layers.0.ffn_hc/stream"].std(2).mean()
    combs = [v for k, v in arrays.items() if k.endswith("/comb")]
    asymmetry = min(np.abs(v - v.swapaxes(-1, -2)).mean() for v in combs)
    assert spread > 0.1 and asymmetry > 0.05, (spread, asymmetry)
    sizes = {k: list(v.shape) for k, v in arrays.items()}
    checks = {"spread_of_streams": float(spread), "asymmetry_of_comb": float(asymmetry)}
    write(folder, arrays, {"kind": folder.name, "seed": DEEPSEEK["seed"], "sizes": sizes, "checks": checks})


def main() -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for name in CASES:
        qwen4_exp(name)
    deepseek_v4()


if __name__ == "__main__":
    main()
