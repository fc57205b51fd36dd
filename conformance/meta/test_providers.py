"""Others' kernels as providers: known by name, lazy, only by explicit choice, with a reason for whatever they refuse."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ops_native  # noqa: F401
import ops_reference  # noqa: F401
import shim
from conformance.case import table
from conformance.conform import ROOT
from conformance.run import Target, results_of, run
from shim import plugins, providers
from shim.dispatch import Chain
from shim.op import temporary
from shim.policy import Policy
from shim.providers import vllm_cuda
from shim.providers.adapters import (
    Adapters,
    _has_negatives,
    absent,
    covers,
    has_negatives,
    keep_states,
    looked,
    once_per_batch,
    starting_states,
)

NAMES = {"torch", "vllm", "fla", "flashinfer"}
BF16, F32, F16 = torch.bfloat16, torch.float32, torch.float16
ATTENTION = {"HQ": 4, "HK": 2, "D": 64, "BS": 32}


@pytest.fixture(autouse=True)
def registered():
    plugins.load_entry_points()


def case(op, sizes, dtype):
    return table(op, "sizes", [sizes], [dtype])[0]


def test_every_op_knows_them():
    for op in map(shim.get, shim.names()):
        if op.library.ns == "opshim" and op.reference.__module__.startswith("ops_reference"):
            assert set(op.providers()) >= NAMES, op.name


def test_registering_them_imports_none_of_the_libraries():
    code = (
        "import sys, ops_reference; from shim import plugins; plugins.load_entry_points();"
        "print([name for name in ('vllm', 'fla', 'flashinfer', 'triton') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_a_test_forgets_is_registered_again():
    op = shim.get("moe_sum")
    kept = list(op.implementations)
    try:
        op.implementations[:] = [one for one in kept if one.provider not in NAMES]
        with temporary():
            plugins.load_entry_points()
            assert set(op.providers()) >= NAMES
        assert not NAMES & set(op.providers())
        plugins.load_entry_points()
        assert set(op.providers()) >= NAMES
    finally:
        op.implementations[:] = kept
        op.chains.clear()


def test_they_serve_only_by_choice():
    op = shim.get("moe_sum")
    assert Chain(op, "cpu", Policy("auto")).selected.provider not in NAMES
    assert Chain(op, "cpu", Policy("strict", {"moe_sum": "torch"})).selected.provider == "torch"


def test_what_a_library_has_not_is_not_offered_and_says_why():
    result = run(case("gdn_decode", {}, F32), Target.find("gdn_decode", "torch", "cpu"))
    assert (result.status, result.reason) == ("skip", "not_offered")
    assert "torch has no gated delta rule" in result.message


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("provider", sorted(NAMES - {"torch"}))
def test_without_a_gpu_their_gpu_kernels_say_so(provider):
    assert "torch sees no GPU" in Target.find("gdn_prefill", provider, "cuda").missing


def test_a_package_that_is_not_there_or_does_not_import_is_the_reason(tmp_path, monkeypatch):
    assert absent("no_such_package") == "no_such_package is not installed"
    (tmp_path / "opshim_test_broken.py").write_text("raise OSError('libcuda.so.1 not found')")
    monkeypatch.syspath_prepend(tmp_path)
    assert absent("opshim_test_broken") == "opshim_test_broken does not import: OSError: libcuda.so.1 not found"


def test_what_one_op_needs_is_asked_after_what_all_need():
    adapters = Adapters("mine", None, lambda: "")
    adapters("moe_sum", needs=lambda: "this build has no moe_sum")(lambda y, topk_ids=None: y)
    assert adapters.ops["moe_sum"]["available"]() == "this build has no moe_sum"
    adapters = Adapters("mine", None, lambda: "mine is not installed")
    adapters.lacks(moe_sum="it has none")
    assert adapters.ops["moe_sum"]["available"]() == "mine is not installed"


@pytest.mark.parametrize("name", providers.MODULES)
def test_each_says_what_every_op_has_or_lacks(name):
    module = importlib.import_module(f"shim.providers.{name}")
    references = [op for op in shim.names() if shim.get(op).reference.__module__.startswith("ops_reference")]
    assert sorted(module.adapters.ops) == sorted(references)
    assert isinstance(module.BUILD, str)


@pytest.mark.parametrize(
    ("op", "sizes", "dtype"),
    [
        ("topk_softmax", {"T": 5, "E": 60, "topk": 4}, F32),
        ("gdn_gating", {"T": 5, "HV": 3}, BF16),
        ("grouped_gemm", {"T": 5, "E": 4, "weighted": True}, BF16),
        ("moe_sum", {"T": 5, "topk": 3, "with_ids": True}, F16),
        ("fused_moe", {"T": 5, "E": 4, "merged": False}, BF16),
        ("reshape_and_cache", {"T": 9, "D": 32}, F16),
        ("paged_attention_v2", ATTENTION | {"alibi": True}, F32),
        ("paged_prefill", ATTENTION | {"window": 5}, F32),
        ("matmul_fp16", {"M": 5, "bias": True}, F16),
    ],
)
def test_torch_passes(op, sizes, dtype):
    result = run(case(op, sizes, dtype), Target.find(op, "torch", "cpu"))
    assert result.status == "pass", result.message


def test_torch_refuses_a_soft_cap():
    one = case("paged_prefill", ATTENTION | {"softcap": 5.0}, F32)
    result = run(one, Target.find("paged_prefill", "torch", "cpu"))
    assert (result.reason, result.message) == ("refused", "scaled_dot_product_attention has no soft cap")


vllm_on_cpu = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None or torch.cuda.is_available(), reason="vLLM for CPUs is not installed"
)


@vllm_on_cpu
@pytest.mark.parametrize(
    ("op", "sizes", "dtype"),
    [
        ("topk_softmax", {"T": 5, "E": 60, "topk": 4}, F32),
        ("topk_softmax", {"T": 5, "E": 60, "topk": 4, "bias": True}, F32),
        ("fused_moe", {"T": 5, "E": 4}, F32),  # in bfloat16 it truncates on CPUs without AVX512-BF16
        ("fused_moe", {"T": 5, "E": 4, "merged": False}, F32),
        ("paged_attention_v2", ATTENTION | {"window": 7, "softcap": 5.0}, F32),
        ("paged_prefill", ATTENTION | {"alibi": True}, BF16),
        ("matmul_fp16", {"M": 5, "bias": True}, F16),
    ],
)
def test_vllm_passes_on_cpus(op, sizes, dtype):
    result = run(case(op, sizes, dtype), Target.find(op, "vllm", "cpu"))
    assert result.status == "pass", result.message


@vllm_on_cpu
@pytest.mark.parametrize(
    ("op", "sizes"), [("gdn_prefill", {"lengths": (5, 70), "K": 64, "V": 64}), ("gdn_decode", {}), ("gdn_gating", {})]
)
def test_vllm_on_cpus_computes_the_same_formula_as_the_gated_delta_net(op, sizes):
    """In bfloat16 throughout, gates included: outside the budget, but no other formula."""
    one, target = case(op, sizes, BF16), Target.find(op, "vllm", "cpu")
    given, wanted = (one.arguments("cpu", 0) for _ in range(2))
    results = (
        results_of(target.op, function(**arguments), arguments)
        for function, arguments in ((target.function, given), (target.op.reference, wanted))
    )
    torch.testing.assert_close(*results, rtol=0.05, atol=0.05)


@vllm_on_cpu
def test_vllm_refuses_what_it_documents_as_unsupported():
    one = case("paged_prefill", ATTENTION | {"BS": 24}, BF16)
    result = run(one, Target.find("paged_prefill", "vllm", "cpu"))
    assert result.message == "vLLM's CPU attention takes block sizes that are multiples of 32"
    assert "for GPUs only" in Target.find("moe_sum", "vllm", "cpu").missing


@vllm_on_cpu
def test_vllm_raises_where_its_kernel_would_write_through_a_negative_index():
    arguments = case("fused_moe", {"T": 5, "E": 4}, BF16).arguments("cpu", 0)
    arguments["topk_ids"][2, 0] = -1
    with pytest.raises(ValueError, match="no negative id"):
        Target.find("fused_moe", "vllm", "cpu").function(**arguments)


# ---- what adapters share, and what those for GPUs refuse by shape, on the CPU ------------------------------------------


def test_a_batch_is_looked_at_once_until_it_is_written_to():
    looks = []
    largest = once_per_batch(lambda tensor: looks.append(1) or int(tensor.max()))
    one, other = torch.tensor([1, 2]), torch.tensor([7])
    assert [largest(one), largest(one), largest(other), len(looks)] == [2, 2, 7, 2]
    one[0] = 5
    assert [largest(one), len(looks)] == [5, 3]
    with torch.inference_mode():
        mine = torch.tensor([9, -1])
        assert [largest(mine), largest(mine), len(looks)] == [9, 9, 4]
        assert not has_negatives(mine)  # as a server has them
    assert has_negatives(torch.tensor([9, -1]))


def test_states_are_gathered_and_put_back_for_slots_only():
    state = torch.arange(3.0).view(3, 1, 1, 1).repeat(1, 1, 2, 2) + 1
    slots, has = torch.tensor([2, -1, 0]), torch.tensor([True, True, False])
    starts = starting_states(state, slots, has)
    assert starts[:, 0, 0, 0].tolist() == [3, 0, 0]
    keep_states(state, slots, starts + 10)
    assert state[:, 0, 0, 0].tolist() == [10, 2, 13]


def test_vllm_on_gpus_refuses_what_would_overflow_its_offsets():
    supports = vllm_cuda.adapters.ops["gdn_prefill"]["supports"]

    def answer(tokens, sequences=1, K=128, dtype=BF16):
        q = torch.empty(1, dtype=dtype).expand(tokens, 16, K)
        v = torch.empty(1, dtype=dtype).expand(tokens, 32, 128)
        state = torch.empty(1).expand(4, 32, 128, K)
        return supports(q, q, v, None, None, state, torch.zeros(sequences), None, None)

    assert answer(32768) is True
    assert "32 bits" in answer(300_000)
    assert "32 bits" in answer(64, sequences=5000)
    assert "K up to 256" in answer(64, K=512)
    assert "float32" in answer(64, dtype=F32)


def test_vllm_on_gpus_refuses_caches_of_different_strides():
    supports = vllm_cuda.adapters.ops["reshape_and_cache"]["supports"]
    key, pages = torch.zeros(3, 2, 8), torch.zeros(4, 2, 16, 2, 8)
    slots = torch.zeros(3, dtype=torch.int64)
    assert supports(key, key, *pages.unbind(1), slots) is True
    assert "same strides" in supports(key, key, pages[:, 0], torch.zeros(4, 16, 2, 8), slots)
    assert "end to end" in supports(torch.zeros(3, 8, 2).mT, key, *pages.unbind(1), slots)


def test_vllm_on_gpus_is_given_negative_ids_as_an_expert_that_is_elsewhere(monkeypatch):
    """Its experts stand in as the reference, for ids that are none of the map's."""

    def fused_experts(x, w1, w2, weights, ids, *, apply_router_weight_on_input, global_num_experts, expert_map):
        assert int(ids.min()) >= 0 and global_num_experts == len(expert_map)
        return shim.get("fused_moe").reference(x, w1, w2, None, weights, ids, expert_map, apply_router_weight_on_input)

    name = "vllm.model_executor.layers.fused_moe.fused_moe"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(fused_experts=fused_experts))
    for mapped in (False, True):
        given = case("fused_moe", {"T": 5, "E": 4}, BF16).arguments("cpu", 0)
        given["topk_ids"][2, 0] = -1
        if mapped:
            given["expert_map"] = torch.tensor([1, -1, 0, 2, -1, 3], dtype=torch.int32)
        assert torch.equal(vllm_cuda.fused_moe(**given), shim.get("fused_moe").reference(**given))
    align = vllm_cuda.adapters.ops["moe_align_block_size"]["supports"]
    assert "no negative id" in align(torch.tensor([[0, -1]]), 16, 4) and align(torch.tensor([[0, 1]]), 16, 4) is True


