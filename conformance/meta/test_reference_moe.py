"""The references of the expert ops: examples worked by hand, and the identities between the ops, in float64."""

import pytest
import torch

from ops_reference.moe import align_capacity, fused_moe, grouped_gemm, moe_align_block_size, moe_sum
from shim import OpArgumentError

F64 = torch.float64


def example(op, dtype=F64, **sizes):
    return op.example(torch.Generator().manual_seed(0), "cpu", dtype, **sizes)


def ids(*rows):
    return torch.tensor(rows, dtype=torch.int32)


def aligned(*arguments, **more):
    return [part.tolist() for part in moe_align_block_size.reference(*arguments, **more)]


def test_align_by_hand():
    """Expert 0 has slots 1 and 4, expert 2 has 0, 2 and 5, expert 1 has none, slot 3 is dropped; 6 fills."""
    slots, experts, count = aligned(ids([2, 0, 2], [-1, 0, 2]), 2, 3)
    assert slots == [1, 4, 0, 2, 5, 6, 6, 6, 6, 6]
    assert experts == [0, 2, 2, -1, -1]
    assert count == [6]


def test_align_sends_ids_through_the_map():
    """Global 0 lives elsewhere, 1 is local 1, 2 is local 0: groups in the order of local ids, which blocks name."""
    slots, experts, count = aligned(ids([2, 0, 1], [1, -1, 2]), 2, 3, torch.tensor([-1, 1, 0], dtype=torch.int32))
    assert slots[:4] == [0, 5, 2, 3]
    assert experts[:2] == [0, 1]
    assert count == [4]


@pytest.mark.parametrize(("slots", "block_size", "experts"), [(6, 2, 3), (1, 16, 8), (0, 8, 4), (64, 7, 5), (64, 1, 5)])
def test_align_has_room_for_the_worst_routing(slots, block_size, experts):
    capacity = align_capacity(slots, block_size, experts)
    assert capacity % block_size == 0
    spread = torch.arange(slots, dtype=torch.int32).remainder(experts).view(-1, 1)  # as many partial blocks as can be
    sorted_ids, _, count = moe_align_block_size.reference(spread, block_size, experts)
    assert int(count) <= len(sorted_ids) == capacity


def test_align_drops_everything():
    slots, experts, count = aligned(ids([-1, -5]), 4, 3)
    assert (set(slots), set(experts), count) == ({2}, {-1}, [0])


def test_grouped_gemm_by_hand():
    x, w = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[[1.0, 0.0]], [[0.0, 10.0]]])
    blocks = moe_align_block_size.reference(ids([0, 1], [1, -1]), 4, 2)
    y = grouped_gemm.reference(x, w, *blocks, 4, 2, torch.tensor([1.0, 2.0, 3.0, float("nan")]))
    assert y.flatten().tolist() == [1, 40, 120, 0]


