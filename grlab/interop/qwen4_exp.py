"""The tensors of a `qwen4_exp` checkpoint (Qwen3.8-Flash-Next; transformers' `Qwen4ExpForCausalLM`) as our parameters.

The zero-centred convention of norms is theirs and ours alike.
"""

import math
import re
from collections.abc import Iterator, Sequence

import numpy as np
from ml_collections import ConfigDict

from grlab import config as configs
from grlab.errors import UsageError, first_line
from grlab.interop.tensors import Tensor, TensorFolder, Where
from grlab.layers import ngram
from grlab.model import Decoder, check

IGNORED = ("mtp.", "model.mtp.", "model.visual.", "visual.")  # parts of public checkpoints that no row has


# What transformers (5.24.0) takes where a config.json has no such field.
DEFAULTS = {
    "hidden_act": "silu", "norm_topk_prob": True, "attention_bias": False, "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6, "head_dim": 256, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "router_aux_loss_coef": 0.001, "hc_count": 4, "hc_lowrank": 320, "ple_conv_kernel_size": 4, "ngram_size": 3,
    "heads_per_ngram": 8, "ngram_vocab_size_base": 20_000_000, "make_ngram_vocab_size_divisible_by": 128,
    "seed": 1234,
}  # fmt: skip
MIXERS = {"linear_attention": "gdn", "full_attention": "qsa", "indexed_attention": "qsa"}


def read_config(folder: TensorFolder, overrides: Sequence[str] = ()) -> tuple[ConfigDict, int, int]:
    """(our config, the vocabulary, the separator) of a `qwen4_exp` checkpoint.

    What its config.json does not say is configs/gr.py's at the scale flash_next, with `overrides`. Raises UsageError
    for what is not a `qwen4_exp`, for settings that our model does not have, and for an override of what it says.
    """
    field = str(folder.path / "config.json")
    theirs = DEFAULTS | folder.config.get("text_config", folder.config)
    if theirs.get("model_type") not in ("qwen4_exp_text", "qwen4_exp"):
        raise UsageError(field, theirs.get("model_type"), "model_type must be qwen4_exp_text")
    _refuse_others(field, theirs)
    try:
        found = _fields(theirs)
    except (KeyError, TypeError, ValueError) as e:
        raise UsageError(field, first_line(e), "is missing there, or is not what it should be") from e
    for override in overrides:
        name, _, value = override.partition("=")
        if name in found:
            raise UsageError(name, value, f"is the checkpoint's own ({found[name]!r}): leave it out")
    config = configs.load("configs/gr.py:flash_next", overrides)
    config.update_from_flattened_dict(found)
    eos = theirs.get("eos_token_id")
    separator = eos[0] if isinstance(eos, list) else eos
    return config, theirs["vocab_size"], 0 if separator is None else separator


def _refuse_others(field: str, theirs: dict) -> None:
    """Raises for a setting that our model does not have."""
    for name, value, only in (
        ("hidden_act", theirs["hidden_act"], "silu"),
        ("output_gate_type", theirs.get("output_gate_type") or "silu", "sigmoid"),
        ("norm_topk_prob", theirs["norm_topk_prob"], True),
        ("attention_bias", theirs["attention_bias"], False),
        ("tie_word_embeddings", theirs["tie_word_embeddings"], False),
        ("rope_type", (theirs.get("rope_parameters") or {}).get("rope_type", "default"), "default"),
    ):
        if value != only:
            raise UsageError(f"{field}: {name}", value, f"this model has {only!r} alone")
    if not theirs.get("shared_expert_intermediate_size"):
        raise UsageError(f"{field}: shared_expert_intermediate_size", 0, "this model has a shared expert")


