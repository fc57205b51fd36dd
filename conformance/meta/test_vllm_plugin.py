"""The vLLM plugin without an engine: versions, hooks and misses, which ops a model needs, and each seam on its own.

Tests that need vLLM are in one xdist group: importing it takes seconds.
"""

import json
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import opshim
from shim import policy
from shim.errors import OpUnavailableError, UnknownNameError
from shim.policy import Policy, using
from shim.vllm_plugin import hooking, ops_for_model, plugin, versions
from shim.vllm_plugin.versions import Hook, HookError

needs_vllm = pytest.mark.xdist_group("vllm")
QWEN3_NEXT = json.loads((Path(opshim.__file__).parent / "models" / "opshim-tiny" / "config.json").read_text())
EXPERTS = {"topk_softmax", "fused_moe", "moe_align_block_size", "grouped_gemm", "moe_sum"}
GATED_DELTA_NET = {"gdn_gating", "gdn_prefill", "gdn_decode"}
ATTENTION = {"reshape_and_cache", "paged_attention_v2", "paged_prefill"}


@pytest.fixture(autouse=True)
def policy_restored():
    yield
    policy.set_policy(None)


# ---- versions and targets -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.24.0", "0.32.0", "0.33.1rc2", "0.24.1+cpu"])
def test_supported_versions_pass(version):
    versions.check_version(version, {})


@pytest.mark.parametrize("version", ["0.23.9", "0.34.0", "1.0.0", "dev"])
def test_other_versions_are_refused_unless_allowed(version):
    with pytest.raises(HookError, match=rf"vLLM {version} is not supported: opshim knows 0\.24 to 0\.33"):
        versions.check_version(version, {})
    versions.check_version(version, {versions.ANY: "1"})


def test_find_returns_what_the_name_stands_for():
    assert versions.find("json:JSONDecoder.raw_decode", "self, s, idx") is json.JSONDecoder.raw_decode


@pytest.mark.parametrize(
    ("target", "parameters", "words"),
    [
        ("no_such_module:x", None, "no_such_module does not import"),
        ("json:JSONDecoder.absent", None, "json:JSONDecoder.absent does not exist"),
        ("json:JSONDecoder.raw_decode", "self, text", r"takes \(self, s, idx\), expected \(self, text\)"),
    ],
)
def test_find_says_what_is_wrong_with_a_target(target, parameters, words):
    with pytest.raises(HookError, match=words):
        versions.find(target, parameters)


# ---- a missed hook is an error or a warning, never nothing ----------------------------------------------------------