def test_vllm_on_gpus_starts_sequences_without_a_slot_from_nothing(monkeypatch):
    def chunked(q, k, v, g, beta, *, initial_state, cu_seqlens, **_):
        seen.append(initial_state)
        return v, initial_state + 1

    seen = []
    monkeypatch.setattr(vllm_cuda, "_chunks", lambda cu_seqlens: (None, None))
    monkeypatch.setattr(vllm_cuda, "_linear_attention", lambda: SimpleNamespace(chunk_gated_delta_rule=chunked))
    given = case("gdn_prefill", {"lengths": (5, 3)}, BF16).arguments("cpu", 0)
    given["state_indices"][1], given["has_initial_state"][:] = -1, True
    before = given["state"].clone()
    vllm_cuda.gdn_prefill(**given)
    slot = int(given["state_indices"][0])
    assert torch.equal(seen[0][0], before[slot].float()) and not seen[0][1].any()
    before[slot] += 1
    assert torch.equal(given["state"], before)


def test_a_look_at_the_batch_is_known_to_calls_that_may_not_wait():
    bounds = torch.tensor([0, 5, 9], dtype=torch.int32)
    assert covers(bounds, 9) and not covers(bounds, 10) and not covers(bounds[:1], 0)
    one, other = torch.tensor([-1]), torch.tensor([-2])
    assert has_negatives(one)
    assert looked(_has_negatives, one, None) is True and _has_negatives.knows(one)
    assert not _has_negatives.knows(other)
    one[0] = 3
    assert not _has_negatives.knows(one)


