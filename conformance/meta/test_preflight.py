"""What `serve` finds out before the engine is built: every finding, and everything that must stop it, with its words."""

import json
import socket
import sys
from typing import get_args

import pytest
import torch
from click.testing import CliRunner

import runner
import shim
from conformance.meta.looking import Imports, free, stops
from conformance.serving.engines import free_port
from shim.certificates import Certificate
from shim.vllm_plugin import arguments, honoured, model_class, preflight, preflight_model, sizes
from shim.vllm_plugin.models import LINEAR, ops_for_model
from shim.vllm_plugin.serve import BUNDLED, UNSERVED, USAGE, Options

QWEN3_NEXT = json.loads((BUNDLED / "config.json").read_text())


# ---- nothing stands in the way ---------------------------------------------------------------------------------------


def test_the_bundled_model_has_a_finding_of_each_kind_and_none_that_stops(look):
    plan, told = look()
    free(told)
    assert list(told) == [*(name for name in preflight.CHECKS if name != "nodes"), "model class", "options"]
    assert all(len(findings) == 1 for findings in told.values())
    text = {name: findings[0].text for name, findings in told.items()}
    assert "cores" in text["device"] and "of memory" in text["device"]
    assert "libopshim_cpu.so" in text["libraries"] and "none certified" in text["libraries"]
    assert "heads of 256" in text["shapes"] and text["shapes"].endswith("12 of 12 ops take them")
    assert text["checkpoint"].startswith("250 tensors, 6.2 MiB, 1 file; all 250")
    assert plan.max_model_len is None


def test_one_op_is_counted_as_one(look, monkeypatch):
    monkeypatch.setenv("OPSHIM_PROVIDER", "moe_sum=reference")
    (one,) = look()[1]["libraries"]
    assert "11 ops by libopshim_cpu.so" in one.text and ", 1 op by reference;" in one.text


def test_an_op_whose_conform_failed_is_named(look, monkeypatch):
    plan, told = look()
    assert "found failures" not in told["libraries"][0].text
    (chain,) = (chain for chain in plan.chains if chain.op.name == "moe_sum")
    monkeypatch.setattr(chain.selected, "certificate", Certificate("not certified: 1 of 2 cases failed", failed=True))
    (one,) = preflight.libraries(plan)
    assert one.text.endswith("; none certified for it; `conform` found failures in moe_sum")


def test_a_dry_run_prints_all_and_says_so(scratch):
    result = CliRunner().invoke(runner.main, ["serve", "--dry-run", "--port", str(free_port())])
    assert result.exit_code == 0, result.output
    *_, command, last = result.stdout.splitlines()
    assert f" {sys.executable} -m shim.vllm_plugin.launch {BUNDLED} " in command
    assert last == "opshim: dry run: nothing stands in the way, nothing is started"
    assert "qwen3_next.py of vLLM imports" in result.stdout
    assert "tokenizer    vLLM loads it from " in result.stdout and "engine       vLLM configures it" in result.stdout
    for folder in ("imports", "arguments"):
        assert list((scratch / "cache" / folder).iterdir()), "the next start would import it again"


def test_a_dry_run_ends_with_the_code_of_what_stands_in_the_way(model, monkeypatch):
    monkeypatch.setattr(preflight, "ImportCheck", Imports)
    monkeypatch.setattr(arguments, "Verdict", lambda *of: None)
    with (model / "model.safetensors").open("r+b") as file:
        file.truncate(1_000_000)
    result = CliRunner().invoke(runner.main, ["serve", str(model), "--dry-run", "--port", str(free_port())])
    assert result.exit_code == USAGE
    assert len(result.stderr.splitlines()) == 1
    assert "model.safetensors is cut short: by its header it has 6502936 bytes, in truth 1000000" in result.stderr


