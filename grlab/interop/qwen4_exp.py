"""The tensors of a `qwen4_exp` checkpoint (Qwen3.8-Flash-Next; transformers' `Qwen4ExpForCausalLM`) as our parameters.

The zero-centred convention of norms is theirs and ours alike.
"""

import re
from collections.abc import Iterator

import numpy as np
from ml_collections import ConfigDict

from grlab.errors import UsageError
from grlab.interop.tensors import Tensor, TensorFolder, Where
from grlab.layers import ngram
from grlab.model import Decoder, check

IGNORED = ("mtp.", "model.mtp.", "model.visual.", "visual.")  # parts of public checkpoints that no row has


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
        for shard, rows in enumerate(rows_of_parts or [ngram.table_height(p, self.with_ngrams.index(layer))]):
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


def layout(folder: TensorFolder, config: ConfigDict, vocab: int) -> Qwen4Exp:
    """How the tensors of this checkpoint are called and cut."""
    names = folder.shapes
    prefix = next((n.removesuffix("embed_tokens.weight") for n in names if n.endswith("embed_tokens.weight")), "model.")
    fused = any(name.endswith("experts.gate_up_proj") for name in names)
    parts: dict[int, dict[int, int]] = {}
    for name, shape in names.items():
        if found := re.search(r"layers\.(\d+)\.ple\.ple_embedding\.ngram_embedding\.shard_(\d+)\.weight$", name):
            layer, shard = map(int, found.groups())
            parts.setdefault(layer, {})[shard] = shape[0] if shape else 0
    rows = {layer: [of[shard] for shard in sorted(of)] for layer, of in parts.items()}
    found = Qwen4Exp(config, vocab, prefix, fused, rows)
    for layer, of_parts in rows.items():
        if layer not in found.with_ngrams:
            continue  # tensors that nothing expects: listed as unknown
        height = ngram.table_height(config.model.ngram, found.with_ngrams.index(layer))
        if sum(of_parts) != height:
            name = f"{prefix}layers.{layer}.ple.ple_embedding.ngram_embedding"
            remedy = f"the {len(of_parts)} shards of {name} have {sum(of_parts):,} rows instead of {height:,}"
            raise UsageError("--hf", str(folder.path), remedy)
    return found
