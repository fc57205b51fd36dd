"""The preflight's look at a checkpoint: damaged files, and tensors that are missing, skipped or of another shape."""

import json
import os
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

import runner
from conformance.meta.looking import free, stops, tensors_of, write
from shim.vllm_plugin import checkpoint, sizes
from shim.vllm_plugin.dtype import served_dtype
from shim.vllm_plugin.serve import BUNDLED, USAGE, Options, find_model

QWEN3_NEXT = json.loads((BUNDLED / "config.json").read_text())


# ---- the checkpoint --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "has 6502936 bytes, in truth 6502935"),
        (lambda file: file.write_bytes(file.read_bytes() + b"x"), "is damaged: by its header it has 6502936"),
        (lambda file: file.write_bytes(file.read_bytes()[:5000]), "its header needs 28136 bytes, it has 5000"),
        (lambda file: file.write_bytes(b""), "no header in its 0 bytes"),
        (lambda file: file.write_bytes(b"\xff" * 100), "no header in its 100 bytes"),
        (lambda file: file.write_bytes(b"version https://git-lfs"), "a Git LFS pointer of 23 bytes"),
        (lambda file: file.write_bytes(file.read_bytes().replace(b'"F16"', b'"F32"', 1)), "damaged header: ValueError"),
        (lambda file: file.write_bytes(file.read_bytes().replace(b"{", b"[", 1)), "damaged header: JSONDecodeError"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(look, model, change, words):
    change(model / "model.safetensors")
    stops(look()[1], "checkpoint", str(model / "model.safetensors"), words)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda file: file.symlink_to("/nowhere/weights"), "is no file"),
        (lambda file: file.symlink_to(file), "no file"),
        (lambda file: file.mkdir(), "is no file"),
        (os.mkfifo, "is no file"),
        (lambda file: file.write_bytes((9999).to_bytes(8, "little") + b"[" * 9999), "damaged header: RecursionError"),
    ],
)
def test_what_is_no_file_stops_and_nobody_waits_for_it(look, model, make, words):
    (model / "model.safetensors").unlink()
    make(model / "model.safetensors")
    stops(look()[1], "checkpoint", str(model / "model.safetensors"), words)


def test_an_index_that_is_no_file_is_named(look, model):
    (model / checkpoint.INDEX).mkdir()
    stops(look()[1], "checkpoint", checkpoint.INDEX, "is not an index")


def test_whole_numbers_are_no_weights(look, model):
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"F16"', b'"I16"', 1))
    stops(look()[1], "checkpoint", "1 of another shape", "is of I16, a model that is not quantized has F16, BF16")


