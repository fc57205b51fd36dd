"""Seam: the experts of a mixture. The checkpoint's own weights (w13 [E,2I,H], w2 [E,H,I]), fused or stage by stage.

On CUDA `fused_moe` serves every batch. On the CPU it serves small ones; where the experts get several rows each, the
stages do: moe_align_block_size, grouped_gemm, silu and product, grouped_gemm, moe_sum, so that a stage without a native
implementation is replaced alone. If fused_moe itself is the one that falls back to its reference, the stages serve
every batch, and the other way round. OPSHIM_MOE=fused or OPSHIM_MOE=staged decides it by hand.

Shared experts, dispatch to other ranks and the sum over them are vLLM's: its runner does them around this method where
the method owns no kernel of vLLM's, and none is made here.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.platforms import current_platform
from vllm.utils.torch_utils import direct_register_custom_op

import shim
from shim import variables
from shim.vllm_plugin.hooking import falls_back, miss, require
from shim.vllm_plugin.models import EXPERTS, STAGES

fused_moe = shim.get("fused_moe")
moe_align_block_size, grouped_gemm, moe_sum = map(shim.get, STAGES)
ROWS_PER_EXPERT = 4  # on average, from which on the stages serve


class ShimExperts(UnquantizedFusedMoEMethod):
    """vLLM's unquantized experts, served by the shim. The backend OOT makes vLLM leave the weights alone."""

    def __init__(self, moe):
        super().__init__(moe)
        self.refusal = _refusal(moe)
        if self.refusal:
            miss("a layer of experts", self.refusal)
            return
        device = current_platform.device_type
        self.unquantized_backend, self.experts_cls = UnquantizedMoeBackend.OOT, None
        self.form = form(device)
        require({"fused": ("fused_moe",), "staged": STAGES, "auto": EXPERTS}[self.form], device)

    @property
    def is_monolithic(self) -> bool:
        return super().is_monolithic if self.refusal else False

    @property
    def topk_indices_dtype(self) -> torch.dtype | None:
        return super().topk_indices_dtype if self.refusal else torch.int32

    def maybe_make_prepare_finalize(self, routing_tables=None):
        """0.24 asks for a kernel's dispatch between ranks; its runner dispatches where it gets none."""
        return super().maybe_make_prepare_finalize(routing_tables) if self.refusal else None

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):
        if self.refusal:
            return super().apply(layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input)
        run = torch.ops.vllm.opshim_experts if torch.compiler.is_compiling() else experts
        return run(
            x,
            layer.w13_weight,
            layer.w2_weight,
            topk_weights,
            topk_ids,
            layer.expert_map,
            layer.apply_router_weight_on_input,
            layer.global_num_experts,
            self.form,
        )


def _refusal(moe) -> str | None:
    """Why fused_moe is not this layer's formula."""
    if moe.activation is not MoEActivation.SILU:
        return f"its activation is {moe.activation.value}"
    if moe.has_bias:
        return "it has biases"
    if moe.is_lora_enabled:
        return "LoRA is enabled"
    if any(value is not None for value in (moe.swiglu_limit, moe.swiglu_alpha, moe.swiglu_beta)):
        return "its SwiGLU is clamped or scaled"
    if moe.moe_backend != "auto":
        return f"--moe-backend {moe.moe_backend} was asked for"
    parallel = moe.moe_parallel_config
    if parallel.use_all2all_kernels and not parallel.use_ag_rs_all2all_kernels:
        return f"its ranks exchange tokens by {parallel.all2all_backend}"
    return None


def form(device: str, environ=os.environ) -> str:
    """How a layer runs: fused, staged, or auto for whichever suits each batch."""
    chosen = variables.value("OPSHIM_MOE", environ) or "auto"
    if chosen == "auto" and falls_back("fused_moe", device):
        return "staged"
    if chosen == "auto" and (device == "cuda" or any(falls_back(stage, device) for stage in STAGES)):
        return "fused"
    return chosen


def experts(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    weight_on_input: bool,
    num_experts: int,
    form: str,
) -> Tensor:
    """x [T,H] -> [T,H]; one op for torch.compile, so that the form follows each batch."""
    if form == "fused" or (form == "auto" and topk_ids.numel() < ROWS_PER_EXPERT * w13.shape[0]):
        return fused_moe(x, w13, w2, None, topk_weights, topk_ids, expert_map, weight_on_input)
    return staged(x, w13, w2, topk_weights, topk_ids, expert_map, weight_on_input, num_experts)


def staged(x, w13, w2, topk_weights, topk_ids, expert_map, weight_on_input, num_experts) -> Tensor:
    """The chain that `fused_moe` fuses (see ops_reference/moe.py)."""
    tokens, k = topk_ids.shape
    size = block_size(tokens * k, w13.shape[0])
    weights = topk_weights.reshape(-1)
    before, after = (weights, None) if weight_on_input else (None, weights)
    groups = moe_align_block_size(topk_ids, size, num_experts, expert_map)
    gate, up = grouped_gemm(x, w13, *groups, size, k, before).chunk(2, dim=-1)
    hidden = (torch.nn.functional.silu(gate.float()) * up).to(x.dtype)
    y = grouped_gemm(hidden, w2, *groups, size, 1, after)
    return moe_sum(y.view(tokens, k, -1), topk_ids)


def block_size(slots: int, experts: int) -> int:
    """Rows per block: the power of two nearest above an expert's mean share, within 8 and 64."""
    share = max(1, slots // experts)
    return min(64, max(8, 1 << (share - 1).bit_length()))


def _fake(x, *args):
    return torch.empty_like(x)


def install() -> None:
    CustomOp.register_oot(ShimExperts, name="UnquantizedFusedMoEMethod")
    direct_register_custom_op("opshim_experts", experts, fake_impl=_fake)
