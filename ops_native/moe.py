"""Native moe_align_block_size, grouped_gemm, moe_sum and fused_moe: tensors to pointers, sizes and strides."""

from __future__ import annotations

import torch
from torch import Tensor

import shim
from ops_native.libraries import CPU, CUDA, DTYPE, pointers, where
from ops_reference.common import describe
from ops_reference.moe import align_capacity


def _refusal(act: Tensor, rows: dict[str, Tensor], whole: dict[str, Tensor | None]) -> bool | str:
    """True where act has a native dtype, `rows` are contiguous but for their first dimension, and `whole` entirely."""
    if act.dtype not in DTYPE:
        return f"activations are {describe(act)}"
    for name, tensor in rows.items():
        if not tensor.is_contiguous() and not _inner_contiguous(tensor):
            return f"{name} is not contiguous within its first dimension (strides {tensor.stride()})"
    for name, tensor in whole.items():
        if tensor is not None and not tensor.is_contiguous():
            return f"{name} is not contiguous (strides {tensor.stride()})"
    return True


def _inner_contiguous(tensor: Tensor) -> bool:
    expected = 1
    for size, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()[1:]), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _align_supports(topk_ids, block_size, num_experts, expert_map=None):
    for name, tensor in (("topk_ids", topk_ids), ("expert_map", expert_map)):
        if tensor is not None and not tensor.is_contiguous():
            return f"{name} is not contiguous (strides {tensor.stride()})"
    return True