def test_a_dry_run_has_a_row_for_a_port_in_use_beside_all_others(scratch, monkeypatch):
    monkeypatch.setattr(preflight, "ImportCheck", Imports)
    monkeypatch.setattr(arguments, "Verdict", lambda *of: None)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        result = CliRunner().invoke(runner.main, ["serve", "--dry-run", "--port", str(port)])
    told = f"cannot listen on 127.0.0.1 port {port}: Address already in use"
    assert (result.exit_code, result.stderr) == (USAGE, f"opshim: nothing is started: port: {told}\n")
    assert result.stdout.splitlines()[-1] == f"  port         STOP: {told}" and "  KV cache     1.0 GiB" in result.stdout


@pytest.mark.parametrize("given", [["--require-certified"], ["--dtype", "float32", "--max-model-len", "5000"]])
def test_that_nothing_is_started_is_told_on_stderr_whatever_the_reason(scratch, monkeypatch, given):
    monkeypatch.setattr(preflight, "ImportCheck", Imports)
    monkeypatch.setattr(arguments, "Verdict", lambda *of: None)
    result = CliRunner().invoke(runner.main, ["serve", "--dry-run", "--port", str(free_port()), *given])
    assert result.exit_code == (UNSERVED if given == ["--require-certified"] else USAGE)
    assert result.stderr.startswith("opshim: nothing is started: ") and len(result.stderr.splitlines()) == 1
    assert "nothing is started" not in result.stdout


def test_a_model_named_by_an_empty_text_is_not_the_bundled_one():
    result = CliRunner().invoke(runner.main, ["serve", "", "--dry-run"])
    assert result.exit_code == USAGE and "empty text" in result.stderr


def test_a_short_option_with_its_value_in_one_is_seen(look):
    stops(look("-qawq")[1], "options", "-q awq")
    assert "-O" in Options(["-O3"]) and Options(["-O3"]).get("-O") == "3"
    assert Options(["-tp", "2", "--x", "-1"]).get("-q") is None
    assert "--x" not in Options(["--x", "--no-x"]) and "--x" in Options(["--no-x", "--x"])


# ---- config.json -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("architectures", 5, "a list of names"),
        ("architectures", ["Qwen3NextForCausalLM", 3], "a list of names"),
        ("num_hidden_layers", "x", "a whole number from 1 on"),
        ("num_hidden_layers", True, "a whole number from 1 on"),
        ("num_hidden_layers", 3, "layer_types must be a list of 3 names"),
        ("num_attention_heads", 0, "a whole number from 1 on"),
        ("num_experts", -1, "a whole number from 0 on"),
        ("intermediate_size", [128, "x"], "a whole number from 0 on"),
        ("head_dim", 2.5, "a whole number from 1 on"),
        ("layer_types", 7, "a list of names"),
        ("num_hidden_layers", 10**9, "at most 10,000"),
        ("num_attention_heads", 10**9, "at most 10,000"),
        ("mlp_only_layers", "abc", "a list of layers"),
        ("quantization_config", "awq", "an object"),
        ("text_config", [1], "an object"),
        ("dtype", 16, "a name"),
    ],
)
def test_a_field_of_another_kind_is_named_in_one_line(model, edit, field, value, expected):
    edit(**{field: value})
    result = CliRunner().invoke(runner.main, ["serve", str(model), "--dry-run", "--port", str(free_port())])
    assert result.exit_code == USAGE and len(result.stderr.splitlines()) == 1, result.output
    assert expected in result.stderr and "config.json" in result.stderr and field in result.stderr or value == 3


@pytest.mark.parametrize("text", ["[" * 100_000, '{"vocab_size": ' + "9" * 5000 + "}", "{", "\ufeff{}"])
def test_what_python_cannot_read_as_json_is_told_in_one_line(model, text):
    (model / "config.json").write_text(text, encoding="utf-8")
    result = CliRunner().invoke(runner.main, ["serve", str(model), "--dry-run", "--port", str(free_port())])
    assert result.exit_code == USAGE and len(result.stderr.splitlines()) == 1, result.output
    assert "config.json" in result.stderr and "is not JSON" in result.stderr


