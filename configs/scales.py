"""The scales: the shapes, batch and length that a row is trained at. A scale never touches `residual`."""

import difflib

import ml_collections

# The layers of Qwen3.8-Flash-Next around its residual (arXiv 2608.30320, section 2.1): three of Gated DeltaNet to one
# of gated attention, of whose channels RoPE turns a quarter; every feed-forward a mixture of experts.
_HYBRID = {"pattern": "gdn,gdn,gdn,attention", "output_gate": True, "rope_fraction": 0.25}

# What the scales that need accelerators share: chosen here, and the schedule is configs/base.py's. A corpus is prepared
# in memory: data.max_bytes bounds it, and a run that wants more tokens than it gives sees them more than once.
_LARGE = {
    "model": {"compute_dtype": "bfloat16", "embed_std": 0.02},
    "optim": {"accumulate": 1, "clip": 0.5},  # the report's clip (section 3.3)
    "data": {"name": "c4/en"},  # give data.tokenizer a file: the vocabularies are no bytes'
    "eval": {
        "every": 1000,
        "tokens": 4_194_304,
        "batch_size": 256,
        "cloze_items": 0,  # those are of bytes
        "downstream": "hellaswag,piqa,ai2_arc,winogrande,openbookqa,boolq,lambada",
    },
    "checkpoint": {"every": 1000},
    "mesh": {"data": 1, "fsdp": -1},
}

