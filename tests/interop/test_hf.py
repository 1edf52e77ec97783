"""Checkpoints of transformers: the files of `tests/goldens/make_qwen4_exp.py`, read, checked, written and read again.

Error is max|a - b| / max|b| of an array. Measured: logits 2.1e-6 and 6e-7, streams at most 1.4e-6.

Seen to fail with each of these put into the code: attention's query and gate, or a Gated DeltaNet's query and key, one
for the other; taps reversed; 1 + w in its norm; no bias in its decay; q not scaled; RoPE on all channels; no tail
beside the chosen blocks, a block's key turned by its last place, scores without ReLU; experts' weights that do not sum
to 1; a shared expert without its gate; n-grams across separators, with taps next to each other, without the sign of
their gate, or with one hash for all layers.
"""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from jax.sharding import PartitionSpec

import launch
from grlab import parallel
from grlab.errors import UsageError
from grlab.interop import hf, qwen4_config, qwen4_exp, tensors
from grlab.model import Context
from tests import rows
from tests.residual.functional import error

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"
QWEN = ("qwen4_exp_hc4", "qwen4_exp_hc3")
DEEPSEEK = GOLDENS / "deepseek_v4_hc"
FLOAT32 = ("model.compute_dtype=float32",)


def state_of(model) -> dict:
    return {path: np.asarray(v.get_value()) for path, v in nnx.to_flat_state(nnx.state(model))}


def read_all(folder) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint, by name."""
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in safetensors.numpy.load_file(file).items()}


def rewrite(source, folder, change) -> pathlib.Path:
    """A copy of the checkpoint at `source`, in one file, with `change` made to its {name: tensor}."""
    found = read_all(source)
    change(found)
    folder.mkdir()
    safetensors.numpy.save_file(found, folder / "model.safetensors")
    shutil.copy(source / "config.json", folder / "config.json")
    return folder


@pytest.fixture(scope="module", params=QWEN)
def golden(request):
    """(folder, expected arrays, our config, our model)."""
    folder = GOLDENS / request.param
    with np.load(folder / "expected.npz") as arrays:
        expected = dict(arrays)
    return folder, expected, *hf.import_model(folder, overrides=FLOAT32)


def test_the_whole_model_is_transformers(golden):
    """Logits, the stream after every layer, what the head reads and each layer's load-balance loss."""
    _, expected, _, model = golden
    tokens_BxT, at = expected["tokens"], expected["positions"]
    logits_BxTxV, statistics = jax.jit(model.with_statistics)(tokens_BxT)
    assert error(logits_BxTxV, expected["logits"]) < 1e-5
    np.testing.assert_allclose(statistics["balance"], expected["balance"], rtol=1e-5)

    @jax.jit
    def streams(tokens_BxT):
        stream, found = model.residual.expand(model.embedding[...][tokens_BxT]), []
        for stack in model.stacks:
            for i in range(stack.periods):
                for layer in stack.layers:
                    graphdef, params = nnx.split(layer)
                    layer = nnx.merge(graphdef, jax.tree.map(lambda p, i=i: p[i], params))
                    stream, _ = layer(stream, Context(tokens_BxT, None), model.residual)
                    found.append(stream)
        return jnp.stack(found), model.residual.collapse(stream)

    found, collapsed = streams(tokens_BxT)
    for layer, (ours, theirs) in enumerate(zip(found[:, :, at], expected["streams"], strict=True)):
        assert error(ours.reshape(theirs.shape), theirs) < 1e-5, layer
    assert error(collapsed[:, at], expected["collapsed"]) < 1e-5


def test_export_and_import_again_gives_the_same_bits(golden, tmp_path):
    """Every tensor of the checkpoint, under its name, and every parameter; in several files."""
    folder, _, config, model = golden
    hf.export_model(config, model, tmp_path / "out", separator=1, file_bytes=100_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    theirs, ours = read_all(folder), read_all(tmp_path / "out")
    shards = [name for name in theirs if ".shard_" in name]
    tables = {}
    for name in sorted(shards, key=lambda name: int(name.split("shard_")[1].split(".")[0])):
        tables.setdefault(name.split("shard_")[0] + "weight", []).append(theirs.pop(name))
    theirs |= {name: np.concatenate(parts) for name, parts in tables.items()}
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name], tensor, err_msg=name)
        assert ours[name].dtype == tensor.dtype
    again, other = hf.import_model(tmp_path / "out", overrides=FLOAT32)
    assert again.to_dict() == config.to_dict()
    for path, value in state_of(model).items():
        np.testing.assert_array_equal(state_of(other)[path], value, err_msg=str(path))