@pytest.mark.parametrize("dtype", ["float13", "torch.float16", "Tensor"])
def test_a_dtype_that_no_op_takes_is_one_finding(look, edit, dtype):
    edit(dtype=dtype)
    stops(look()[1], "shapes", f"config.json has the dtype {dtype}: expected float16", code=UNSERVED)


def test_an_unknown_dtype_among_the_options_is_one_finding(look):
    stops(look("--dtype", "foo")[1], "options", "--dtype foo")


def test_heads_that_ranks_cannot_share_stop(look, monkeypatch, tmp_path):
    monkeypatch.setattr(preflight, "NODES", tmp_path)
    told = look("-tp", "3", environ={"VLLM_CPU_OMP_THREADS_BIND": "0|1|2"})[1]
    stops(told, "shapes", "2 heads of attention cannot be shared by 3 ranks")


def test_a_head_size_that_is_not_given_is_that_of_transformers(look, edit):
    edit(head_dim=None)
    plan, told = look()
    free(told)
    assert plan.sizes.head == 256


@pytest.mark.parametrize("fields", [{"kv_lora_rank": 512}, {"model_type": "mamba2"}])
def test_a_model_that_uses_no_op_is_refused(model, edit, fields):
    others = dict.fromkeys(("layer_types", "linear_num_value_heads", "num_experts"))
    edit(**others, **fields, dtype="bfloat16")
    result = CliRunner().invoke(runner.main, ["serve", str(model), "--dry-run", "--port", str(free_port())])
    assert (result.exit_code, result.stderr) == (USAGE, "opshim: opshim serves no op of Qwen3NextForCausalLM (model)\n")


def test_what_config_json_does_not_say_is_not_guessed(look, edit):
    edit(num_hidden_layers=None, layer_types=None)
    _, told = look()
    free(told)
    for name in ("shapes", "checkpoint", "KV cache"):
        assert told[name][0].text == "not checked, as config.json has no num_hidden_layers"


def test_a_size_per_layer_is_no_error_and_not_compared(look, edit):
    edit(moe_intermediate_size=[64] * 4)
    _, told = look()
    free(told)
    assert told["shapes"][0].text == "not checked, as config.json has a moe_intermediate_size per layer"


@pytest.mark.parametrize(
    "given",
    [
        ["--hf-overrides", '{"architectures": ["NobodyForCausalLM"]}'],
        ["--hf-overrides.architectures+", "NobodyForCausalLM"],
    ],
)
def test_the_model_is_looked_at_with_its_overrides(look, given):
    stops(look(*given)[1], "model class", "knows no NobodyForCausalLM")


def test_an_override_of_a_part_of_the_model_leaves_the_rest_of_it():
    config = {"text_config": {"a": 1, "b": {"x": 1}}, "rope_parameters": {"p": 1}, "quantization_config": {"q": 1}}
    given = {"text_config": {"b": {"y": 2}}, "rope_parameters": {"r": 2}, "quantization_config": {"s": 2}}
    assert sizes.overridden(config, given) == given | {"text_config": {"a": 1, "b": {"x": 1, "y": 2}}}


def test_an_override_of_another_kind_is_named_in_one_line():
    command = ["serve", "--dry-run", "--port", str(free_port()), "--hf-overrides.num_attention_heads", "0"]
    result = CliRunner().invoke(runner.main, command)
    assert result.exit_code == USAGE and len(result.stderr.splitlines()) == 1, result.output
    assert "with --hf-overrides: num_attention_heads must be" in result.stderr


# ---- the model class -------------------------------------------------------------------------------------------------


def test_an_architecture_that_vllm_does_not_know_stops(look, edit, monkeypatch):
    edit(architectures=["NobodyForCausalLM"])
    stops(look()[1], "model class", "knows no NobodyForCausalLM")
    monkeypatch.setattr(preflight_model, "other_plugins", lambda: ["theirs"])
    _, told = look()
    free(told)
    assert "a plugin (theirs) may bring it" in told["model class"][0].done


