"""vLLM's hooks for CUDA, on the CPU: what every process does, router, experts and linear layers."""

import logging
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

import opshim
from shim.policy import Policy, using
from shim.vllm_plugin import hooking, plugin, serve
from shim.vllm_plugin.versions import Hook, HookError

needs_vllm = pytest.mark.xdist_group("vllm")


# ---- every process --------------------------------------------------------------------------------------------------


def test_rocm_is_not_cuda_though_torch_calls_it_so():
    assert plugin._name(SimpleNamespace(device_type="cuda", is_cuda=lambda: True)) == "cuda"
    assert plugin._name(SimpleNamespace(device_type="cuda", is_cuda=lambda: False)) == "rocm"
    assert plugin.hooks("rocm") == []


@pytest.mark.parametrize(
    ("before", "after"), [(None, "OPSHIM_"), ("MY_,YOUR_", "MY_,YOUR_,OPSHIM_"), ("OPSHIM_,MY_", "OPSHIM_,MY_")]
)
def test_vllm_is_told_to_copy_our_variables_to_other_machines(before, after):
    environ = {} if before is None else {plugin.COPIED: before}
    plugin._reach_other_machines(environ)
    assert environ == {plugin.COPIED: after}


@needs_vllm
def test_vllm_copies_them_and_keeps_compiled_graphs_apart(monkeypatch):
    envs = pytest.importorskip("vllm.envs")
    from vllm.ray.ray_env import get_env_vars_to_copy

    monkeypatch.setenv("OPSHIM_POLICY", "strict")
    monkeypatch.delenv(plugin.COPIED, raising=False)
    assert "OPSHIM_POLICY" not in get_env_vars_to_copy()
    without = envs.compile_factors()
    monkeypatch.setenv(plugin.COPIED, "OPSHIM_")
    assert "OPSHIM_POLICY" in get_env_vars_to_copy()
    assert envs.compile_factors() != without


def test_who_serves_is_logged_once_with_the_rank(monkeypatch, caplog):
    monkeypatch.setattr(hooking, "_told", set())
    monkeypatch.setattr(hooking, "rank", lambda: 3)
    with using(Policy("reference")), caplog.at_level(logging.INFO, "opshim"):
        for _ in range(2):
            hooking.require(("moe_sum", "fused_moe"), "cpu")
    assert [record.getMessage() for record in caplog.records] == ["rank 3: moe_sum reference, fused_moe reference"]


# ---- seams ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seams():
    """The seams' modules; skips where vLLM is not installed."""
    pytest.importorskip("vllm")
    from shim.vllm_plugin import experts, linear_cuda, router_cuda

    return SimpleNamespace(experts=experts, linear=linear_cuda, router=router_cuda)


@pytest.fixture
def reference():
    with using(Policy("reference")):
        yield


@needs_vllm
def test_the_router_serves_softmax_and_sends_padding_nowhere(seams, reference, monkeypatch):
    logits = torch.randn(7, 16, generator=torch.Generator().manual_seed(0))
    router = seams.router.ShimRouter(4, 16)
    expected = opshim.get("topk_softmax").reference(logits, 4)
    torch.testing.assert_close(router._compute_routing(logits, logits, None), expected)
    monkeypatch.setattr(seams.router, "_padding", lambda tokens: torch.arange(tokens) >= 5)
    _, ids = router._compute_routing(logits, logits, torch.int32)
    assert torch.equal(ids[:5], expected[1][:5])
    assert (ids[5:] == -1).all()


@needs_vllm
def test_another_router_is_a_miss(seams, monkeypatch):
    monkeypatch.setattr(seams.router, "_create", lambda **kwargs: SimpleNamespace(**kwargs))
    with using(Policy("strict")):
        with pytest.raises(HookError, match="a router, not opshim: its scores are sigmoid"):
            seams.router.ShimRouter(4, 16, scoring_func="sigmoid")
        with pytest.raises(HookError, match="not the formula of SimpleNamespace"):
            seams.router.create_fused_moe_router(top_k=4)
    with using(Policy("auto")):
        assert seams.router.create_fused_moe_router(top_k=4).top_k == 4