def test_tensors_that_share_bytes_are_a_damaged_header(tmp_path):
    header = {name: {"dtype": "U8", "shape": [16], "data_offsets": [at, at + 16]} for name, at in (("a", 0), ("b", 8))}
    text = json.dumps(header).encode()
    (tmp_path / "f.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(24))
    with pytest.raises(checkpoint.CheckpointError, match="damaged header: ValueError: b of U8 .16. at bytes 8 to 24"):
        checkpoint.read(tmp_path)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"weight_map": {"lm_head.weight": "model-2.safetensors"}}, "names model-2.safetensors, which is not there"),
        ({"weight_map": {"other": "model.safetensors"}}, "says that other is in model.safetensors, which does not"),
        ({"weight_map": ["a"]}, "is not an index: expected JSON with a weight_map"),
        ({"weight_map": {"a": "../../etc/passwd"}}, "is not an index"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_named(look, model, index, words):
    (model / checkpoint.INDEX).write_text(json.dumps(index))
    stops(look()[1], "checkpoint", checkpoint.INDEX, words)


def test_missing_tensors_are_listed_with_counts_and_bytes(look, model):
    kept = {name: one for name, one in tensors_of(model).items() if "mlp.experts.3.up_proj" not in name}
    write(model / "model.safetensors", kept)
    told = look()[1]
    stops(told, "checkpoint", "4 tensors (64.0 KiB) missing")
    assert told["checkpoint"][0].lines == ("model.layers.{0-3}.mlp.experts.3.up_proj.weight: 4 tensors, 64.0 KiB",)


def test_drafts_are_skipped_and_strangers_stop_strict(look, model):
    own = tensors_of(model)
    draft = {"mtp.layers.0.fc.weight": ("F16", (64, 64)), "mtp.norm.weight": ("F16", (64,))}
    write(model / "model.safetensors", own | draft)
    told = look()[1]
    free(told)
    assert "2 tensors (8.1 KiB) of drafts" in told["checkpoint"][0].text
    assert told["checkpoint"][0].lines == (
        "mtp.layers.0.fc.weight: 8.0 KiB",
        "mtp.norm.weight: 128 bytes",
    )
    write(model / "model.safetensors", own | {"model.layers.4.extra.weight": ("F16", (8,))})
    stops(look()[1], "checkpoint", "1 tensor (16 bytes) that the model has no parameter for")
    free(look(policy="auto")[1])


def test_a_tensor_of_another_shape_is_named_with_both(look, edit):
    edit(vocab_size=1000)
    stops(look()[1], "checkpoint", "2 of another shape", "[1536, 128], the model's is [1000, 128]")


def test_an_architecture_without_a_table_is_said_to_be_not_compared(look, edit):
    edit(architectures=["Qwen3MoeForCausalLM"])
    _, told = look()
    free(told)
    assert told["checkpoint"][0].text.endswith(
        "not compared with the model's parameters: no table for Qwen3MoeForCausalLM"
    )


@pytest.mark.parametrize("name", ["decoder_sparse_step", "mlp_only_layers", "tie_word_embeddings", "layer_types"])
def test_a_field_that_is_null_is_one_that_is_absent(look, model, name):
    (model / "config.json").write_text(json.dumps(QWEN3_NEXT | {name: None}))
    assert look()[1]["checkpoint"][0].text == "250 tensors, 6.2 MiB, 1 file; all 250 of the model are there"


@pytest.mark.parametrize(
    ("name", "row"), [("decoder_sparse_step", "checkpoint"), ("max_position_embeddings", "KV cache")]
)
def test_a_list_where_one_number_is_needed_is_named(look, edit, name, row):
    edit(**{name: [1, 2]})
    assert look()[1][row][0].text == f"not checked, as config.json has a {name} per layer"


QWEN3_5 = QWEN3_NEXT | {"model_type": "qwen3_5_moe_text"}
QWEN3_5_LAYER = {
    "linear_attn.in_proj_qkv.weight": (1024, 128),
    "linear_attn.in_proj_z.weight": (512, 128),
    "linear_attn.in_proj_b.weight": (4, 128),
    "linear_attn.in_proj_a.weight": (4, 128),
    "mlp.experts.gate_up_proj": None,
    "mlp.shared_expert_gate.weight": (1, 128),
}


def test_qwen3_5_has_its_projections_apart_and_its_experts_in_one_piece():
    s = sizes.read({"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": QWEN3_5})
    needed = checkpoint.parameters(s, "Qwen3_5MoeForConditionalGeneration", ["x.mlp.experts.gate_up_proj"])
    for name, shape in QWEN3_5_LAYER.items():
        assert needed[f"model.layers.0.{name}"] == shape
    assert not [name for name in needed if "qkvz" in name or "experts.0." in name]
    dense = checkpoint.parameters(s, "Qwen3_5ForCausalLM", ())
    assert dense["model.layers.0.mlp.gate_proj.weight"] == (128, 128) and not [
        name for name in dense if "experts" in name
    ]


@pytest.mark.parametrize(("text_only", "skipped"), [(True, 1), (False, 0)])
def test_the_vision_tower_is_told_apart_and_prefixes_are_seen_through(text_only, skipped):
    architecture = "Qwen3_5MoeForConditionalGeneration"
    needed = {"model.norm.weight": (4,), "lm_head.weight": (2, 4)}
    one = checkpoint.Stored("f", "F16", (4,), 8)
    stored = {"model.language_model.norm.weight": one, "model.visual.patch.weight": one}
    found = checkpoint.compare(stored, needed, architecture, 2, text_only)
    assert found.missing == {"lm_head.weight": 16} and not found.unknown
    assert (len(found.skipped), len(found.vision)) == (skipped, 1 - skipped)


def test_a_table_has_every_parameter_of_vllms_own_model():
    """The bundled checkpoint is one that vLLM loads whole: what the table needs is what is in it."""
    s = sizes.read(QWEN3_NEXT)
    stored = checkpoint.read(BUNDLED)
    assert checkpoint.parameters(s, "Qwen3NextForCausalLM", stored) == {name: one.shape for name, one in stored.items()}


# ---- the dtype that is served ------------------------------------------------------------------------------------------

SERVED = [  # of the whole configuration, of its text part, of the weights, options -> what vLLM serves in
    ({"dtype": "float16"}, {}, "BF16", [], "float16"),
    ({"torch_dtype": "float16"}, {"dtype": "bfloat16"}, "BF16", [], "float16"),
    ({"dtype": "bfloat16", "torch_dtype": "float16"}, {}, "F16", [], "bfloat16"),
    ({}, {"torch_dtype": "float16"}, "BF16", [], "float16"),
    ({}, {}, "F16", [], "float16"),
    ({}, {}, "BF16", [], "bfloat16"),
    ({}, {}, "F16 F32", [], "bfloat16"),
    ({}, {}, "F16 I64", [], "float16"),
    ({}, {}, "", [], "bfloat16"),
    ({"dtype": "float32"}, {}, "F16", [], "bfloat16"),
    ({"dtype": "float32"}, {}, "F16", ["--runner", "pooling"], "float16"),
    ({}, {}, "F32", ["--convert", "embed"], "float16"),
    ({"dtype": "float16"}, {}, "F16", ["--dtype", "float"], "float32"),
    ({"dtype": "half"}, {}, "BF16", [], "float16"),
    ({"torch_dtype": "float"}, {}, "F16", [], "bfloat16"),
    ({"dtype": "float64"}, {}, "F16", [], "bfloat16"),
    ({"dtype": "int8"}, {}, "F16", [], "bfloat16"),
    ({"dtype": "float64"}, {}, "BF16", ["--runner", "pooling"], "float16"),
    ({"dtype": "float16"}, {}, "F16", ["--hf-overrides", '{"dtype": "float16"}'], "bfloat16"),
    ({}, {}, "F16", ["--hf-overrides.torch_dtype", "float16"], "bfloat16"),
    ({}, {}, "F16", ["--hf-overrides.text_config.dtype", "float16"], "bfloat16"),
    ({"dtype": "float16"}, {}, "F16", ["--hf-overrides.text_config.dtype", "bfloat16"], "float16"),
    ({"dtype": "bfloat16"}, {}, "F16", ["--hf-overrides", '{"dtype": null}'], "float16"),
]


@pytest.fixture(params=SERVED)
def served(request, tmp_path):
    """(a model's folder, options, the dtype that is served)"""
    whole, text, stored, options, expected = request.param
    config = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe"}
    config |= {"text_config": {"model_type": "qwen3_5_moe_text"} | text}
    (tmp_path / "config.json").write_text(json.dumps(config | whole))
    write(tmp_path / "model.safetensors", {dtype: (dtype, (1,)) for dtype in stored.split()})
    return tmp_path, Options(options), expected


def test_the_dtype_is_looked_for_where_vllm_does(served):
    folder, options, expected = served
    assert served_dtype(find_model(str(folder), overrides=options.fields("--hf-overrides")), options) == expected


@pytest.mark.xdist_group("vllm")
def test_vllm_serves_in_that_dtype(served):
    pytest.importorskip("vllm")
    from vllm.config.model import ModelConfig, _get_and_verify_dtype
    from vllm.transformers_utils.config import get_config

    folder, options, expected = served
    asked = options.get("--dtype") or "auto"
    pooling = bool({"--runner", "--convert"} & {*options.given})
    overrides = options.fields("--hf-overrides")
    parts = {name: overrides.pop(name) for name in [*overrides] if isinstance(overrides[name], dict)}
    config = get_config(folder, trust_remote_code=False, hf_overrides_kw=overrides)
    object.__new__(ModelConfig)._apply_dict_overrides(config, parts)
    assert str(_get_and_verify_dtype(str(folder), config, asked, is_pooling_model=pooling)) == f"torch.{expected}"


def test_float16_of_the_weights_alone_is_seen_by_the_preflight(look, edit):
    edit(dtype=None)
    _, told = look()
    free(told)
    assert "in float16: 12 of 12 ops take them" in told["shapes"][0].text


def test_the_hub_is_asked_for_the_revision_that_is_served(monkeypatch, tmp_path):
    asked = []

    def download(name, file, revision=None):
        asked.append((name, file, revision))
        (tmp_path / file).write_text(json.dumps(QWEN3_NEXT | {"dtype": None}))
        return str(tmp_path / file)

    def metadata(name, revision=None):
        asked.append((name, "weights", revision))
        return SimpleNamespace(parameter_count={"F16": 3})

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.get_safetensors_metadata", metadata)
    model = find_model("somebody/a-model", revision="v2")
    assert served_dtype(model, Options(["--revision", "v2"])) == "float16"
    assert asked == [("somebody/a-model", "config.json", "v2"), ("somebody/a-model", "weights", "v2")]


def test_serve_asks_the_hub_for_the_revision_that_it_was_given(monkeypatch):
    def download(name, file, revision=None):
        raise RuntimeError(f"no {file} in {revision} of {name}")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    result = CliRunner().invoke(runner.main, ["serve", "somebody/a-model", "--revision", "v2", "--dry-run"])
    assert result.exit_code == USAGE and "no config.json in v2 of somebody/a-model" in result.stderr