def test_a_module_that_does_not_import_stops_with_its_exception(look, monkeypatch):
    monkeypatch.setattr(preflight, "ImportCheck", lambda *names: Imports(*names, "ImportError: no flux_capacitor"))
    stops(look()[1], "model class", "qwen3_next.py", "does not import: ImportError: no flux_capacitor")


def test_the_import_is_made_once_and_its_exception_told(scratch, monkeypatch):
    monkeypatch.setattr(model_class, "_IMPORT", "raise ImportError('no flux_capacitor')")
    assert model_class.ImportCheck("X", "vllm.x").result() == "ImportError: no flux_capacitor"
    monkeypatch.setattr(model_class, "_IMPORT", "")
    assert model_class.ImportCheck("X", "vllm.x").result() is None
    assert model_class.ImportCheck("X", "vllm.x").child is None
    assert model_class.ImportCheck("X", "vllm.y").child is not None


def test_the_registry_is_read_without_importing_vllm():
    found = model_class.registered()
    assert found["Qwen3NextForCausalLM"] == "vllm.model_executor.models.qwen3_next"
    assert "Qwen3MoeForCausalLM" in found and len(found) > 100


# ---- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason", "unused"),
    [
        (["--quantization", "fp8"], "not quantized ones", "fused_moe"),
        (["--quantization-config.linear", "fp8"], "not quantized ones", "fused_moe"),
        (["--kv-cache-dtype=fp8"], "in the model's dtype", "paged_prefill"),
        (["--kv-cache-dtype", "bfloat16"], "in the model's dtype", "paged_prefill"),
        (["--speculative-config", '{"method":"ngram"}'], "take tokens back", "gdn_decode"),
        (["--speculative_config.method", "ngram"], "take tokens back", "gdn_decode"),
        (["--enable-lora"], "know no adapters", "grouped_gemm"),
        (["--moe-backend", "triton"], "vLLM's own experts", "moe_sum"),
        (["--kernel-config", '{"moe_backend":"triton"}'], "vLLM's own experts", "moe_sum"),
        (["--kernel_config.moe_backend=triton"], "vLLM's own experts", "moe_sum"),
        (["--mamba-ssm-cache-dtype", "bfloat16"], "states in float32 or", "gdn_prefill"),
        (["--model-impl", "transformers"], "vLLM's own model", "topk_softmax"),
    ],
)
def test_an_option_that_takes_ops_away_stops_strict_and_is_told_by_auto(look, options, reason, unused):
    stops(look(*options)[1], "options", options[0].partition("=")[0].replace("_", "-")[:9], reason, unused)
    _, told = look(*options, policy="auto")
    free(told)
    assert reason in told["options"][0].text and unused in told["options"][0].done


@pytest.mark.parametrize(
    "options", [["--uds", "a"], ["--dtype", "float8"], ["--grpc"], ["-asc", "0"], ["-asc", "2", "--headless"]]
)
@pytest.mark.parametrize("policy", ["strict", "auto"])
def test_an_option_that_no_server_could_honour_stops_every_policy(look, options, policy):
    told = look(*options, policy=policy)[1]
    assert [one.code for one in told["options"]] == [USAGE] and options[0] in told["options"][0].text


@pytest.mark.parametrize(
    "options",
    [
        [
            "--quantization",
            "None",
            "--enable-lora",
            "--no-enable-lora",
            "--kv-cache-dtype",
            "auto",
            "--mamba-ssm-cache-dtype",
            "float32",
            "--moe-backend",
            "auto",
            "--model-impl=vllm",
        ],
        ["--kv-cache-dtype", "float16", "--enforce-eager", "--block-size", "64"],
        ["--all2all-backend", "deepep_low_latency"],
        ["--kernel-config", '{"moe_backend": "auto"}', "--attention-config", "no JSON"],
        ["--kernel-config", '{"moe_backend": "triton"}', "--kernel-config.x", "1"],  # vLLM takes the latter alone
        ["--api-server-count", "1"],
    ],
)
def test_an_option_that_changes_nothing_for_the_ops_does_not_stop(look, options):
    free(look(*options)[1])