@needs_vllm
def test_experts_of_two_ranks_sum_to_the_layer(seams, reference):
    inputs = opshim.get("fused_moe").example(torch.Generator().manual_seed(1), "cpu", torch.float32, T=9, E=6, topk=3)
    x, weights, ids = inputs["x"], inputs["topk_weights"], inputs["topk_ids"]
    method = SimpleNamespace(refusal=None, form="fused")

    def apply(mine, expert_map):
        layer = SimpleNamespace(
            w13_weight=inputs["w1"][mine],
            w2_weight=inputs["w2"][mine],
            expert_map=expert_map,
            apply_router_weight_on_input=False,
            global_num_experts=6,
        )
        return seams.experts.ShimExperts.apply(method, layer, x, weights, ids, None, None)

    whole = apply(slice(None), None)
    maps = torch.tensor([[0, 1, 2, -1, -1, -1], [-1, -1, -1, 0, 1, 2]], dtype=torch.int32)
    torch.testing.assert_close(apply(slice(0, 3), maps[0]) + apply(slice(3, 6), maps[1]), whole)


@needs_vllm
@pytest.mark.parametrize("changed", [{"moe_backend": "triton"}, {"all2all_backend": "deepep_low_latency"}])
def test_experts_refuse_what_was_asked_for_by_name(seams, changed):
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    exchange = "all2all_backend" in changed
    parallel = SimpleNamespace(use_all2all_kernels=exchange, use_ag_rs_all2all_kernels=False, **changed)
    moe = SimpleNamespace(activation=MoEActivation.SILU, has_bias=False, is_lora_enabled=False, moe_backend="auto")
    vars(moe).update(swiglu_limit=None, swiglu_alpha=None, swiglu_beta=None, moe_parallel_config=parallel)
    vars(moe).update(changed)
    assert next(iter(changed.values())) in seams.experts._refusal(moe)


@needs_vllm
def test_float16_goes_to_the_op_also_when_traced_and_the_rest_to_vllm(seams, reference, monkeypatch):
    x, weight, bias = torch.randn(3, 8).half(), torch.randn(4, 8).half(), torch.randn(4).half()
    expected = torch.nn.functional.linear(x.float(), weight.float(), bias.float()).half()
    graphs = []
    traced = torch.compile(
        lambda *given: seams.linear.unquantized_gemm(None, *given),
        backend=lambda graph, inputs: graphs.append(graph) or graph.forward,
        fullgraph=True,
    )
    for call in (traced, lambda *given: seams.linear.unquantized_gemm(None, *given)):
        torch.testing.assert_close(call(x, weight, bias), expected, atol=1e-3, rtol=1e-3)
    assert "opshim.matmul_fp16" in graphs[0].code
    monkeypatch.setattr(seams.linear, "_stock", lambda *given: given)
    other = x.bfloat16(), weight.bfloat16(), None
    assert seams.linear.unquantized_gemm("layer", *other) == ("layer", *other)


@needs_vllm
def test_the_linear_hook_is_set_only_where_vllm_gives_it_out(seams, monkeypatch):
    utils = seams.linear.utils
    monkeypatch.setattr(utils, "default_unquantized_gemm", seams.linear._stock)
    with pytest.raises(HookError, match="does not give out"):  # on the CPU it gives out another one
        seams.linear.install()
    assert utils.default_unquantized_gemm is seams.linear._stock
    method = seams.linear.UnquantizedLinearMethod
    monkeypatch.setattr(method, "create_weights", method.create_weights)
    cuda = SimpleNamespace(is_rocm=lambda: False, is_cpu=lambda: False, is_cuda=lambda: True)
    monkeypatch.setattr(utils, "current_platform", cuda)
    seams.linear.install()
    assert utils.dispatch_unquantized_gemm() is seams.linear.unquantized_gemm
    assert method.create_weights is seams.linear.create_weights