def fused(found):
    """Experts as one tensor a layer: the form that transformers runs."""
    for mlp in {name.split("experts.")[0] for name in found if ".experts." in name}:
        experts = len([name for name in found if name.startswith(f"{mlp}experts.") and "down" in name])
        take = lambda leaf: np.stack([found.pop(f"{mlp}experts.{e}.{leaf}_proj.weight") for e in range(experts)])  # noqa: E731
        found[f"{mlp}experts.gate_up_proj"] = np.concatenate([take("gate"), take("up")], axis=1)
        found[f"{mlp}experts.down_proj"] = take("down")


def in_a_larger_model(found):
    """The text model of a multimodal one, with what else is in it, and without the hashes, which the config gives."""
    for name in list(found):
        tensor = found.pop(name)
        if ".ple_embedding." not in name or "ngram_embedding" in name:
            found[name.replace("model.", "model.language_model.", 1)] = tensor
    found["model.visual.patch_embed.weight"] = found["mtp.layers.0.norm.weight"] = np.zeros(3, np.float32)


def whole_tables(found):
    for prefix in {name.split("shard_")[0] for name in found if ".shard_" in name}:
        shards = sorted(
            (n for n in found if n.startswith(f"{prefix}shard_")), key=lambda n: int(n.split("shard_")[1][:-7])
        )
        found[f"{prefix}weight"] = np.concatenate([found.pop(name) for name in shards])


def bfloat16(found):
    for name, tensor in found.items():
        found[name] = tensor.astype(jnp.bfloat16) if tensor.dtype == np.float32 else tensor


@pytest.mark.parametrize("layout", [fused, in_a_larger_model, whole_tables, bfloat16], ids=lambda f: f.__name__)
def test_other_layouts_of_the_same_tensors(golden, layout, tmp_path):
    folder, _, config, model = golden
    other_config, other = hf.import_model(rewrite(folder, tmp_path / "other", layout), overrides=FLOAT32)
    assert other_config.to_dict() == config.to_dict()
    for path, value in state_of(model).items():
        value = value.astype(jnp.bfloat16).astype(np.float32) if layout is bfloat16 else value
        np.testing.assert_array_equal(state_of(other)[path], value, err_msg=str(path))


def test_tensors_that_do_not_fit_are_listed_in_one_line(tmp_path):
    def change(found):
        del found["model.layers.0.linear_attn.A_log"], found["lm_head.weight"]
        found["model.layers.1.mlp.gate.weight"] = found["model.layers.1.mlp.gate.weight"][:-1].copy()
        found["model.layers.9.mlp.gate.weight"] = found["model.layers.3.extra"] = np.zeros(2, np.float32)

    folder = rewrite(GOLDENS / "qwen4_exp_hc4", tmp_path / "bad", change)
    with pytest.raises(UsageError) as e:
        hf.import_model(folder)
    line = str(e.value)
    assert "\n" not in line
    assert "2 missing: model.layers.0.linear_attn.A_log, lm_head.weight" in line
    assert "2 unknown: model.layers.3.extra, model.layers.9.mlp.gate.weight" in line
    assert "1 mis-shaped: model.layers.1.mlp.gate.weight [7, 16] instead of [8, 16]" in line


def test_other_hashes_are_refused(tmp_path):
    def change(found):
        found["model.layers.1.ple.ple_embedding.layer_multipliers"] += 2

    folder = rewrite(GOLDENS / "qwen4_exp_hc4", tmp_path / "bad", change)
    with pytest.raises(UsageError, match="layer_multipliers is not what its config.json gives"):
        hf.import_model(folder)


