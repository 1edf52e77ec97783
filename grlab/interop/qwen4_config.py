"""The config.json of a `qwen4_exp` checkpoint as our config, and back."""

from collections.abc import Sequence

from ml_collections import ConfigDict

from grlab import config as configs
from grlab.errors import UsageError, first_line
from grlab.interop.tensors import TensorFolder
from grlab.model import check

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