def _fields(theirs: dict) -> dict[str, object]:
    """The fields of our config that a config.json gives."""
    rope = theirs["rope_parameters"]
    interval = theirs.get("full_attention_interval", 4)
    kinds = theirs.get("layer_types") or [
        "indexed_attention" if (i + 1) % interval == 0 else "linear_attention"
        for i in range(theirs["num_hidden_layers"])
    ]
    found = {
        "layers": theirs["num_hidden_layers"],
        "width": theirs["hidden_size"],
        "heads": theirs["num_attention_heads"],
        "kv_heads": theirs["num_key_value_heads"],
        "head_dim": theirs["head_dim"],
        "rope_theta": float(rope["rope_theta"]),
        "rope_fraction": float(rope.get("partial_rotary_factor", 1.0)),
        "norm_eps": float(theirs["rms_norm_eps"]),
        "output_gate": True,
        "pattern": ",".join(_period([MIXERS[kind] for kind in kinds])),
        "separate_documents": False,
        "vocab": theirs["vocab_size"],
        "gdn.key_heads": theirs["linear_num_key_heads"],
        "gdn.value_heads": theirs["linear_num_value_heads"],
        "gdn.key_dim": theirs["linear_key_head_dim"],
        "gdn.value_dim": theirs["linear_value_head_dim"],
        "gdn.conv": theirs["linear_conv_kernel_dim"],
        "qsa.budget": theirs["indexer_budget"],
        "qsa.block": theirs["indexer_compress_ratio"],
        "qsa.heads": theirs["indexer_n_heads"],
        "qsa.head_dim": theirs["indexer_head_dim"],
        "moe.experts": theirs["num_experts"],
        "moe.top_k": theirs["num_experts_per_tok"],
        "moe.ffn": theirs["moe_intermediate_size"],
        "moe.shared": theirs["shared_expert_intermediate_size"],
        "moe.balance": float(theirs["router_aux_loss_coef"]),
        "ngram.layers": ",".join(map(str, theirs.get("ple_layer_ids") or [])),
        "ngram.size": theirs["ngram_size"],
        "ngram.heads": theirs["heads_per_ngram"],
        "ngram.rows": theirs["ngram_vocab_size_base"],
        "ngram.multiple": theirs["make_ngram_vocab_size_divisible_by"],
        "ngram.width": theirs.get("ple_embed_dim") or theirs["hidden_size"],
        "ngram.conv": theirs["ple_conv_kernel_size"],
        "ngram.seed": theirs["seed"],
    }
    of_residual = {"residual.streams": theirs["hc_count"], "residual.rank": theirs["hc_lowrank"]}
    return {f"model.{name}": value for name, value in found.items()} | of_residual