@pytest.mark.parametrize("rows_left", [0, 3])
def test_a_table_that_is_not_whole_is_refused(rows_left, tmp_path):
    def change(found):
        name = "model.layers.0.ple.ple_embedding.ngram_embedding.shard_10.weight"
        shard = found.pop(name)
        if rows_left:
            found[name] = shard[:rows_left].copy()

    folder = rewrite(GOLDENS / "qwen4_exp_hc3", tmp_path / "bad", change)
    with pytest.raises(
        UsageError, match="shards of model.layers.0.ple.ple_embedding.ngram_embedding have .* rows instead of"
    ):
        hf.import_model(folder)


def test_what_the_checkpoint_says_is_not_overridden():
    with pytest.raises(UsageError, match="model.layers='2': is the checkpoint's own \\(8\\): leave it out"):
        hf.import_model(GOLDENS / "qwen4_exp_hc4", overrides=["model.layers=2"])


def with_config(source, folder, change) -> pathlib.Path:
    """A copy of the checkpoint at `source` whose config.json has `change`; ABSENT takes a field out."""
    shutil.copytree(source, folder)
    there = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps({k: v for k, v in there.items() if v != ABSENT}))
    return folder


def said(folder, capsys) -> str:
    """What the command line says of what is no checkpoint: one line, and status 2."""
    assert launch.main(["analyze", f"--hf={folder}"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
    return err


ABSENT = "absent"
ROPE = {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "rope_type": "default"}


@pytest.mark.parametrize(("change", "line"), [
    ({"model_type": "llama"}, "{file}: model_type='llama': known: qwen4_exp, qwen4_exp_text, deepseek_v4"),
    ({"model_type": ABSENT}, "{file}: model_type=None: known: qwen4_exp"),
    ({"text_config": None}, "text_config=None: must be an object in {file}"),
    ({"text_config": "qwen"}, "text_config='qwen': must be an object in {file}"),
    ({"output_gate_type": "silu"}, "output_gate_type='silu': this model has 'sigmoid' alone"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings=True: this model has False alone"),
    ({"layer_types": ["sliding"] * 8}, "{file}: layer_types='sliding': known: linear_attention, full_attention, index"),
    ({"layer_types": [["gdn"]] * 8}, "{file}: layer_types=['gdn']: known: linear_attention"),
    ({"layer_types": 3}, "layer_types=3: must be a list in {file}"),
    ({"num_hidden_layers": 4}, "num_hidden_layers=4: must be 8, as many as there are layer_types in {file}"),
    ({"num_experts": ABSENT}, "num_experts=None: is missing in {file}"),
    ({"hidden_size": None}, "hidden_size=None: is missing in {file}"),
    ({"hidden_size": "16"}, "hidden_size='16': must be a whole number in {file}"),
    ({"hidden_size": 16.5}, "hidden_size=16.5: must be a whole number in {file}"),
    ({"hidden_size": True}, "hidden_size=True: must be a whole number in {file}"),
    ({"vocab_size": 0}, "vocab_size=0: must be above 0 in {file}"),
    ({"hc_count": "4"}, "hc_count='4': must be a whole number in {file}"),
    ({"hc_count": 1}, "residual.streams=1: GR needs at least 2; n = 1 is GatedNorm (by {file})"),
    ({"seed": None}, "seed=None: is missing in {file}"),
    ({"linear_num_value_heads": 3}, "model.gdn.value_heads=3: must be a multiple of model.gdn.key_heads=2 (by {file})"),
    ({"rms_norm_eps": "1e-6"}, "rms_norm_eps='1e-6': must be a number in {file}"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan: must be finite in {file}"),
    ({"rms_norm_eps": 10**400}, "must be finite in {file}"),
    ({"router_aux_loss_coef": -1}, "model.moe.balance=-1.0: must not be negative (by {file})"),
    ({"rope_parameters": {}}, "rope_parameters.rope_theta=None: is missing in {file}"),
    ({"rope_parameters": "yarn"}, "rope_parameters='yarn': must be an object in {file}"),
    ({"rope_parameters": [1]}, "rope_parameters=[1]: must be an object in {file}"),
    ({"rope_parameters": None}, "rope_parameters=None: is missing in {file}"),
    ({"rope_parameters": ROPE | {"rope_theta": [1]}}, "rope_parameters.rope_theta=[1]: must be a number in {file}"),
    ({"rope_parameters": ROPE | {"partial_rotary_factor": 0.3}}, "model.rope_fraction=0.3: RoPE turns channels in"),
    ({"ple_layer_ids": 2}, "ple_layer_ids=2: must be a list in {file}"),
    ({"ple_layer_ids": ["a"]}, "model.ngram.layers='a': layers from 1 to 8 in order, separated by commas"),
    ({"eos_token_id": ["</s>"]}, "eos_token_id='</s>': must be a whole number or a list of them in {file}"),
    ({"eos_token_id": []}, "eos_token_id=[]: must be a whole number or a list of them in {file}"),
], ids=lambda v: str(v)[:40])  # fmt: skip
def test_what_a_config_must_not_say_is_one_line(change, line, tmp_path, capsys):
    folder = with_config(GOLDENS / "qwen4_exp_hc4", tmp_path / "other", change)
    assert line.format(file=folder / "config.json") in said(folder, capsys)


def test_a_whole_model_is_a_qwen4_exp():
    with pytest.raises(UsageError, match="config.json: model_type='deepseek_v4': known: qwen4_exp, qwen4_exp_text$"):
        hf.import_model(DEEPSEEK)


@pytest.mark.parametrize(("change", "line"), [
    *(({name: value}, f"{name}={shown}: {line} in {{file}}")
      for name in ("hc_mult", "hc_sinkhorn_iters", "hidden_size", "num_hidden_layers")
      for value, shown, line in (
          (ABSENT, "None", "is missing"), (None, "None", "is missing"), ("4", "'4'", "must be a whole number"),
          (3.5, "3.5", "must be a whole number"), (0, "0", "must be above 0"), (-3, "-3", "must be above 0"))),
    ({"rms_norm_eps": ABSENT}, "rms_norm_eps=None: is missing in {file}"),
    ({"rms_norm_eps": None}, "rms_norm_eps=None: is missing in {file}"),
    ({"rms_norm_eps": [1]}, "rms_norm_eps=[1]: must be a number in {file}"),
    ({"rms_norm_eps": 0}, "rms_norm_eps=0.0: must be above 0 in {file}"),
    ({"rms_norm_eps": -1e-6}, "rms_norm_eps=-1e-06: must be above 0 in {file}"),
    ({"hc_eps": 1e-3}, "{file}: hc_eps=0.001: this model has 1e-06 alone"),
    ({"hc_eps": "1e-6"}, "hc_eps='1e-6': must be a number in {file}"),
    ({"text_config": None}, "text_config=None: must be an object in {file}"),
], ids=lambda v: str(v)[:40])  # fmt: skip
def test_what_a_config_of_deepseek_must_not_say_is_one_line(change, line, tmp_path, capsys):
    folder = with_config(DEEPSEEK, tmp_path / "other", change)
    assert line.format(file=folder / "config.json") in said(folder, capsys)


def test_what_is_no_checkpoint_is_one_line(tmp_path, capsys):
    local = "give a local folder with config.json and *.safetensors (download it first)"
    assert f"--hf='Qwen/Qwen3.8-Flash-Next': {local}" in said("Qwen/Qwen3.8-Flash-Next", capsys)
    assert local in said(GOLDENS / "qwen4_exp_hc4" / "config.json", capsys)
    assert "there is no config.json" in said(tmp_path, capsys)
    (tmp_path / "config.json").write_text("{}")
    assert "has no *.safetensors file\n" in said(tmp_path, capsys)
    (tmp_path / "pytorch_model.bin").touch()
    assert "has no *.safetensors file but *.bin: convert it to safetensors" in said(tmp_path, capsys)
    (tmp_path / "model.safetensors").write_bytes(b"not a safetensors file")
    assert "model.safetensors cannot be read" in said(tmp_path, capsys)


@pytest.mark.parametrize("index", [
    [], {}, {"weight_map": None}, {"weight_map": ["model.safetensors"]}, {"weight_map": {"lm_head.weight": 1}}
], ids=str)  # fmt: skip
def test_a_malformed_index_is_one_line(index, tmp_path, capsys):
    folder = rewrite(GOLDENS / "qwen4_exp_hc4", tmp_path / "other", lambda found: None)
    (folder / tensors.INDEX).write_text(json.dumps(index))
    assert f"{tensors.INDEX} has no weight_map from tensors to files" in said(folder, capsys)


def test_a_file_that_the_index_names_must_be_there(tmp_path, capsys):
    folder = rewrite(GOLDENS / "qwen4_exp_hc4", tmp_path / "other", lambda found: None)
    names = {"lm_head.weight": "model-2.safetensors", "model.embed_tokens.weight": "model.safetensors"}
    (folder / tensors.INDEX).write_text(json.dumps({"weight_map": names}))
    assert f"model-2.safetensors of {tensors.INDEX} is not there: download it" in said(folder, capsys)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "I8"])
def test_a_quantised_tensor_is_one_line(dtype, tmp_path, capsys):
    """In a file of its own: numpy has no such dtype to write it from."""
    name, kept = "model.layers.2.mlp_hyper_connection.hc_norm.weight", {}
    folder = rewrite(GOLDENS / "qwen4_exp_hc4", tmp_path / "other", lambda found: kept.update({name: found.pop(name)}))
    content = kept[name].astype(np.int8).tobytes()
    entry = {name: {"dtype": dtype, "shape": kept[name].shape, "data_offsets": [0, len(content)]}}
    header = json.dumps(entry).encode()
    (folder / "other.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + content)
    assert f"{name} is {dtype}: a dtype that is not read, convert the checkpoint" in said(folder, capsys)
    with pytest.raises(UsageError, match=f"{name} is {dtype}"):
        tensors.TensorFolder(folder).read(name)


def test_only_a_qwen4_exp_is_exported(golden, tmp_path):
    _, _, config, model = golden
    for field, value in (("residual.mix", "free"), ("model.output_gate", False), ("model.moe.shared", 0)):
        other = config.copy_and_resolve_references()
        other.update_from_flattened_dict({field: value})
        with pytest.raises(UsageError, match=f"{field}=.* a qwen4_exp has"):
            hf.export_model(other, model, tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(UsageError, match="is not empty"):
        hf.export_model(config, model, tmp_path / "full")


@pytest.fixture
def read(monkeypatch):
    """The names of the tensors that are read."""
    names, original = [], tensors.TensorFolder.read
    monkeypatch.setattr(tensors.TensorFolder, "read", lambda self, name: (names.append(name), original(self, name))[1])
    return names


def test_a_model_on_a_mesh_is_read_by_its_rules(golden, read):
    """Each parameter is made where its sharding says, part by part, and is the same."""
    folder, _, config, model = golden
    mesh = parallel.make_mesh({"data": 1, "fsdp": -1, "tensor": 1, "expert": 1})
    _, other = hf.import_model(folder, mesh, FLOAT32)
    assert other.embedding.get_value().sharding.spec == PartitionSpec("tensor", "fsdp")
    for path, value in state_of(model).items():
        np.testing.assert_array_equal(state_of(other)[path], value, err_msg=str(path))


def test_a_part_of_a_parameter_is_read_from_its_tensors_alone(read):
    """Of experts stacked over layers, experts 2 and 3 of the second period: two tensors."""
    folder = tensors.TensorFolder(GOLDENS / "qwen4_exp_hc4")
    config, vocab, separator = qwen4_config.read_config(folder)
    _, model = hf.import_model(GOLDENS / "qwen4_exp_hc4")
    layout = qwen4_exp.layout(folder, config, vocab)
    parameters = tensors.Parameters(folder, list(layout.tensors(model)))
    path = ("stacks", 1, "layers", 0, "moe", "up")
    shape = dict(nnx.to_flat_state(nnx.state(model)))[path].shape
    read.clear()
    part = parameters.part(path, shape, (slice(None), slice(2, 4), slice(None), slice(1, 3)))
    assert read == [f"model.layers.4.mlp.experts.{e}.up_proj.weight" for e in (2, 3)]
    np.testing.assert_array_equal(part, state_of(model)[path][:, 2:4, :, 1:3])


def test_the_residual_part_alone(golden, read):
    """Every site and the final read are the whole model's; no other tensor is read."""
    folder, _, config, model = golden
    part = hf.import_residual(folder)
    assert {name.split(".")[-2] for name in read} == {
        "hc_norm", "input_mix_weight_down", "input_mix_weight_up", "block_inject_weight"
    }  # fmt: skip
    assert len(part.sites) == 2 * config.model.layers
    whole = state_of(model)
    places = [(s, i, p) for s, stack in enumerate(model.stacks) for i in range(stack.periods) for p in range(4)]
    for layer, (s, i, p) in enumerate(places):
        mixer, feed_forward = model.stacks[s].layers[p].sublayers
        for k, name in enumerate((mixer, feed_forward)):
            for path, value in state_of(part.sites[2 * layer + k]).items():
                there = whole[("stacks", s, "layers", p, f"{name}_site", *path)][i]
                np.testing.assert_array_equal(value, there, err_msg=f"{layer} {name} {path}")
    for path, value in state_of(part.system).items():
        np.testing.assert_array_equal(value, whole[("residual", *path)])


def test_deepseeks_residual_part_alone(read):
    """The maps of every site and the head are those that transformers' modules made of the same streams."""
    part = hf.import_residual(DEEPSEEK)
    assert all("hc_" in name or name.endswith("norm.weight") for name in read)
    assert not any("attn." in name or "ffn." in name for name in read)
    with np.load(DEEPSEEK / "expected.npz") as arrays:
        expected = dict(arrays)
    for k, site in enumerate(part.sites):
        name = f"layers.{k // 2}.{'ffn' if k % 2 else 'attn'}_hc"
        stream = expected[f"{name}/stream"]
        pre, post, res = site.maps(stream)
        assert error(post, expected[f"{name}/post"]) < 1e-6
        assert error(np.swapaxes(res, -1, -2), expected[f"{name}/comb"]) < 1e-6
        assert error(np.einsum("btn,btnd->btd", pre, stream), expected[f"{name}/collapsed"]) < 1e-6
    weights = part.system
    weights.final_norm = lambda x_BxTxD: x_BxTxD  # their head is without the final norm
    assert error(weights.collapse(expected["hc_head/stream"]), expected["hc_head/collapsed"]) < 1e-6
    norm = read_all(DEEPSEEK)["model.layers.1.ffn_norm.weight"]
    np.testing.assert_allclose(part.sites[3].norm.gain[...], norm - 1, rtol=1e-6)


@pytest.mark.parametrize("name", [*QWEN, DEEPSEEK.name])
def test_analyze_prints_a_line_a_site(name, capsys):
    """The ranges and norms that it prints are those of the tensors."""
    assert launch.main(["analyze", f"--hf={GOLDENS / name}"]) == 0
    title, heading, *lines = capsys.readouterr().out.splitlines()
    found = read_all(GOLDENS / name)
    layers = json.loads((GOLDENS / name / "config.json").read_text())["num_hidden_layers"]
    assert len(lines) == 2 * layers + 1 and lines[-1].startswith("end")
    assert f"{2 * layers} sites" in title
    line = next(line for line in lines if line.startswith("1 ffn"))
    if name == DEEPSEEK.name:
        rows_ = found["model.layers.1.hc_ffn_fn"]
        assert "|phi_pre|" in heading and f"{np.linalg.norm(rows_[:4]):.3g}" in line
        base = found["model.layers.1.hc_ffn_base"][:4]
        assert f"{base.min():.3g} … {base.max():.3g}" in line
    else:
        block = "model.layers.1.mlp_hyper_connection"
        gain = 1 + found[f"{block}.hc_norm.weight"]
        assert f"{gain.min():.3g} … {gain.max():.3g}" in line and "1 + gain" in heading
        for tensor in ("input_mix_weight_down", "input_mix_weight_up", "block_inject_weight"):
            assert f"{np.linalg.norm(found[f'{block}.{tensor}.weight']):.3g}" in line


def test_an_imported_model_trains(golden):
    """Its config is that of a run: a step of training changes it, in bf16 as it comes."""
    folder, _, _, _ = golden
    config, model = hf.import_model(folder)
    tokens_BxT = rows.tokens(2, 32) % config.model.vocab
    graphdef, params = nnx.split(model)

    def loss(params):
        logits, statistics = nnx.merge(graphdef, params).with_statistics(tokens_BxT)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1)) + nnx.merge(graphdef, params).auxiliary_loss(statistics)

    grads = jax.jit(jax.grad(loss))(params)
    assert all(bool(jnp.all(jnp.isfinite(g))) for g in jax.tree.leaves(grads))