SCALES = {
    # Seconds: for tests of the whole path.
    "tiny": {
        "steps": 8,
        "batch_size": 4,
        "seq_len": 32,
        "model": {"layers": 2, "width": 16, "heads": 2, "kv_heads": 1, "head_dim": 8, "ffn": 32, "remat": "none"},
        "optim": {"accumulate": 1},
        "eval": {"every": 4, "tokens": 1024, "batch_size": 8, "cloze_items": 8, "cloze_context": 48},
        "checkpoint": {"every": 4},
    },
    # The same with every kind of layer at work.
    "tiny_hybrid": {
        "model": {
            "layers": 4,
            "pattern": "gdn,qsa",
            "output_gate": True,
            "rope_fraction": 0.5,
            "separate_documents": True,
            "gdn": {"key_heads": 1, "value_heads": 2, "key_dim": 8, "value_dim": 8, "chunk": 8},
            "qsa": {"budget": 8, "block": 4, "heads": 2, "head_dim": 4},
            "moe": {"experts": 4, "top_k": 2, "ffn": 16, "shared": 16},
            "ngram": {"layers": "2", "heads": 2, "rows": 50, "width": 16},
        },
    },
    # A minute or two a row on one core: a first look at the whole path.
    "demo": {
        "steps": 300,
        "model": {"layers": 4},
        "eval": {"every": 100, "tokens": 65_536, "cloze_items": 100},
        "checkpoint": {"every": 100},
    },
    # 4.1 M bytes at half a million parameters, about 6 to 16 minutes a row on one core: the tables' scale.
    # The learning rate is pre-norm's best of experiments/lr_table5.py; a row with a sweep of its own replaces it.
    "cpu": {"optim": {"lr": 7e-3}},
    # The same with the layers of Qwen3.8-Flash-Next: as many multiplications a token, three times the parameters.
    "cpu_hybrid": {
        "model": _HYBRID
        | {
            "gdn": {"key_heads": 2, "value_heads": 4, "key_dim": 16, "value_dim": 16, "chunk": 32},
            "moe": {"experts": 8, "top_k": 2, "ffn": 64, "shared": 64},
        },
        "optim": {"lr": 7e-3},
    },
    # 57 M parameters, 20 tokens a parameter. Shape, tokens, batch and rate chosen here, not tuned.
    "60m": {
        "steps": 4_600,
        "batch_size": 256,
        "seq_len": 1024,
        "model": {"layers": 8, "width": 512, "heads": 8, "kv_heads": 4, "head_dim": 64, "ffn": 1408, "vocab": 32_768},
        "optim": {"lr": 2e-3},
    },
    # 382 M parameters at the depth of the report's ablations, 20 tokens a parameter. Chosen here, not tuned.
    "400m": {
        "steps": 14_600,
        "batch_size": 256,
        "seq_len": 2048,
        "model": {
            "layers": 28,
            "width": 1024,
            "heads": 16,
            "kv_heads": 4,
            "head_dim": 64,
            "ffn": 2816,
            "vocab": 32_768,
        },
        "optim": {"lr": 1e-3, "accumulate": 4},  # so that every row of Table 5 fits on 16 chips of v5e
    },
    # 3 B parameters, half a billion of which a token makes use of; 50 B tokens. Chosen here, not tuned.
    "3b_a0p5b": {
        "steps": 47_684,
        "batch_size": 256,
        "seq_len": 4096,
        "model": _HYBRID
        | {
            "layers": 24,
            "width": 1024,
            "heads": 8,
            "kv_heads": 2,
            "head_dim": 256,
            "rope_theta": 1e7,
            "vocab": 32_768,
            "gdn": {"key_heads": 8, "value_heads": 16, "key_dim": 128, "value_dim": 128, "chunk": 64},
            "moe": {"experts": 64, "top_k": 4, "ffn": 576, "shared": 576},
        },
        "optim": {"lr": 7e-4},
    },
    # The scale of the report's ablations: "28-layer 25B-A3B MoE based on the Qwen3.5 architecture" (section 2.1.1),
    # here with the shapes of Qwen3.5-35B-A3B (transformers' defaults of qwen3_5_moe) at 28 layers. 560 B tokens as in
    # Table 5. Its batch and rate are not published: those of the Qwen3.5 recipe in Table 10, which is of a 156B-A7B,
    # stand in.
    "25b_a3b": {
        "steps": 133_514,
        "batch_size": 1024,
        "seq_len": 4096,
        "model": _HYBRID
        | {
            "layers": 28,
            "width": 2048,
            "heads": 16,
            "kv_heads": 2,
            "head_dim": 256,
            "rope_theta": 1e7,
            "vocab": 248_320,
            "gdn": {"key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128, "chunk": 64},
            "moe": {"experts": 256, "top_k": 8, "ffn": 512, "shared": 512},
        },
        "optim": {"lr": 6.8e-4},
    },
    # Qwen3.8-Flash-Next: shapes of its report and checkpoint (section 2.1; transformers' qwen4_exp). Its own tokens,
    # batch and rate are not published: those of the predicted optimum for a 156B-A7B (Table 10, 419 B tokens) stand in.
    "flash_next": {
        "steps": 49_949,
        "batch_size": 2048,
        "seq_len": 4096,
        "model": _HYBRID
        | {
            "pattern": "gdn,gdn,gdn,qsa",
            "layers": 48,
            "width": 2560,
            "heads": 24,
            "kv_heads": 2,
            "head_dim": 256,
            "rope_theta": 1e7,
            "vocab": 248_320,
            "gdn": {"key_heads": 16, "value_heads": 48, "key_dim": 128, "value_dim": 128, "chunk": 64},
            "qsa": {"budget": 2048, "block": 4, "heads": 4, "head_dim": 128},
            "moe": {"experts": 512, "top_k": 10, "ffn": 640, "shared": 640},
            "ngram": {"layers": "2", "rows": 20_000_000, "width": 2560},
        },
        "optim": {"name": "muon", "lr": 1.76e-3},
    },
}
# What a scale is beside its own fields.
_BASES = {"tiny_hybrid": SCALES["tiny"], "60m": _LARGE, "400m": _LARGE, "3b_a0p5b": _LARGE, "25b_a3b": _LARGE}
_BASES["flash_next"] = _LARGE


def apply(config: ml_collections.ConfigDict, scale: str) -> None:
    """Writes the fields of `scale` into `config`; a ValueError names the nearest scale when there is none."""
    if scale not in SCALES:
        near = difflib.get_close_matches(scale, SCALES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"scale={scale!r}: {hint}known scales: {', '.join(SCALES)}")
    config.update(_BASES.get(scale, {}))
    config.update(SCALES[scale])
