"""Seam: which experts a token goes to. `topk_softmax` in the place of the softmax top-k of vLLM's CPU router."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.fused_moe.router import router_factory
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.platforms import current_platform

import shim
from shim.vllm_plugin.hooking import miss, require
from shim.vllm_plugin.models import ROUTER

topk_softmax = shim.get("topk_softmax")


class ShimRouter(CPURouter):
    """vLLM's router with plain softmax routing served by the shim; grouped, biased and custom routing stay vLLM's."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.refusal = self._refusal()
        if self.refusal:
            miss("a router", self.refusal)
        else:
            require(ROUTER, current_platform.device_type)

    def _refusal(self) -> str | None:
        """Why topk_softmax is not this router's formula."""
        if self.use_grouped_topk:
            return "it groups experts"
        if self.custom_routing_function is not None:
            return "it has a routing function of its own"
        if self.scoring_func != "softmax":
            return f"its scores are {self.scoring_func}"
        return None

    def _compute_routing(self, hidden_states, router_logits, indices_type, *, input_ids=None):
        if self.refusal:
            return super()._compute_routing(hidden_states, router_logits, indices_type, input_ids=input_ids)
        topk = torch.ops.opshim.topk_softmax if torch.compiler.is_compiling() else topk_softmax
        return topk(router_logits, self.top_k, self.renormalize)


def install() -> None:
    router_factory.CPURouter = ShimRouter
