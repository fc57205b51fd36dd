"""The preflight's look at KV cache, memory and disk: what vLLM would take, and what the machine has."""

import json
import os
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

import runner
from conformance.meta.looking import Imports, free, stops
from conformance.serving.engines import free_port
from shim import device
from shim.vllm_plugin import arguments, capacity, preflight, preflight_model, sizes
from shim.vllm_plugin.serve import BUNDLED, USAGE, Options

QWEN3_NEXT = json.loads((BUNDLED / "config.json").read_text())
LAYER_SIZES = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "num_hidden_layers": 48,
    "layer_types": None,
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
}


# ---- cache, memory, disk ---------------------------------------------------------------------------------------------

DEMANDS = [  # fields, options, dtype, device -> tokens per page, bytes of a page, pages per block and once
    ({}, [], "float16", "cpu", (256, 262144, 1, 6)),  # vLLM 0.32 on this model: 256 tokens, 599,186 in 1 GiB
    ({}, ["--no-enable-prefix-caching"], "float16", "cpu", (256, 262144, 1, 3)),
    ({}, ["--mamba-ssm-cache-dtype=float32"], "float16", "cpu", (384, 393216, 1, 6)),
    (LAYER_SIZES, [], "bfloat16", "cuda", (544, 544 * 2048 * 12, 1, 6)),  # vLLM 0.24 on an H200: pages of 544 tokens
    (LAYER_SIZES, ["-tp", "2"], "bfloat16", "cuda", (544, 544 * 1024 * 12, 1, 6)),
    ({"layer_types": ["full_attention"] * 4}, [], "float16", "cuda", (16, 16 * 1024 * 4, 1, 0)),
    ({"layer_types": ["full_attention"] * 4}, ["--kv-cache-dtype=fp8"], "float16", "cpu", (128, 128 * 512 * 4, 1, 0)),
]


@pytest.mark.parametrize(("fields", "options", "dtype", "device", "expected"), DEMANDS)
def test_pages_are_those_of_vllm(monkeypatch, fields, options, dtype, device, expected):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False, raising=False)
    need = capacity.demand(sizes.read(QWEN3_NEXT | fields), Options(options), dtype, device)
    assert (need.block, need.page, need.attention, need.states) == expected


@pytest.mark.parametrize(
    ("fields", "plain"),
    [
        ({}, True),
        ({"sliding_window": 4096}, False),
        ({"sliding_window": 4096, "use_sliding_window": False}, True),
        ({"sliding_window": None}, True),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, False),
        ({"layer_types": None, "linear_num_value_heads": None, "mamba_d_state": 16}, False),
        ({"layer_types": ["linear_attention"] * 4}, False),  # does not grow
    ],
)
def test_caches_of_other_kinds_are_not_estimated(fields, plain):
    need = capacity.demand(sizes.read(QWEN3_NEXT | fields), Options([]), "float16", "cpu")
    assert (need is not None) == plain


