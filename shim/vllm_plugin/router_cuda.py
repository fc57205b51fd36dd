"""Seam: which experts a token goes to, on CUDA. `topk_softmax` in the place of vLLM's fused softmax top-k.

vLLM has a router class per formula; those of other formulas stay vLLM's, and are a miss.
"""

from __future__ import annotations

import torch
from vllm.model_executor.layers.fused_moe import layer
from vllm.model_executor.layers.fused_moe.router import fused_topk_router, router_factory
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
from vllm.platforms import current_platform

import shim
from shim.vllm_plugin.hooking import miss, require
from shim.vllm_plugin.models import ROUTER

topk_softmax = shim.get("topk_softmax")
_create = layer.create_fused_moe_router
# From some version on (0.32 has it) vLLM sends the padding of a graph's batch to no expert: tokens -> [tokens] bool.
_padding = getattr(fused_topk_router, "_get_padding_mask", lambda tokens: None)


class ShimRouter(FusedTopKRouter):
    """vLLM's plain router with its softmax served by the shim."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.refusal = None if self.scoring_func == "softmax" else f"its scores are {self.scoring_func}"
        if self.refusal:
            miss("a router", self.refusal)
        else:
            require(ROUTER, current_platform.device_type)

    def _compute_routing(self, hidden_states, router_logits, indices_type, *, input_ids=None):
        if self.refusal:
            return super()._compute_routing(hidden_states, router_logits, indices_type, input_ids=input_ids)
        topk = torch.ops.opshim.topk_softmax if torch.compiler.is_compiling() else topk_softmax
        weights, ids = topk(router_logits, self.top_k, self.renormalize)
        padding = _padding(ids.shape[0])
        return weights, ids if padding is None else ids.masked_fill_(padding[:, None], -1)


def create_fused_moe_router(*args, **kwargs):
    """vLLM's factory; a router of another class than ShimRouter is told."""
    router = _create(*args, **kwargs)
    if not isinstance(router, ShimRouter):
        miss("a router", f"topk_softmax is not the formula of {type(router).__name__}")
    return router


def install() -> None:
    router_factory.FusedTopKRouter = ShimRouter
    layer.create_fused_moe_router = create_fused_moe_router