@pytest.mark.parametrize(
    ("options", "environ"),
    [
        (["--attention-backend", "FLASHINFER"], {}),
        (["--attention-config", '{"backend":"FLASHINFER"}'], {}),
        (["-ac", '{"backend": "FLASHINFER"}'], {}),
        (["-ac.backend", "FLASHINFER"], {}),
        (["--block-size", "24"], {}),
        (["--linear-backend", "FlashInfer-cutedsl"], {}),
        (["--kernel-config", '{"linear_backend":"flashinfer_cutedsl"}'], {}),
        (["--decode-context-parallel-size", "2"], {}),
        ([], {"VLLM_BATCH_INVARIANT": "1"}),
    ],
)
def test_what_only_gpus_have_is_asked_of_gpus(options, environ):
    needed = tuple(ops_for_model(QWEN3_NEXT, "float16"))
    for device, count in (("cuda", 1), ("cpu", options[:1] == ["--decode-context-parallel-size"])):
        asked = honoured.Asked(Options(options), "float16", device, False)
        assert len(list(honoured.refused(asked, needed, environ))) == count


@pytest.mark.xdist_group("vllm")
def test_backends_that_vllm_has_for_linear_layers_are_refused_on_gpus():
    utils = pytest.importorskip("vllm.model_executor.layers.utils", reason="vLLM is not installed")
    config = pytest.importorskip("vllm.config.kernel")
    own = getattr(utils, "_FLASHINFER_BF16_BACKENDS", {})  # none in 0.24
    for backend in get_args(getattr(config, "LinearBackend", None)):
        asked = honoured.Asked(Options(["--linear-backend", backend]), "float16", "cuda", False)
        assert bool([*honoured.refused(asked, LINEAR, {})]) == (backend in own), backend


def test_an_option_matters_only_to_ops_that_the_model_needs(look, edit):
    edit(layer_types=["full_attention"] * 4, num_experts=0)
    told = look("--enable-lora", "--speculative-config", "{}", "--dtype", "bfloat16")[1]
    assert told["options"][0].text == "opshim honours all that were given"


# ---- shapes and dtypes -----------------------------------------------------------------------------------------------


def test_a_head_size_above_the_ops_stops_strict_with_the_code_of_an_unserved_op(look, edit):
    edit(head_dim=320)
    told = look("--load-format", "dummy")[1]
    assert {one.code for one in told["shapes"] if "paged_prefill" in one.text} == {UNSERVED}
    assert "D from 1 to 256, got float16 [1, 2, 320]" in told["shapes"][0].text
    free(look("--load-format", "dummy", policy="auto")[1])


def test_more_experts_than_the_router_takes_stop(look, edit):
    edit(num_experts=1025)
    stops(look("--load-format", "dummy")[1], "shapes", "topk_softmax", "1 to 1024 experts", code=UNSERVED)


def test_the_guard_of_the_chosen_implementation_is_asked(look):
    def supports(y, topk_ids=None):
        return y.dtype == torch.bfloat16 or "needs bfloat16"

    shim.implementation("moe_sum", provider="mine", supports=supports)(lambda y, topk_ids=None: y.sum(1))
    stops(look()[1], "shapes", "moe_sum: mine does not take it: needs bfloat16", code=UNSERVED)
    free(look("--dtype", "bfloat16")[1])


def test_ranks_get_their_share_of_the_sizes(look):
    plan, _ = look("--tensor-parallel-size", "2")
    examples = preflight_model._examples(plan)
    assert (examples["fused_moe"]["I"], examples["gdn_decode"]["HV"], examples["paged_prefill"]["HQ"]) == (32, 2, 1)