@shim.native(
    "moe_align_block_size",
    library=CPU,
    symbols={"opshim_moe_align_block_size": "pppppiiii"},
    supports=_align_supports,
)
def moe_align_block_size(c, topk_ids, block_size, num_experts, expert_map=None):
    slots = topk_ids.numel()
    capacity = align_capacity(slots, block_size, num_experts)
    sorted_token_ids, expert_ids = topk_ids.new_empty(capacity), topk_ids.new_empty(capacity // block_size)
    count = topk_ids.new_empty(1)
    c.opshim_moe_align_block_size(
        *pointers(topk_ids, expert_map, sorted_token_ids, expert_ids, count),
        slots,
        block_size,
        num_experts,
        capacity,
        *where(topk_ids),
    )
    return sorted_token_ids, expert_ids, count


MOST_EXPERTS = 4096  # that moe_align.cu can count in a block's shared memory


def _align_supports_cuda(topk_ids, block_size, num_experts, expert_map=None):
    if num_experts > MOST_EXPERTS:
        return f"{num_experts} experts, takes up to {MOST_EXPERTS}"
    return _align_supports(topk_ids, block_size, num_experts, expert_map)


def _align_chunks(slots: int, experts: int) -> int:
    """Into how many chunks moe_align.cu cuts the slots: one while they fit, else enough to keep a GPU busy."""
    most = 256 * min(32, 32768 // experts)  # slots that a block of threads can take
    return 1 if slots <= min(most, 2048) else max(-(-slots // most), min(64, slots // 1024))


@shim.native(
    "moe_align_block_size",
    library=CUDA,
    symbols={"opshim_moe_align_block_size": "ppppppiiiii"},
    supports=_align_supports_cuda,
)
def moe_align_block_size_cuda(c, topk_ids, block_size, num_experts, expert_map=None):
    slots = topk_ids.numel()
    capacity = align_capacity(slots, block_size, num_experts)
    chunks = _align_chunks(slots, num_experts)
    sorted_token_ids, expert_ids = topk_ids.new_empty(capacity), topk_ids.new_empty(capacity // block_size)
    count, scratch = topk_ids.new_empty(1), topk_ids.new_empty(chunks * num_experts if chunks > 1 else 0)
    c.opshim_moe_align_block_size(
        *pointers(topk_ids, expert_map, sorted_token_ids, expert_ids, count, scratch),
        slots,
        block_size,
        num_experts,
        capacity,
        chunks,
        *where(topk_ids),
    )
    return sorted_token_ids, expert_ids, count


def _grouped_supports(x, w, sorted_token_ids, expert_ids, num_tokens_post_padded, block_size, top_k, slot_weights=None):
    if (  # as usual: this runs in every call
        (x.dtype in DTYPE and x.stride()[1] == 1 and w.is_contiguous() and sorted_token_ids.is_contiguous())
        and (expert_ids.is_contiguous() and (slot_weights is None or slot_weights.is_contiguous()))
    ):
        return True
    lists = {"sorted_token_ids": sorted_token_ids, "expert_ids": expert_ids, "slot_weights": slot_weights}
    return _refusal(x, {"x": x, "w": w}, lists)


@shim.native(
    "grouped_gemm",
    library=(CPU, CUDA),
    symbols={"opshim_grouped_gemm": 7 * "p" + 10 * "i"},
    supports=_grouped_supports,
)
def grouped_gemm(c, x, w, sorted_token_ids, expert_ids, num_tokens_post_padded, block_size, top_k, slot_weights=None):
    experts, features, inner = w.shape
    slots = x.shape[0] * top_k
    y = x.new_empty((slots, features))
    c.opshim_grouped_gemm(
        *pointers(x, w, sorted_token_ids, expert_ids, num_tokens_post_padded, slot_weights, y),
        DTYPE[x.dtype],
        slots,
        sorted_token_ids.shape[0],
        block_size,
        top_k,
        experts,
        features,
        inner,
        x.stride(0),
        w.stride(0),
        *where(x),
    )
    return y


def _sum_supports(y, topk_ids=None):
    if y.stride(2) != 1 and y.shape[2] > 1:
        return f"y is not contiguous in its last dimension (strides {y.stride()})"
    return _refusal(y, {}, {"topk_ids": topk_ids})


@shim.native("moe_sum", library=(CPU, CUDA), symbols={"opshim_moe_sum": "pppiiiiii"}, supports=_sum_supports)
def moe_sum(c, y, topk_ids=None):
    tokens, top_k, features = y.shape
    out = y.new_empty((tokens, features))
    c.opshim_moe_sum(
        *pointers(y, topk_ids, out),
        DTYPE[y.dtype],
        tokens,
        top_k,
        features,
        *y.stride()[:2],
        *where(y),
    )
    return out


def _fused_supports(
    x, w1, w2, w3=None, topk_weights=None, topk_ids=None, expert_map=None, apply_router_weight_on_input=False
):
    if (  # as usual: this runs in every call
        (x.dtype in DTYPE and x.stride()[1] == 1 and w1.is_contiguous() and w2.is_contiguous() and topk_weights.is_contiguous())
        and topk_ids.is_contiguous()
        and (w3 is None or w3.is_contiguous())
        and (expert_map is None or expert_map.is_contiguous())
    ):
        return True
    rows = {"x": x, "w1": w1, "w2": w2} if w3 is None else {"x": x, "w1": w1, "w2": w2, "w3": w3}
    return _refusal(x, rows, {"topk_weights": topk_weights, "topk_ids": topk_ids, "expert_map": expert_map})


def _fused_sizes(x, w1, w2, w3, topk_ids, expert_map, apply_router_weight_on_input):
    """Sizes and strides, in the order of the C functions."""
    experts, hidden, inner = w2.shape
    return (
        *(DTYPE[x.dtype], *topk_ids.shape, experts, inner, hidden),
        *(0 if expert_map is None else expert_map.shape[0], apply_router_weight_on_input),
        *(x.stride(0), w1.stride(0), w2.stride(0), 0 if w3 is None else w3.stride(0)),
    )


@shim.native(
    "fused_moe",
    library=CPU,
    symbols={"opshim_fused_moe": 8 * "p" + 12 * "i"},
    supports=_fused_supports,
)
def fused_moe(
    c, x, w1, w2, w3=None, topk_weights=None, topk_ids=None, expert_map=None, apply_router_weight_on_input=False
):
    out = x.new_empty(x.shape)
    c.opshim_fused_moe(
        *pointers(x, w1, w2, w3, topk_weights, topk_ids, expert_map, out),
        *_fused_sizes(x, w1, w2, w3, topk_ids, expert_map, apply_router_weight_on_input),
        *where(x),
    )
    return out


def _scratch_bytes(slots: int, experts: int, inner: int, hidden: int, dtype: torch.dtype) -> int:
    """What lies between fused_moe's kernels: each slot's hidden row and result, the groups of slots and their tiles."""
    result = 2 if dtype is torch.bfloat16 and slots * hidden > 1 << 23 else 4
    row = (6 if dtype is torch.float16 else 4) * inner + result * hidden
    groups = 4 * experts * (1 if slots <= 2048 else 128)
    return slots * (row + 8) + 32 * min(slots, experts + slots // 8) + groups + 9 * 256


@shim.native(
    "fused_moe",
    library=CUDA,
    symbols={"opshim_fused_moe": 9 * "p" + 13 * "i"},
    supports=_fused_supports,
)
def fused_moe_cuda(
    c, x, w1, w2, w3=None, topk_weights=None, topk_ids=None, expert_map=None, apply_router_weight_on_input=False
):
    experts, hidden, inner = w2.shape
    out = x.new_empty(x.shape)
    size = _scratch_bytes(topk_ids.numel(), experts, inner, hidden, x.dtype)
    scratch = torch.empty(size, dtype=torch.uint8, device=x.device)
    c.opshim_fused_moe(
        *pointers(x, w1, w2, w3, topk_weights, topk_ids, expert_map, out, scratch),
        *_fused_sizes(x, w1, w2, w3, topk_ids, expert_map, apply_router_weight_on_input),
        size,
        *where(x),
    )
    return out