def test_capacity_is_what_vllm_says_of_the_bundled_model(monkeypatch):
    """vLLM 0.32: "CPU KV cache size: 599,186 tokens, Maximum concurrency for 2,048 tokens per request: 292.57x", and of
    1,046,785 tokens per request "the estimated maximum model length is 1046784"."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False, raising=False)
    need = capacity.demand(sizes.read(QWEN3_NEXT), Options([]), "float16", "cpu")
    assert round(need.at_once(2**30, 2048), 2) == 292.57 and int(need.at_once(2**30, 2048) * 2048) == 599186
    assert need.longest(2**30) == 1046784 and need.bytes(1046784) <= 2**30 < need.bytes(1046785)


def test_a_length_above_the_cache_stops_strict_with_the_largest_and_is_fitted_by_auto(look, edit):
    edit(max_position_embeddings=2**24)
    plan, told = look("--max-model-len", "16M")
    largest = capacity.demand(plan.sizes, plan.options, plan.dtype, "cpu").longest(2**30)
    stops(told, "KV cache", "16,777,216 tokens", f"--max-model-len {largest} is the largest")
    plan, told = look("--max-model-len", "16M", policy="auto")
    free(told)
    assert plan.max_model_len == largest and told["KV cache"][0].done == f"served with --max-model-len {largest}"


def test_auto_hands_the_fitted_length_to_vllm(model, edit, monkeypatch):
    monkeypatch.setattr(preflight, "ImportCheck", Imports)
    monkeypatch.setattr(arguments, "Verdict", lambda *of: None)
    edit(max_position_embeddings=16_000_000)
    result = CliRunner().invoke(
        runner.main, ["serve", str(model), "--dry-run", "--port", str(free_port()), "--policy", "auto"]
    )
    assert result.exit_code == 0, result.output
    fitted = int(result.stdout.splitlines()[-2].rpartition("--max-model-len ")[2])
    assert 100_000 < fitted < 16_000_000 and fitted % 128 == 0


def test_more_memory_for_the_cache_holds_longer_sequences(look, edit):
    edit(max_position_embeddings=2**24)
    text = ["--max-model-len", "1500000"]
    assert look(*text)[1]["KV cache"][0].code == USAGE
    free(look(*text, environ={"VLLM_CPU_KVCACHE_SPACE": "3"})[1])
    free(look(*text, "--kv-cache-memory-bytes", "3G")[1])


def test_a_length_above_the_models_stops_as_vllm_refuses_it(look, edit):
    for policy in ("strict", "auto"):
        plan, told = look("--max-model-len", "2049", policy=policy)
        stops(told, "KV cache", "--max-model-len 2049 is above the model's 2,048", "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1")
        assert plan.max_model_len is None
    free(look("--max-model-len", "2048")[1])
    free(look("--max-model-len", "2049", environ={"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"})[1])
    edit(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.25})
    stops(look("--max-model-len", "2049")[1], "KV cache", "is above the model's 2,048")
    edit(rope_scaling={"rope_type": "linear", "factor": 2.0})
    free(look("--max-model-len", "4096")[1])


def test_a_cache_that_holds_nothing_does_not_point_to_auto(look):
    for policy in ("strict", "auto"):
        told = look("--kv-cache-memory-bytes", "10", policy=policy)[1]
        stops(told, "KV cache", "10 bytes (--kv-cache-memory-bytes) hold 0: too little")


@pytest.mark.parametrize("given", ["0", "abc", "1.5K", "", "-5"])
def test_a_length_that_is_no_number_stops(look, given):
    stops(
        look(f"--max-model-len={given}")[1],
        "KV cache",
        "--max-model-len must be a number",
        f"'{given}'" if given else "nothing",
    )


@pytest.mark.parametrize(
    "options", [["--max-model-len", "-1"], ["--max-model-len=auto"], ["--num-gpu-blocks-override", "9"]]
)
def test_what_vllm_is_to_fit_itself_is_left_to_it(look, options):
    _, told = look(*options, environ={"VLLM_CPU_KVCACHE_SPACE": "1"})
    free(told)
    assert (told["KV cache"][0].text, told["KV cache"][0].done) == ("not estimated", "vLLM sizes it")


def test_the_last_of_several_counts_as_it_does_for_vllm(look):
    free(look("--max-model-len", "16M", "--max-model-len", "64")[1])


@pytest.mark.parametrize(("text", "value"), [("8192", 8192), ("8k", 8000), ("8K", 8192), ("1.5m", 1_500_000)])
def test_lengths_are_read_as_vllm_reads_them(text, value):
    assert capacity.human_number(text, "--max-model-len") == value


def test_a_cache_that_the_machine_cannot_hold_stops(look, monkeypatch):
    monkeypatch.setattr(device, "host_memory", lambda: device.Memory(8 * 2**30, 4 * 2**30))
    stops(
        look(environ={"VLLM_CPU_KVCACHE_SPACE": "6"})[1],
        "memory",
        "6.0 GiB of KV cache, 4.0 GiB free: 2.0 GiB are missing",
    )


def test_ranks_of_a_cpu_share_its_memory(look, monkeypatch):
    monkeypatch.setattr(device, "host_memory", lambda: device.Memory(8 * 2**30, 3 * 2**29))
    free(look()[1])
    cores = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    stops(look("-tp", "2", environ=cores)[1], "memory", "2 ranks, each with 3.1 MiB of weights", "are missing")


def test_ranks_of_a_cpu_need_nodes_or_cores(look, monkeypatch, tmp_path):
    (tmp_path / "node0").mkdir()
    monkeypatch.setattr(preflight, "NODES", tmp_path)
    stops(look("-tp", "2")[1], "device", "2 ranks of the engine need as many NUMA nodes, here are 1")
    stops(look("--distributed-executor-backend", "ray")[1], "device", "no ranks of a CPU under Ray")
    free(look("-tp", "2", environ={"VLLM_CPU_OMP_THREADS_BIND": "0|1"})[1])
    free(look("-tp", "2", "--nnodes", "2")[1])  # one rank on each machine
    (tmp_path / "node1").mkdir()
    free(look("-tp", "2")[1])


MIXED, FULL, HALF = ["linear_attention", "full_attention"] * 2, ["full_attention"] * 4, ["linear_attention"] * 2


@pytest.mark.parametrize(
    ("kinds", "partition", "stage"),
    [(MIXED, "", None), (FULL, "", None), (HALF + FULL[:2], "", 0), (FULL[:2] + HALF, "", 1), (MIXED, "1,3", 0)],
)
def test_each_stage_of_a_cpus_pipeline_needs_attention(look, kinds, partition, stage):
    environ = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_PP_LAYER_PARTITION": partition}
    given = ("--load-format", "dummy", "--hf-overrides", json.dumps({"layer_types": kinds}))
    free(look(*given)[1])
    told = look(*given, "-pp", "2", "--no-enforce-eager", environ=environ)[1]
    if stage is None:
        free(told)
    else:
        stops(told, "shapes", f"stage {stage} of --pipeline-parallel-size has no layer of full attention")


@pytest.mark.parametrize("given", [[], ["--no-enforce-eager", "--enforce-eager"]])
def test_an_eager_pipeline_of_a_cpu_is_refused(look, given):
    environ = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    kinds = ("--load-format", "dummy", "--hf-overrides.layer_types+", ",".join(MIXED))
    stops(look("-pp", "2", *kinds, *given, environ=environ)[1], "options", "-pp 2", "add --no-enforce-eager")
    free(look("-pp", "1", *kinds, *given, environ=environ)[1])


def test_what_a_pipeline_leaves_over_goes_where_vllm_puts_it(look):
    plan = look("-pp", "3", "--hf-overrides.layer_types+", ",".join(MIXED), "--load-format", "dummy")[0]
    assert [len(kinds) for kinds in preflight_model._stages(plan)] == [1, 2, 1]  # vllm.distributed.utils.get_pp_indices


def test_a_space_that_is_no_number_stops(look):
    told = look(environ={"VLLM_CPU_KVCACHE_SPACE": "lots"})[1]
    assert "VLLM_CPU_KVCACHE_SPACE must be a whole number of GiB from 1 on, got 'lots'" in told["KV cache"][0].text
    assert told["KV cache"][0].code == USAGE


def test_the_memory_of_this_machine_is_told():
    memory = device.host_memory()
    assert 2**28 < memory.free <= memory.total


def test_a_full_disk_stops_and_is_named(look, monkeypatch, tmp_path):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: usage._replace(free=2**20))
    told = look(environ={"VLLM_CACHE_ROOT": str(tmp_path / "cache-of-vllm")})[1]
    assert "1.0 MiB are free on this disk, 64.0 MiB are needed" in told["disk"][0].text
    assert told["disk"][0].code == USAGE and "cache-of-vllm" in told["disk"][0].text


@pytest.mark.parametrize(("variable", "code"), [("VLLM_CACHE_ROOT", USAGE), ("TMPDIR", USAGE)])
def test_a_folder_that_cannot_be_written_stops(look, variable, code):
    stops(
        look(environ={variable: "/proc/nobody-writes-here"})[1], "disk", "/proc/nobody-writes-here", "cannot be written"
    )


def test_opshims_own_cache_is_needed_by_nobody_who_serves(look, monkeypatch):
    monkeypatch.setenv("OPSHIM_CACHE", "/proc/nobody-writes-here")
    _, told = look()
    free(told)
    assert "cannot be written" in told["disk"][0].text and "nothing is kept there" in told["disk"][0].done


def test_what_cannot_be_found_out_stops_nobody(look, monkeypatch):
    monkeypatch.setattr(device, "host_memory", lambda: 1 / 0)
    _, told = look()
    free(told)
    assert told["memory"][0].text == "not checked: ZeroDivisionError: division by zero"


# ---- GPUs, as far as they can be seen without one --------------------------------------------------------------------


@pytest.fixture
def gpus(monkeypatch, tmp_path):
    """Two GPUs of 80 GiB with 70 and 10 GiB free, as torch and nvidia-smi tell of them."""
    properties = SimpleNamespace(
        name="A GPU",
        major=9,
        minor=0,
        multi_processor_count=132,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448,
        L2_cache_size=50 * 2**20,
        total_memory=80 * 2**30,
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, GPU-aa, 71680'\necho '1, GPU-bb, 10240'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(("visible", "gib"), [(None, 10), ("0", 70), ("GPU-bb", 10), ("MIG-cc", None)])
def test_the_free_memory_is_that_of_the_fullest_visible_gpu(gpus, monkeypatch, visible, gib):
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert capacity.gpu_memory() == device.Memory(80 * 2**30, gib and gib * 2**30)


@pytest.mark.xdist_group("vllm")
def test_the_share_of_a_gpu_is_vllms_own():
    cache = pytest.importorskip("vllm.config.cache")
    assert capacity.utilization(Options([])) == cache.CacheConfig().gpu_memory_utilization
    assert capacity.utilization(Options(["--gpu-memory-utilization", "0.5"])) == 0.5


@pytest.mark.parametrize("line", ["float = 0.8", "float = Field(default=0.8, gt=0, le=1)"])
def test_the_share_of_a_gpu_is_that_of_the_installed_version(monkeypatch, tmp_path, line):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "cache.py").write_text(f"    gpu_memory_utilization: {line}\n    block_size: int = 16\n")
    monkeypatch.setattr(capacity, "vllm_folder", lambda: tmp_path)
    assert capacity.utilization(Options([])) == 0.8
    monkeypatch.setattr(capacity, "vllm_folder", lambda: None)
    assert capacity.utilization(Options([])) == 0.9


def test_findings_of_a_gpu(look, gpus, monkeypatch):
    plan, _ = look("-tp", "4", "--gpu-memory-utilization", "0.9")
    plan = replace(plan, device="cuda")
    found, lack = preflight.device(plan)
    assert "2 x A GPU, sm_90, driver" in found.text and "80.0 GiB of memory, 10.0 GiB free" in found.text
    assert lack.code == USAGE and "4 ranks of the engine need as many GPUs, here are 2" in lack.text
    (memory,) = preflight.memory(plan)
    assert memory.code == USAGE and "10.0 GiB free: 60.0 GiB are missing" in memory.text
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    plan = replace(plan, options=Options(["--gpu-memory-utilization", "0.5"]))
    (memory,) = preflight.memory(plan)
    assert memory.code == 0 and "38.0 GiB of KV cache, 70.0 GiB free" in memory.text
    (cache,) = preflight.cache(plan)
    assert cache.code == 0 and "0.5 of 80.0 GiB less 6.2 MiB of weights and 2.0 GiB for the rest" in cache.text
