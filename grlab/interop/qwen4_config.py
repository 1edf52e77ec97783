"""The config.json of a `qwen4_exp` checkpoint as our config, and back."""

from collections.abc import Sequence

import jax
from flax import nnx
from ml_collections import ConfigDict

from grlab import config as configs
from grlab import residual
from grlab.errors import UsageError, one_of
from grlab.interop.public_config import PublicConfig
from grlab.interop.tensors import TensorFolder
from grlab.model import check

MODEL_TYPES = ("qwen4_exp", "qwen4_exp_text")
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
# Our fields that are one of theirs, all of them whole numbers above 0.
SIZES = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab": "vocab_size",
    "gdn.key_heads": "linear_num_key_heads",
    "gdn.value_heads": "linear_num_value_heads",
    "gdn.key_dim": "linear_key_head_dim",
    "gdn.value_dim": "linear_value_head_dim",
    "gdn.conv": "linear_conv_kernel_dim",
    "qsa.budget": "indexer_budget",
    "qsa.block": "indexer_compress_ratio",
    "qsa.heads": "indexer_n_heads",
    "qsa.head_dim": "indexer_head_dim",
    "moe.experts": "num_experts",
    "moe.top_k": "num_experts_per_tok",
    "moe.ffn": "moe_intermediate_size",
    "moe.shared": "shared_expert_intermediate_size",
    "ngram.size": "ngram_size",
    "ngram.heads": "heads_per_ngram",
    "ngram.rows": "ngram_vocab_size_base",
    "ngram.multiple": "make_ngram_vocab_size_divisible_by",
    "ngram.conv": "ple_conv_kernel_size",
}


def read_config(folder: TensorFolder, overrides: Sequence[str] = ()) -> tuple[ConfigDict, int, int]:
    """(our config, the vocabulary, the separator) of a `qwen4_exp` checkpoint.

    What its config.json does not say is configs/gr.py's at the scale flash_next, with `overrides`. Raises UsageError
    for what is not a `qwen4_exp`, for settings that our model does not have, and for an override of what it says.
    """
    theirs = PublicConfig(folder, MODEL_TYPES, DEFAULTS)
    _refuse_others(theirs)
    found = _fields(theirs)
    for override in overrides:
        name, _, value = override.partition("=")
        if name in found:
            raise UsageError(name, value, f"is the checkpoint's own ({found[name]!r}): leave it out")
    config = configs.load("configs/gr.py:flash_next", overrides)
    config.update_from_flattened_dict(found)
    sizes = {"width": config.model.width, "layers": config.model.layers}
    try:
        check(config.model)
        nnx.eval_shape(lambda: residual.build(config.residual, **sizes, key=jax.random.key(0)))
    except UsageError as e:
        if e.field in found:
            raise UsageError(e.field, e.value, f"{e.remedy} (by {theirs.file})") from None
        raise
    return config, config.model.vocab, _separator(theirs)


def _separator(theirs: PublicConfig) -> int:
    eos = theirs.fields.get("eos_token_id")
    eos = eos[0] if isinstance(eos, list) and eos else eos
    if eos is not None and type(eos) is not int:
        raise theirs.error("eos_token_id", eos, "must be a whole number or a list of them")
    return eos or 0


def _refuse_others(theirs: PublicConfig) -> None:
    """Raises for a setting that our model does not have."""
    rope = theirs.get("rope_parameters", dict)
    for name, value, only in (
        ("hidden_act", theirs.fields["hidden_act"], "silu"),
        ("output_gate_type", theirs.fields.get("output_gate_type") or "silu", "sigmoid"),
        ("norm_topk_prob", theirs.fields["norm_topk_prob"], True),
        ("attention_bias", theirs.fields["attention_bias"], False),
        ("tie_word_embeddings", theirs.fields["tie_word_embeddings"], False),
        ("rope_type", rope.get("rope_type", "default"), "default"),
    ):
        if value != only:
            raise UsageError(f"{theirs.file}: {name}", value, f"this model has {only!r} alone")
    if not theirs.fields.get("shared_expert_intermediate_size"):
        raise UsageError(f"{theirs.file}: shared_expert_intermediate_size", 0, "this model has a shared expert")


def _fields(theirs: PublicConfig) -> dict[str, object]:
    """The fields of our config that a config.json gives."""
    sizes = SIZES | {"ngram.width": "ple_embed_dim" if theirs.fields.get("ple_embed_dim") else "hidden_size"}
    found = {f"model.{ours}": theirs.get(name, int, above=0) for ours, name in sizes.items()}
    ngram_layers = theirs.get("ple_layer_ids", list, default=[])
    return found | {
        "model.rope_theta": theirs.get("rope_parameters.rope_theta", float, above=0),
        "model.rope_fraction": theirs.get("rope_parameters.partial_rotary_factor", float, default=1.0),
        "model.norm_eps": theirs.get("rms_norm_eps", float, above=0),
        "model.output_gate": True,
        "model.pattern": ",".join(_period(_mixers(theirs, found["model.layers"]))),
        "model.separate_documents": False,
        "model.moe.balance": theirs.get("router_aux_loss_coef", float),
        "model.ngram.layers": ",".join(map(str, ngram_layers)),
        "model.ngram.seed": theirs.get("seed", int),
        "residual.streams": theirs.get("hc_count", int, above=0),
        "residual.rank": theirs.get("hc_lowrank", int, above=0),
    }


def _mixers(theirs: PublicConfig, layers: int) -> list[str]:
    """Our mixer of each layer."""
    if not theirs.fields.get("layer_types"):
        interval = theirs.get("full_attention_interval", int, above=0, default=4)
        return ["gdn" if (i + 1) % interval else "qsa" for i in range(layers)]
    kinds = theirs.get("layer_types", list)
    for kind in kinds:
        one_of(f"{theirs.file}: layer_types", kind, MIXERS)
    if len(kinds) != layers:
        raise theirs.error("num_hidden_layers", layers, f"must be {len(kinds)}, as many as there are layer_types")
    return [MIXERS[kind] for kind in kinds]


def _period(mixers: list[str]) -> list[str]:
    """The shortest pattern that gives the mixers when it is repeated."""
    for length in range(1, len(mixers) + 1):
        if len(mixers) % length == 0 and mixers == mixers[:length] * (len(mixers) // length):
            return mixers[:length]
    return mixers


def public_config(config: ConfigDict, vocab: int, separator: int) -> dict:
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
        "split_ngram_parts": 1,
    }