def decode_arguments():
    return case("gdn_decode", {"K": 64, "V": 32}, BF16).arguments("cpu", 0)


def test_vllm_on_gpus_decodes_from_the_projection_itself():
    q, k, v = map(decode_arguments().get, "qkv")
    wanted = torch.cat([x.flatten(1) for x in (q, k, v)], dim=1)
    for parts in ((q, k, v), (q[1:], k[1:], v[1:]), (q[:0], k[:0], v[:0])):
        mixed = vllm_cuda._mixed_qkv(*parts)
        assert (mixed.data_ptr(), mixed.stride()) == (parts[0].data_ptr(), wanted.stride())
        assert torch.equal(mixed, torch.cat([x.flatten(1) for x in parts], dim=1))


def test_vllm_on_gpus_packs_what_is_no_projection():
    q, k, v = map(decode_arguments().get, "qkv")
    for parts in ((k, q, v), (q, k, v.clone()), (q.clone(), k.clone(), v.clone()), (q, k[[2, 1, 0]], v), (q, q, v)):
        mixed = vllm_cuda._mixed_qkv(*parts)
        assert torch.equal(mixed, torch.cat([x.flatten(1) for x in parts], dim=1))
        assert mixed.is_contiguous() and mixed.data_ptr() not in (q.data_ptr(), k.data_ptr())
    far = torch.empty_strided((3, 384), (1 << 30, 1), device="meta")  # beyond the kernel's offsets
    assert vllm_cuda._mixed_qkv(*(far[:, at : at + 128].unflatten(1, (-1, 64)) for at in (0, 128, 256))).is_contiguous()