@pytest.fixture
def one_hook(monkeypatch):
    """A plugin whose only hook has a target that does not exist."""
    hook = Hook("router", "json", ("topk_softmax",), "replaced", {"json:absent": None})
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.0"))
    platforms = SimpleNamespace(current_platform=SimpleNamespace(device_type="cpu"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.setattr(versions, "PLATFORMS", {"cpu": [hook]})
    monkeypatch.setattr(plugin, "_log_with_vllm", lambda: None)
    monkeypatch.setattr(plugin, "_reach_other_machines", lambda environ: None)
    monkeypatch.setattr(plugin, "_registered", False)
    return hook


def test_a_missed_hook_ends_the_process_under_strict(one_hook, capsys):
    with using(Policy("strict")), pytest.raises(SystemExit) as ended:
        plugin.register()
    assert ended.value.code == 1
    assert "hook router (topk_softmax)" in (said := capsys.readouterr().err)
    assert "in vLLM 0.32.0, json:absent does not exist" in said
    assert one_hook.state == "missed"


def test_a_missed_hook_is_one_warning_under_auto(one_hook, caplog):
    with using(Policy("auto")):
        plugin.register()
        plugin.register()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "json:absent does not exist" in caplog.text
    assert (one_hook.state, one_hook.reason) == ("missed", "json:absent does not exist")


def test_a_platform_without_hooks_is_a_miss(one_hook, monkeypatch, capsys):
    monkeypatch.setattr(versions, "PLATFORMS", {})
    with using(Policy("strict")), pytest.raises(SystemExit):
        plugin.register()
    assert "no hooks for vLLM's platform cpu" in capsys.readouterr().err


def test_an_unknown_version_ends_the_process_under_auto_too(one_hook, monkeypatch, capsys):
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.99.0")
    with using(Policy("auto")), pytest.raises(SystemExit):
        plugin.register()
    assert "vLLM 0.99.0 is not supported" in capsys.readouterr().err


def test_warnings_go_where_those_of_vllm_go_unless_the_program_decided(monkeypatch):
    log, handler = logging.getLogger("opshim"), logging.NullHandler()
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [handler])
    monkeypatch.setattr(log, "propagate", True)
    monkeypatch.setattr(log, "level", log.level)
    monkeypatch.setattr(log, "handlers", [mine := logging.NullHandler()])
    plugin._log_with_vllm()
    assert (log.handlers, log.propagate) == ([mine], True)
    monkeypatch.setattr(log, "handlers", [])
    plugin._log_with_vllm()
    assert (log.handlers, log.propagate) == ([handler], False)


def test_require_shows_the_chain_table_of_an_op_without_implementation(monkeypatch):
    with using(Policy("strict")):
        chain = opshim.get("moe_sum").chain("meta")  # no native code for that device
        assert chain.selected is None
        with pytest.raises(OpUnavailableError, match=r"(?s)^policy strict leaves moe_sum .*  meta\n.*reference"):
            hooking.require(("moe_sum",), "meta")
    with using(Policy("auto")):
        hooking.require(("moe_sum",), "meta")


def test_an_import_failure_of_opshim_is_not_swallowed_by_vllm(tmp_path):
    """vLLM logs and skips a plugin whose import raises an Exception; SystemExit is none."""
    (tmp_path / "ops_reference.py").write_text("raise ImportError('half an installation')")
    script = """if True:
        import sys
        sys.modules["vllm.plugins"] = sys
        try:
            import opshim
        except Exception:
            pass
    """
    path = {"PYTHONPATH": f"{tmp_path}:{Path(opshim.__file__).parent}", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=path, capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 1
    assert "opshim does not import: ImportError: half an installation" in done.stderr


# ---- which ops a model needs ----------------------------------------------------------------------------------------


def test_a_hybrid_mixture_needs_every_op_in_float16_and_no_matmul_elsewhere():
    assert set(ops_for_model(QWEN3_NEXT, "float16")) == set(opshim.names())
    assert set(ops_for_model(QWEN3_NEXT, torch.bfloat16)) == EXPERTS | GATED_DELTA_NET | ATTENTION
    assert set(ops_for_model(SimpleNamespace(**QWEN3_NEXT), torch.float16)) == set(opshim.names())


@pytest.mark.parametrize(
    ("config", "needed"),
    [
        ({}, ATTENTION),
        ({"num_local_experts": 8}, ATTENTION | EXPERTS),
        ({"num_experts": 8, "quantization_config": {"quant_method": "fp8"}}, ATTENTION),
        ({"text_config": {"layer_types": ["linear_attention"]}}, GATED_DELTA_NET),
        ({"linear_num_value_heads": 4}, ATTENTION | GATED_DELTA_NET),
        ({"kv_lora_rank": 512, "num_experts": 8}, EXPERTS),
        ({"model_type": "mamba2"}, set()),
    ],
)
def test_ops_follow_from_the_configuration(config, needed):
    assert set(ops_for_model(config, "bfloat16")) == needed


# ---- seams, with vLLM ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seams():
    """The seams' modules; skips where vLLM is not installed."""
    pytest.importorskip("vllm")
    from shim.vllm_plugin import attention, experts, gated_delta_net, linear, router

    return SimpleNamespace(attention=attention, experts=experts, gdn=gated_delta_net, linear=linear, router=router)


@needs_vllm
@pytest.mark.parametrize("hook", versions.CPU, ids=lambda hook: hook.name)
def test_every_target_exists_in_the_installed_vllm(seams, hook):
    for target, parameters in hook.targets.items():
        assert versions.find(target, parameters) is not None
    for name in hook.ops:
        opshim.get(name)


@needs_vllm
def test_the_router_serves_softmax_and_leaves_the_rest_to_vllm(seams):
    logits = torch.randn(7, 16, generator=torch.Generator().manual_seed(0))
    with using(Policy("reference")):
        weights, ids = seams.router.ShimRouter(4, 16)._compute_routing(logits, logits, None)
        expected = opshim.get("topk_softmax").reference(logits, 4)
        torch.testing.assert_close((weights, ids), expected)
    with using(Policy("strict")), pytest.raises(HookError, match="a router, not opshim: it groups experts"):
        seams.router.ShimRouter(4, 16, use_grouped_topk=True, num_expert_group=4, topk_group=2)
    with using(Policy("auto")):
        grouped = seams.router.ShimRouter(4, 16, use_grouped_topk=True, num_expert_group=4, topk_group=2)
        _, ids = grouped._compute_routing(logits, logits, None)
        assert (ids // 4).unique(dim=1).shape[1] <= 4


@needs_vllm
@pytest.mark.parametrize("on_input", [False, True])
def test_the_stages_are_fused_moe(seams, on_input):
    inputs = opshim.get("fused_moe").example(
        torch.Generator().manual_seed(1), "cpu", torch.float32, T=21, topk=1 if on_input else 3
    )
    x, w13, w2, weights, ids = (inputs[name] for name in ("x", "w1", "w2", "topk_weights", "topk_ids"))
    with using(Policy("reference")):
        results = {
            form: seams.experts.experts(x, w13, w2, weights, ids, None, on_input, len(w13), form)
            for form in ("fused", "staged", "auto")
        }
    torch.testing.assert_close(results["staged"], results["fused"])
    torch.testing.assert_close(results["auto"], results["fused"])


@needs_vllm
def test_the_form_follows_what_is_missing_alone(seams, monkeypatch):
    missing = set()
    monkeypatch.setattr(seams.experts, "falls_back", lambda name, device: name in missing)
    assert seams.experts.form("cpu", {}) == "auto"
    missing.add("topk_softmax")
    assert seams.experts.form("cpu", {}) == "auto"
    missing.add("moe_sum")
    assert seams.experts.form("cpu", {}) == "fused"
    missing.add("fused_moe")
    assert seams.experts.form("cpu", {}) == "staged"
    assert seams.experts.form("cpu", {"OPSHIM_MOE": "fused"}) == "fused"
    missing.clear()
    assert seams.experts.form("cuda", {}) == "fused"
    assert seams.experts.form("cuda", {"OPSHIM_MOE": "staged"}) == "staged"
    missing.add("fused_moe")
    assert seams.experts.form("cuda", {}) == "staged"
    with pytest.raises(UnknownNameError, match="auto, fused, staged"):
        seams.experts.form("cpu", {"OPSHIM_MOE": "both"})


@needs_vllm
def test_blocks_follow_the_mean_share_of_an_expert(seams):
    assert [seams.experts.block_size(slots, 16) for slots in (1, 128, 129, 160, 512, 99999)] == [8, 8, 8, 16, 32, 64]


@needs_vllm
def test_linear_layers_keep_their_weight_and_others_go_to_vllm(seams, monkeypatch):
    others = []
    monkeypatch.setattr(seams.linear, "_dispatch", lambda layer, remove: others.append(layer))
    layer, other = (torch.nn.Linear(8, 4, dtype=dtype) for dtype in (torch.float16, torch.bfloat16))
    convolution = torch.nn.Conv1d(8, 8, 4, groups=8, dtype=torch.float16)
    with using(Policy("reference")):
        for one in (layer, other, convolution):
            seams.linear.dispatch_cpu_unquantized_gemm(one, remove_weight=True)
        x = torch.randn(3, 8).half()
        torch.testing.assert_close(layer.cpu_linear(x, layer.weight, layer.bias), layer(x))
    assert layer.weight.shape == (4, 8)
    assert others == [other, convolution]


def paged(pages, block_size, heads, size, padding=64):
    """A cache as vLLM allocates it, [NB,HK,BS,2D], its pages padded and everything in them NaN."""
    content = block_size * heads * 2 * size
    buffer = torch.full((pages, content + padding), torch.nan)
    return buffer, buffer[:, :content].unflatten(1, (heads, block_size, 2 * size))


@needs_vllm
def test_a_batch_of_decodes_and_a_chunk_attends_as_each_sequence_alone(seams):
    """Two decodes and the second chunk of a prompt, over padded pages that hold keys and values."""
    heads, kv_heads, size, block = 4, 2, 64, 16
    layer = object.__new__(seams.attention.ShimAttention)
    vars(layer).update(refusal=None, head_size=size, scale=0.125)
    vars(layer).update(logits_soft_cap=0.0, sliding_window=-1, alibi_slopes=None)
    buffer, cache = paged(8, block, kv_heads, size)
    lengths, new = [5, 17, 30], [1, 1, 20]
    tables = torch.tensor([[3, 0], [1, 6], [7, 2]], dtype=torch.int32)
    generator = torch.Generator().manual_seed(2)
    keys = [torch.randn(n, kv_heads, size, generator=generator) for n in lengths]
    values = [torch.randn(n, kv_heads, size, generator=generator) for n in lengths]
    slots = [
        torch.tensor([int(table[j // block]) * block + j % block for j in range(n)])
        for table, n in zip(tables, lengths)
    ]
    query = torch.randn(sum(new), heads, size, generator=generator)
    metadata = seams.attention.ShimAttentionMetadata(
        num_actual_tokens=22,
        max_query_len=20,
        query_start_loc=torch.tensor([0, 1, 2, 22], dtype=torch.int32),
        max_seq_len=30,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table=tables,
        slot_mapping=torch.cat(slots),
        scheduler_metadata=None,
        num_decode_tokens=2,
        num_decodes=2,
        prefill_start_loc=torch.tensor([0, 20], dtype=torch.int32),
    )
    with using(Policy("reference")):
        layer.do_kv_cache_update(None, torch.cat(keys), torch.cat(values), cache, metadata.slot_mapping)
        output = layer.forward(None, query, None, None, cache, metadata, torch.empty(22, heads, size))
    assert buffer[:, -64:].isnan().all(), "the padding of the pages is not ours"
    for q, k, v, n in zip(query.split(new), keys, values, new):
        mask = torch.ones(n, len(k)).tril(len(k) - n).bool()
        alone = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), mask, scale=0.125, enable_gqa=True
        )
        torch.testing.assert_close(output[: len(q)], alone.transpose(0, 1), atol=1e-5, rtol=1e-4)
        output = output[len(q) :]


@pytest.fixture
def gated_delta_net(seams):
    """A Gated DeltaNet layer's core over pools with padded pages: 2 key heads, 4 value heads of 16, 6 slots."""
    generator = torch.Generator().manual_seed(3)
    layer = object.__new__(seams.gdn.ShimGatedDeltaNet)
    torch.nn.Module.__init__(layer)
    layer.refusal, layer.tp_size, layer.activation = None, 1, "silu"
    layer.key_dim, layer.value_dim, layer.head_k_dim, layer.head_v_dim = 32, 64, 16, 16
    layer.A_log, layer.dt_bias = torch.rand(4, generator=generator), torch.randn(4, generator=generator).bfloat16()
    layer.conv1d = SimpleNamespace(weight=torch.randn(128, 1, 4, generator=generator), bias=None)
    page = torch.full((6, 3 * 128 + 4 * 256 + 32), torch.nan)
    layer.kv_cache = page[:, : 3 * 128].unflatten(1, (3, 128)), page[:, 384:1408].unflatten(1, (4, 16, 16))
    return layer


def run_core(layer, tokens, lengths, slots, fresh, decodes=0):
    """Runs the core on a batch: sequences of `lengths` tokens, the first `decodes` of them decode tokens."""
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    metadata = SimpleNamespace(
        num_decodes=decodes,
        num_decode_tokens=decodes,
        num_prefills=len(lengths) - decodes,
        num_prefill_tokens=sum(lengths) - decodes,
        non_spec_state_indices_tensor=torch.tensor([[slot, 0] for slot in slots], dtype=torch.int32)[:, 0],
        non_spec_query_start_loc=starts,
        has_initial_state=torch.tensor([not one for one in fresh]),
    )
    mixed_qkv, b, a = tokens.split([128, 4, 4], dim=1)
    out = torch.full((len(tokens), 4, 16), torch.nan, dtype=tokens.dtype)
    with using(Policy("reference")):
        layer.core(mixed_qkv, b, a, out, metadata)
    return out


@needs_vllm
def test_prefill_in_chunks_then_decode_is_one_prefill(gated_delta_net):
    tokens = torch.randn(12, 136, generator=torch.Generator().manual_seed(4))
    other = torch.randn(5, 136, generator=torch.Generator().manual_seed(5))
    whole = run_core(gated_delta_net, tokens, [12], [2], [True])
    run_core(gated_delta_net, other[:4], [4], [1], [True])
    first = run_core(gated_delta_net, tokens[:7], [7], [5], [True])
    mixed = run_core(gated_delta_net, torch.cat([other[4:], tokens[7:11]]), [1, 4], [1, 5], [False, False], decodes=1)
    last = run_core(gated_delta_net, tokens[11:], [1], [5], [False], decodes=1)
    torch.testing.assert_close(torch.cat([first, mixed[1:], last]), whole, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(mixed[:1], run_core(gated_delta_net, other, [5], [3], [True])[4:], atol=1e-5, rtol=1e-4)


@needs_vllm
def test_a_decode_row_of_the_null_block_is_zero_and_leaves_the_pool_alone(gated_delta_net):
    tokens = torch.randn(2, 136, generator=torch.Generator().manual_seed(6))
    run_core(gated_delta_net, tokens[:1], [1], [4], [True])
    out = run_core(gated_delta_net, tokens, [1, 1], [4, 0], [False, False], decodes=2)
    assert out[0].isfinite().all()
    assert (out[1] == 0).all()
    assert gated_delta_net.kv_cache[1][0].isnan().all()


@needs_vllm
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_core_serves_every_dtype_that_vllm_offers(gated_delta_net, dtype):
    conv_state, state = gated_delta_net.kv_cache
    gated_delta_net.kv_cache = conv_state.to(dtype), state
    gated_delta_net.conv1d.weight = gated_delta_net.conv1d.weight.to(dtype)
    tokens = torch.randn(6, 136, generator=torch.Generator().manual_seed(7)).to(dtype)
    assert run_core(gated_delta_net, tokens[:5], [5], [2], [True]).isfinite().all()
    assert run_core(gated_delta_net, tokens[5:], [1], [2], [False], decodes=1).isfinite().all()


@needs_vllm
def test_a_packed_convolution_weight_is_passed_over_for_the_plain_one(gated_delta_net):
    plain = gated_delta_net.conv1d.weight.squeeze(1)
    assert torch.equal(gated_delta_net._conv_weight(), plain)
    gated_delta_net.conv1d._cpu_unpacked_conv_weight = plain + 1
    assert torch.equal(gated_delta_net._conv_weight(), plain + 1)