def test_grouped_gemm_reads_no_entry_beyond_the_count():
    arguments = example(grouped_gemm, T=9, E=5)
    expected = grouped_gemm.reference(**arguments)
    arguments["sorted_token_ids"][int(arguments["num_tokens_post_padded"]) :] = 0
    arguments["expert_ids"][int(arguments["num_tokens_post_padded"]) // arguments["block_size"] :] = 0
    assert torch.equal(grouped_gemm.reference(**arguments), expected)


@pytest.mark.parametrize("block_size", [1, 7, 64])
def test_grouped_gemm_does_not_depend_on_the_block_size(block_size):
    results = [grouped_gemm.reference(**example(grouped_gemm, T=9, block_size=size)) for size in (16, block_size)]
    torch.testing.assert_close(*results)


def test_moe_sum_ignores_what_dropped_slots_hold():
    y = torch.tensor([[[1.0], [float("nan")], [3.0]], [[float("inf")], [float("nan")], [4.0]]])
    assert moe_sum.reference(y, ids([0, -1, 2], [-1, -2, 0])).flatten().tolist() == [4, 4]
    assert moe_sum.reference(y).isnan().all()


def staged(x, w1, w2, w3, topk_weights, topk_ids, expert_map=None, block_size=8):
    (tokens, top_k), experts = topk_ids.shape, len(w1) if expert_map is None else len(expert_map)
    blocks = (*moe_align_block_size.reference(topk_ids, block_size, experts, expert_map), block_size)
    gate_up = grouped_gemm.reference(x, w1 if w3 is None else torch.cat([w1, w3], 1), *blocks, top_k)
    gate, up = gate_up.chunk(2, dim=-1)
    hidden = torch.nn.functional.silu(gate) * up
    y = grouped_gemm.reference(hidden, w2, *blocks, 1, topk_weights.flatten())
    return moe_sum.reference(y.view(tokens, top_k, -1), topk_ids)


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("mapped", [False, True])
def test_staged_chain_is_fused_moe(merged, mapped):
    arguments = example(fused_moe, merged=merged)
    del arguments["apply_router_weight_on_input"]
    arguments["topk_ids"][0], arguments["topk_ids"][1] = -1, 3
    if mapped:
        arguments["expert_map"] = torch.tensor([4, -1, 0, 1, -1, 2, -1, 3], dtype=torch.int32)
    torch.testing.assert_close(staged(**arguments), fused_moe.reference(**arguments))


def test_format_a_is_format_b():
    a = example(fused_moe, merged=False)
    b = a | {"w1": torch.cat([a["w1"], a["w3"]], 1), "w3": None}
    torch.testing.assert_close(fused_moe.reference(**a), fused_moe.reference(**b))


def test_fused_moe_by_hand():
    """One token, two experts of width 1: 0.25 * silu(2) * 6 * 1 + 0.75 * silu(-2) * 4 * 10."""
    x = torch.tensor([[2.0]], dtype=F64)
    w13, w2 = torch.tensor([[[1.0], [3.0]], [[-1.0], [2.0]]], dtype=F64), torch.tensor([[[1.0]], [[10.0]]], dtype=F64)
    y = fused_moe.reference(x, w13, w2, None, torch.tensor([[0.25, 0.75]], dtype=F64), ids([0, 1]))
    silu = torch.nn.functional.silu(torch.tensor([2.0, -2.0], dtype=F64))
    torch.testing.assert_close(y.item(), (0.25 * silu[0] * 6 + 0.75 * silu[1] * 40).item())


def test_an_expert_chosen_twice_counts_twice():
    once = example(fused_moe, topk=1)
    once["topk_weights"].fill_(0.5)
    twice = once | {name: once[name].expand(-1, 2).contiguous() for name in ("topk_ids", "topk_weights")}
    torch.testing.assert_close(fused_moe.reference(**twice), 2 * fused_moe.reference(**once))


def test_weight_on_input_scales_the_input():
    arguments = example(fused_moe, topk=1, on_input=True)
    arguments["topk_weights"].uniform_(0.5, 2, generator=torch.Generator().manual_seed(0))
    scaled = arguments | {
        "x": arguments["x"] * arguments["topk_weights"],
        "topk_weights": torch.ones_like(arguments["topk_weights"]),
        "apply_router_weight_on_input": False,
    }
    torch.testing.assert_close(fused_moe.reference(**arguments), fused_moe.reference(**scaled))


def test_nan_in_an_unchosen_expert_does_not_matter():
    arguments = example(fused_moe, T=1, E=8, topk=2)
    unchosen = torch.ones(8, dtype=torch.bool)
    unchosen[arguments["topk_ids"][0].long()] = False
    for name in ("w1", "w2"):
        arguments[name][unchosen] = float("nan")
    assert fused_moe.reference(**arguments).isfinite().all()


@pytest.mark.parametrize("w3", [8, 2.0, "up", torch.zeros(3)], ids=str)
def test_w3_must_be_a_weight_or_none(w3):
    with pytest.raises(OpArgumentError, match="'w3'") as error:
        fused_moe(**example(fused_moe, torch.float32) | {"w3": w3})
    assert error.value.argument == "w3"


@pytest.mark.parametrize("op", [moe_align_block_size, grouped_gemm, moe_sum, fused_moe], ids=lambda op: op.name)
@pytest.mark.parametrize("tokens", [0, 3])
def test_fakes_have_the_shapes_and_dtypes_of_the_results(op, tokens):
    arguments = example(op, torch.bfloat16, T=tokens)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = getattr(torch.ops.opshim, op.name)(
            **{name: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for name, v in arguments.items()}
        )
    real = op.reference(**arguments)
    if not isinstance(real, tuple):
        fake, real = [fake], [real]
    assert [(t.shape, t.dtype) for t in fake] == [(t.shape, t.dtype) for t in real]