@needs_vllm
def test_a_rank_tells_who_serves_its_linear_layers_or_ends_as_they_are_made(seams, monkeypatch, caplog):
    monkeypatch.setattr(hooking, "_told", set())

    def stock(self, layer, dtype):
        layer.weight = torch.zeros(8, 8, dtype=dtype)

    def make(dtype, method=None):
        seams.linear.create_weights(method, SimpleNamespace(), dtype)

    monkeypatch.setattr(seams.linear, "_create_weights", stock)

    with using(Policy("reference")), caplog.at_level(logging.INFO, "opshim"):
        make(torch.bfloat16)
        assert not caplog.records
        make(torch.float16)
        make(torch.float16, SimpleNamespace(_gemm_impl=seams.linear.unquantized_gemm))
    assert [record.getMessage() for record in caplog.records] == ["rank 0: matmul_fp16 reference"]
    other = SimpleNamespace(_gemm_impl=torch.nn.functional.linear)  # of --linear-backend flashinfer_cutedsl
    with using(Policy("strict")), pytest.raises(HookError, match="a linear layer, not opshim: --linear-backend"):
        make(torch.float16, other)
    make(torch.bfloat16, other)
    monkeypatch.setattr(seams.linear, "current_platform", SimpleNamespace(device_type="meta"))  # without native code
    with using(Policy("strict")), pytest.raises(opshim.OpUnavailableError, match="matmul_fp16"):
        make(torch.float16)


# ---- start-up -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "installed", "given", "value"),
    [("cuda", False, None, "0"), ("cuda", True, None, None), ("cuda", False, "1", "1"), ("cpu", False, None, None)],
)
def test_no_sampler_is_compiled_by_nvcc_at_start_unless_asked_for(monkeypatch, capsys, device, installed, given, value):
    name = "VLLM_USE_FLASHINFER_SAMPLER"
    monkeypatch.delenv(name, raising=False)
    if given:
        monkeypatch.setenv(name, given)
    monkeypatch.setattr(serve.util, "find_spec", lambda package: installed or None)
    model = serve.Model("/model", "model", True, {})
    _, environment = serve.vllm_command(model, serve.Options([]), "127.0.0.1", 8000, device, {})
    assert environment.get(name) == value
    assert (f"{name}=0" in capsys.readouterr().out) is (value == "0")


@pytest.fixture
def warm_up(monkeypatch):
    """The module, for a runner of at most 12 sequences that notes what it is asked to run; skips without vLLM."""
    pytest.importorskip("vllm")
    from shim.vllm_plugin import warm_up

    ran = []
    table = SimpleNamespace(compute_slot_mapping=lambda *given: ran.append(("slots", given)))
    sampler = SimpleNamespace(forward_native=lambda logits, generators, k, p: ran.append((len(logits), k, p)))
    warm_up.runner = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=12),
        cache_config=SimpleNamespace(mamba_cache_mode="none"),
        input_batch=SimpleNamespace(block_table=table),
        sampler=SimpleNamespace(topk_topp_sampler=sampler),
        max_num_tokens=512,
        is_pooling_model=False,
        device="cpu",
        _dummy_run=lambda count, **options: ran.append((count, options)),
        _zero_block_ids=lambda blocks: ran.append(("zero", blocks)),
    )
    warm_up.ran = ran
    return warm_up


@needs_vllm
def test_each_kind_of_count_is_run_before_the_first_request(warm_up):
    warm_up.batches(warm_up.runner)
    kinds = [(count, "uniform_decode" in options, "create_mixed_batch" in options) for count, options in warm_up.ran]
    assert kinds == [(1, True, False), (2, True, False), (16, False, True)]
    assert all(options["force_attention"] for _, options in warm_up.ran)
    warm_up.ran.clear()
    warm_up.blocks(warm_up.runner)
    assert [blocks for what, blocks in warm_up.ran if what == "zero"] == [[0], [0, 0], [0] * 16]