@pytest.mark.parametrize("changed", [{}, {"scale": 2}, {"l2norm": False}, {"null_index": 2}])
def test_vllm_on_gpus_calls_the_packed_kernel_with_what_the_op_was_given(monkeypatch, changed):
    """The kernel stands in as the reference, on what its parameters mean in vLLM."""
    seen = {}

    def packed(*, mixed_qkv, scale, initial_state, out, ssm_state_indices, use_qk_l2norm_in_kernel, **gates):
        seen.update(mixed_qkv=mixed_qkv, scale=scale, out=out, state=initial_state)
        heads, values, size = initial_state.shape[1:]
        keys = (mixed_qkv.shape[1] - heads * values) // 2
        q, k, v = mixed_qkv.split([keys, keys, heads * values], dim=1)
        core = {"q": q.unflatten(1, (-1, size)), "k": k.unflatten(1, (-1, size)), "v": v.unflatten(1, (-1, values))}
        rest = {"state_indices": ssm_state_indices, "scale": scale, "l2norm": use_qk_l2norm_in_kernel, "null_index": 0}
        out[:, 0] = shim.get("gdn_decode").reference(**core, **gates, state=initial_state, **rest)

    library = SimpleNamespace(fused_recurrent_gated_delta_rule_packed_decode=packed)
    monkeypatch.setattr(vllm_cuda, "_linear_attention", lambda: library)
    given, wanted = (decode_arguments() | changed for _ in range(2))
    assert vllm_cuda.adapters.ops["gdn_decode"]["supports"](**given) is True
    output = vllm_cuda.gdn_decode(**given)
    assert torch.equal(output, shim.get("gdn_decode").reference(**wanted))
    assert torch.equal(given["state"], wanted["state"])
    assert seen["mixed_qkv"].data_ptr() == given["q"].data_ptr() and seen["state"] is given["state"]
    assert seen["out"].is_contiguous() and isinstance(seen["scale"], float)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_has_the_packed_kernel_with_the_parameters_that_are_passed():
    """Read from its source, as its kernels do not import everywhere."""
    place = next(place for place in vllm_cuda.FLA if importlib.util.find_spec(place))
    folder = Path(importlib.util.find_spec(place).submodule_search_locations[0])
    functions = ast.parse((folder / "ops/fused_recurrent.py").read_text()).body
    name = "fused_recurrent_gated_delta_rule_packed_decode"
    (function,) = (one for one in functions if isinstance(one, ast.FunctionDef) and one.name == name)
    passed = "mixed_qkv a b A_log dt_bias scale initial_state out ssm_state_indices use_qk_l2norm_in_kernel"
    assert [argument.arg for argument in function.args.args] == passed.split()


def test_vllm_on_gpus_refuses_decodes_that_its_kernel_does_not_take():
    supports = vllm_cuda.adapters.ops["gdn_decode"]["supports"]
    given = decode_arguments()
    apart = {name: given[name].clone() for name in "qkv"}
    assert supports(**given) is True and supports(**given | apart) is True
    wide = given["a"].repeat_interleave(2, dim=1)[:, ::2]
    assert "last dimension" in supports(**given | {"a": wide})
    pool = given["state"].transpose(2, 3).contiguous().transpose(2, 3)
    assert "states are contiguous" in supports(**given | {"state": pool})
    many = {name: given[name][:1].expand(20_000, *given[name].shape[1:]) for name in ("q", "k", "v", "a", "b")}
    assert "65535 rows" in supports(**given | many)
    assert "32 bits" in supports(**given | {"b": torch.empty_strided((3, 4), (1 << 30, 1), device="meta")})