def _period(mixers: list[str]) -> list[str]:
    """The shortest pattern that gives the mixers when it is repeated."""
    for length in range(1, len(mixers) + 1):
        if len(mixers) % length == 0 and mixers == mixers[:length] * (len(mixers) // length):
            return mixers[:length]
    return mixers


def public_config(config: ConfigDict, vocab: int, separator: int, ngram_parts: int = 1) -> dict:
    """The config.json of a checkpoint of our model, as transformers reads it."""
    m, gr = config.model, config.residual
    kinds = {"gdn": "linear_attention", "qsa": "indexed_attention"}
    pattern, with_ngrams = check(m)
    third = round(m.head_dim * m.rope_fraction) // 2 // 3
    return {
        "architectures": ["Qwen4ExpForCausalLM"],
        "model_type": "qwen4_exp_text",
        "dtype": "float32",
        "vocab_size": vocab,
        "hidden_size": m.width,
        "num_hidden_layers": m.layers,
        "num_attention_heads": m.heads,
        "num_key_value_heads": m.kv_heads,
        "head_dim": m.head_dim,
        "hidden_act": "silu",
        "output_gate_type": "sigmoid",
        "rms_norm_eps": m.norm_eps,
        "tie_word_embeddings": False,
        "layer_types": [kinds[mixer] for mixer in pattern] * (m.layers // len(pattern)),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": m.rope_theta,
            "partial_rotary_factor": m.rope_fraction,
            # Of text the three sections turn alike.
            "mrope_section": [round(m.head_dim * m.rope_fraction) // 2 - 2 * third, third, third],
            "mrope_interleaved": True,
        },
        "linear_num_key_heads": m.gdn.key_heads,
        "linear_num_value_heads": m.gdn.value_heads,
        "linear_key_head_dim": m.gdn.key_dim,
        "linear_value_head_dim": m.gdn.value_dim,
        "linear_conv_kernel_dim": m.gdn.conv,
        "indexer_n_heads": m.qsa.heads,
        "indexer_kv_heads": 1,
        "indexer_head_dim": m.qsa.head_dim,
        "indexer_budget": m.qsa.budget,
        "indexer_compress_ratio": m.qsa.block,
        "num_experts": m.moe.experts,
        "num_experts_per_tok": m.moe.top_k,
        "norm_topk_prob": True,
        "moe_intermediate_size": m.moe.ffn,
        "shared_expert_intermediate_size": m.moe.shared,
        "router_aux_loss_coef": m.moe.balance,
        "hc_count": gr.streams,
        "hc_lowrank": gr.rank,
        "eos_token_id": separator,
        "ple_layer_ids": [layer + 1 for layer in with_ngrams],
        "ple_embed_dim": m.ngram.width,
        "ple_conv_kernel_size": m.ngram.conv,
        "ngram_size": m.ngram.size,
        "heads_per_ngram": m.ngram.heads,
        "ngram_vocab_size_base": m.ngram.rows,
        "make_ngram_vocab_size_divisible_by": m.ngram.multiple,
        "seed": m.ngram.seed,
        "split_ngram_parts": ngram_parts,
    }


class Qwen4Exp:
    """The tensors of a `qwen4_exp` of our config."""

    def __init__(self, config: ConfigDict, vocab: int, prefix: str = "model.", fused=False, ngram_rows=None):
        """`fused`: the experts of a layer are one tensor. `ngram_rows`: rows of each part of an n-gram table, by layer;
        where it is not given, a table is one tensor."""
        self.m, self.vocab, self.prefix = config.model, vocab, prefix
        self.fused, self.ngram_rows = fused, ngram_rows or {}
        self.streams, self.rank = config.residual.streams, config.residual.rank
        self.pattern, self.with_ngrams = check(self.m)

    def tensors(self, model: Decoder) -> Iterator[Tensor]:
        """All of them, in the order of the model."""
        d = self.m.width
        yield Tensor(f"{self.prefix}embed_tokens.weight", (self.vocab, d), ((("embedding",), ()),), lambda t: [t])
        places = [
            (("stacks", s, "layers", place), stack.first + period * len(stack.layers) + place, period)
            for s, stack in enumerate(model.stacks)
            for period in range(stack.periods)
            for place in range(len(stack.layers))
        ]
        for ours, layer, period in places:
            yield from self.layer(f"{self.prefix}layers.{layer}", ours, layer, period)
        yield from self.end()
        yield Tensor("lm_head.weight", (self.vocab, d), ((("head",), ()),), lambda t: [t.T])

    def residual(self) -> Iterator[Tensor]:
        """The residual part, as of sites ("site", k) that are not stacked and of the system itself."""
        for k in range(2 * self.m.layers):
            block = "mlp" if k % 2 else "attn"
            name = f"{self.prefix}layers.{k // 2}.{block}_hyper_connection"
            yield from gated_residual(name, ("site", k), (), self.streams, self.m.width, self.rank)
        yield from self.end()

    def end(self) -> list[Tensor]:
        """The read that feeds the head."""
        name, ours = f"{self.prefix}hyper_connection_mixer", ("residual", "final")
        return gated_residual(name, ours, (), self.streams, self.m.width, self.rank, writes=False)

    def layer(self, name: str, ours: Where, layer: int, period: int) -> Iterator[Tensor]:
        mixer = self.pattern[layer % len(self.pattern)]
        if layer in self.with_ngrams:
            yield from self.ngrams(f"{name}.ple", (*ours, "ngram"), layer, period)
        sites = ((f"{mixer}_site", "attn_hyper_connection"), ("moe_site", "mlp_hyper_connection"))
        for site, block in sites:
            n, d, r = self.streams, self.m.width, self.rank
            yield from gated_residual(f"{name}.{block}", (*ours, site), (period,), n, d, r)
        if mixer == "gdn":
            yield from self.gated_delta_net(f"{name}.linear_attn", (*ours, "gdn"), period)
        else:
            yield from self.attention(f"{name}.self_attn", (*ours, "qsa"), period)
        yield from self.moe(f"{name}.mlp", (*ours, "moe"), period)

    def attention(self, name: str, ours: Where, period: int) -> Iterator[Tensor]:
        d, h, k, c = self.m.width, self.m.heads, self.m.kv_heads, self.m.head_dim
        i, e = self.m.qsa.heads, self.m.qsa.head_dim

        def parts(*leaves):
            return tuple(((*ours, *leaf.split(".")), (period,)) for leaf in leaves)

        def query_and_gate(t):  # a head's query and its gate in turn
            t = t.reshape(h, 2, c, d)
            return [t[:, which].transpose(2, 0, 1) for which in range(2)]

        yield Tensor(f"{name}.q_proj.weight", (2 * h * c, d), parts("query", "output_gate"), query_and_gate)
        yield Tensor(f"{name}.k_proj.weight", (k * c, d), parts("key"), lambda t: [heads_first(t, k)])
        yield Tensor(f"{name}.v_proj.weight", (k * c, d), parts("value"), lambda t: [heads_first(t, k)])
        out = lambda t: [t.reshape(d, h, c).transpose(1, 2, 0)]  # noqa: E731
        yield Tensor(f"{name}.o_proj.weight", (d, h * c), parts("output"), out)
        yield Tensor(f"{name}.q_norm.weight", (c,), parts("query_gain"), lambda t: [t])
        yield Tensor(f"{name}.k_norm.weight", (c,), parts("key_gain"), lambda t: [t])
        yield Tensor(
            f"{name}.indexer.index_qk_proj.weight",
            ((i + 1) * e, d),
            parts("indexer.query", "indexer.key"),
            lambda t: [heads_first(t[: i * e], i), t[i * e :].T],
        )
        yield Tensor(f"{name}.indexer.q_layernorm.weight", (e,), parts("indexer.query_gain"), lambda t: [t])
        yield Tensor(f"{name}.indexer.k_layernorm.weight", (e,), parts("indexer.key_gain"), lambda t: [t])

    def gated_delta_net(self, name: str, ours: Where, period: int) -> Iterator[Tensor]:
        d, g = self.m.width, self.m.gdn
        h, heads, v = g.key_heads, g.value_heads, g.value_dim
        qk = h * g.key_dim
        channels = 2 * qk + heads * v

        def parts(*leaves):
            return tuple(((*ours, leaf), (period,)) for leaf in leaves)

        def by_name(t):  # [channels, ..] -> the rows of query, key and value, and their heads
            return zip((t[:qk], t[qk : 2 * qk], t[2 * qk :]), (h, h, heads), strict=True)

        def filters(t):
            return [rows[:, 0].reshape(n, -1, g.conv).transpose(2, 0, 1) for rows, n in by_name(t)]

        yield Tensor(
            f"{name}.in_proj_qkv.weight",
            (channels, d),
            parts("query", "key", "value"),
            lambda t: [heads_first(rows, n) for rows, n in by_name(t)],
        )
        conv = parts("conv_query", "conv_key", "conv_value")
        yield Tensor(f"{name}.conv1d.weight", (channels, 1, g.conv), conv, filters)
        gate = lambda t: [heads_first(t, heads)]  # noqa: E731
        yield Tensor(f"{name}.in_proj_z.weight", (heads * v, d), parts("output_gate"), gate)
        yield Tensor(f"{name}.in_proj_b.weight", (heads, d), parts("beta"), lambda t: [t.T])
        yield Tensor(f"{name}.in_proj_a.weight", (heads, d), parts("decay"), lambda t: [t.T])
        yield Tensor(f"{name}.dt_bias", (heads,), parts("decay_bias"), lambda t: [t])
        yield Tensor(f"{name}.A_log", (heads,), parts("decay_log"), lambda t: [t])
        yield Tensor(f"{name}.norm.weight", (v,), parts("norm_weight"), lambda t: [t])
        out = lambda t: [t.reshape(d, heads, v).transpose(1, 2, 0)]  # noqa: E731
        yield Tensor(f"{name}.out_proj.weight", (d, heads * v), parts("output"), out)

    def moe(self, name: str, ours: Where, period: int) -> Iterator[Tensor]:
        d, e, f, s = self.m.width, self.m.moe.experts, self.m.moe.ffn, self.m.moe.shared

        def part(leaf, *more):
            return ((*ours, *leaf.split(".")), (period, *more))

        transposed = lambda t: [t.T]  # noqa: E731
        yield Tensor(f"{name}.gate.weight", (e, d), (part("router"),), transposed)
        if self.fused:
            both = lambda t: [t[:, :f].transpose(0, 2, 1), t[:, f:].transpose(0, 2, 1)]  # noqa: E731
            yield Tensor(f"{name}.experts.gate_up_proj", (e, 2 * f, d), (part("gate"), part("up")), both)
            down = lambda t: [t.transpose(0, 2, 1)]  # noqa: E731
            yield Tensor(f"{name}.experts.down_proj", (e, d, f), (part("down"),), down)
        else:
            for expert in range(e):
                for leaf, shape in (("gate", (f, d)), ("up", (f, d)), ("down", (d, f))):
                    tensor = f"{name}.experts.{expert}.{leaf}_proj.weight"
                    yield Tensor(tensor, shape, (part(leaf, expert),), transposed)
        for leaf, shape in (("gate", (s, d)), ("up", (s, d)), ("down", (d, s))):
            yield Tensor(f"{name}.shared_expert.{leaf}_proj.weight", shape, (part(f"shared.{leaf}"),), transposed)
        yield Tensor(f"{name}.shared_expert_gate.weight", (1, d), (part("shared_gate"),), transposed)

    def ngrams(self, name: str, ours: Where, layer: int, period: int) -> Iterator[Tensor]:
        d, n, p = self.m.width, self.streams, self.m.ngram
        heads = (p.size - 1) * p.heads
        table = f"{name}.ple_embedding.ngram_embedding"

        def part(leaf, *more):
            return (((*ours, leaf), (period, *more)),)

        start = 0
        rows_of_parts = self.ngram_rows.get(layer)
        for shard, rows in enumerate(rows_of_parts or [table_height(p, self.with_ngrams.index(layer))]):
            tensor = f"{table}.shard_{shard}.weight" if rows_of_parts else f"{table}.weight"
            where = part("table", slice(start, start + rows))
            yield Tensor(tensor, (rows, p.width // heads), where, lambda t: [t])
            start += rows
        yield Tensor(f"{name}.key_proj.weight", (n * d, p.width), part("key"), lambda t: [t.T])
        yield Tensor(f"{name}.value_proj.weight", (d, p.width), part("value"), lambda t: [t.T])
        for theirs, leaf in (("norm_key", "key_gain"), ("norm_query", "stream_gain"), ("norm_conv", "conv_gain")):
            yield Tensor(f"{name}.{theirs}.weight", (n * d,), part(leaf), lambda t: [t.reshape(n, d)])
        filters = lambda t: [t[:, 0].reshape(n, d, p.conv).transpose(2, 0, 1)]  # noqa: E731
        yield Tensor(f"{name}.conv1d.weight", (n * d, 1, p.conv), part("conv"), filters)

    def buffers(self) -> dict[str, np.ndarray]:
        """What a checkpoint says of the hashes, and our config does, too."""
        p, found = self.m.ngram, {}
        for index, layer in enumerate(self.with_ngrams):
            rows = ngram.table_rows(p, index)
            values = {
                "layer_multipliers": ngram.multipliers(self.vocab, p.size, index, p.seed),
                "ngram_heads_vocab_sizes": rows,
                "ngram_heads_offsets": np.cumsum([0, *rows[:-1]]),
            }
            name = f"{self.prefix}layers.{layer}.ple.ple_embedding"
            found |= {f"{name}.{key}": np.array(value, np.int64) for key, value in values.items()}
        return found


def gated_residual(name: str, ours: Where, index: tuple, n: int, d: int, r: int, writes: bool = True) -> list[Tensor]:
    """A `Qwen4ExpTextGatedResidual`: our GatedSite at `ours`, of which `index` is taken where layers are stacked."""

    def part(leaf):
        return (((*ours, leaf), index),)

    found = [
        Tensor(f"{name}.hc_norm.weight", (n * d,), part("gain"), lambda t: [t.reshape(n, d)]),
        Tensor(f"{name}.input_mix_weight_down.weight", (r, n * d), part("w_down"), lambda t: [t.T]),
        Tensor(f"{name}.input_mix_weight_up.weight", (n * d, r), part("w_up"), lambda t: [t.T]),
    ]
    if writes:
        found.append(Tensor(f"{name}.block_inject_weight.weight", (n, n * d), part("w_write"), lambda t: [t.T]))
    return found


def heads_first(t: np.ndarray, heads: int) -> np.ndarray:
    """torch's [H · C, D] as our [D, H, C]."""
    return t.reshape(heads, -1, t.shape[-1]).transpose(2, 0, 1)


def table_height(p, index: int) -> int:
    """The rows of an n-gram table, filled up."""
    return math.ceil(sum(ngram.table_rows(p, index)) / p.multiple) * p.multiple


def layout(folder: TensorFolder, config: ConfigDict, vocab: int) -> Qwen4Exp:
    """How the tensors of this checkpoint are called and cut."""
    names = folder.shapes
    prefix = next((n.removesuffix("embed_tokens.weight") for n in names if n.endswith("embed_tokens.weight")), "model.")
    fused = any(name.endswith("experts.gate_up_proj") for name in names)
    parts: dict[int, dict[int, int]] = {}
    for name, shape in names.items():
        if found := re.search(r"layers\.(\d+)\.ple\.ple_embedding\.ngram_embedding\.shard_(\d+)\.weight$", name):
            layer, shard = map(int, found.groups())
            parts.setdefault(layer, {})[shard] = shape[0]
    rows = {layer: [of[shard] for shard in sorted(of)] for layer, of in parts.items()}
    found = Qwen4Exp(config, vocab, prefix, fused, rows)
    for layer, of_parts in rows.items():
        height = table_height(config.model.ngram, found.with_ngrams.index(layer)) if layer in found.with_ngrams else 0
        if sum(of_parts) != height:
            name = f"{prefix}layers.{layer}.ple.ple_embedding.ngram_embedding"
            remedy = f"the {len(of_parts)} shards of {name} have {sum(of_parts):,} rows instead of {height:,}"
            raise UsageError("--hf", str(folder.path), remedy)
    return found