@needs_vllm
def test_each_way_of_sampling_is_compiled(warm_up):
    warm_up.sampling(warm_up.runner, torch.zeros(16, 50, dtype=torch.bfloat16))
    assert [(rows, k is None, p is None) for rows, k, p in warm_up.ran] == [
        (9, False, False),
        (9, False, True),
        (9, True, False),
    ]


@needs_vllm
def test_any_count_of_rows_shares_one_build_of_the_sampling_kernel(warm_up):
    parameters = [SimpleNamespace(name=name, do_not_specialize_on_alignment=False) for name in ("K", "BATCH_SIZE")]
    warm_up.share(SimpleNamespace(params=parameters))
    assert [parameter.do_not_specialize_on_alignment for parameter in parameters] == [False, True]


@needs_vllm
def test_a_step_that_fails_is_told_and_the_others_run(warm_up, monkeypatch, caplog):
    def broken(*given):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(warm_up, "get_pp_group", lambda: SimpleNamespace(is_last_rank=True))
    monkeypatch.setattr(warm_up.torch.random, "fork_rng", lambda devices: nullcontext())
    monkeypatch.setattr(warm_up.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(warm_up, "_logits", lambda runner: None)
    monkeypatch.setattr(warm_up, "batches", broken)
    ran = []
    for name in ("blocks", "sampling", "ranks", "grammars"):
        monkeypatch.setattr(warm_up, name, lambda *given, name=name: ran.append(name))
    broken.__name__ = "batches"
    with caplog.at_level(logging.INFO, "opshim"):
        warm_up.warm_up(SimpleNamespace(model_runner=warm_up.runner, use_v2_model_runner=False))
    assert ran == ["blocks", "sampling", "ranks", "grammars"]
    assert "not warmed up: batches (RuntimeError: no such kernel)" in caplog.text


@needs_vllm
def test_it_follows_vllms_own_warm_up_and_is_not_reported_as_late(warm_up, monkeypatch):
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    runtime = SimpleNamespace(jit_post_compile_hook="vLLM's")
    monkeypatch.setitem(sys.modules, "triton.knobs", SimpleNamespace(runtime=runtime))
    with warm_up._unwatched():
        assert runtime.jit_post_compile_hook is None
    assert runtime.jit_post_compile_hook == "vLLM's"

    order = []
    monkeypatch.setattr(warm_up, "warm_up", lambda worker: order.append("ours"))
    monkeypatch.setattr(WorkerWrapperBase, "compile_or_warm_up_model", None, raising=False)
    warm_up.install()
    wrapper = object.__new__(WorkerWrapperBase)
    wrapper.worker = SimpleNamespace(compile_or_warm_up_model=lambda: order.append("vLLM's") or "times")
    assert wrapper.compile_or_warm_up_model() == "times"
    assert order == ["vLLM's", "ours"]


@needs_vllm
def test_hooks_for_cuda_are_set_where_there_is_a_worker_and_nowhere_else(monkeypatch):
    pytest.importorskip("vllm")
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    order, hooks = [], [Hook("one", "module", ("moe_sum",), "", {})]

    def set_one(hook, version):
        order.append(hook.name)
        hook.state = "set"

    monkeypatch.setattr(plugin, "_set", set_one)
    monkeypatch.setattr(plugin, "hooks", lambda platform: hooks)
    monkeypatch.setattr(WorkerWrapperBase, "init_device", lambda self: order.append("device"))
    plugin._set_in_workers("cuda", "0.24.0")
    assert order == []
    for _ in range(2):
        object.__new__(WorkerWrapperBase).init_device()
    assert order == ["device", "one", "device"]


def test_a_hook_that_serves_no_op_stops_nothing_when_it_is_missed(monkeypatch, caplog):
    hook = Hook("warm_up", "shim.vllm_plugin.warm_up", (), "", {"os:no_such_name": None})
    with using(Policy("strict")), caplog.at_level(logging.WARNING, "opshim"):
        plugin._set(hook, "0.99")
    assert hook.state == "missed"
    assert "hook warm_up is not set: in vLLM 0.99, os:no_such_name does not exist" in caplog.text
