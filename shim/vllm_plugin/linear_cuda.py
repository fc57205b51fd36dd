"""Seam: unquantized linear layers in float16 on CUDA, logits included. `matmul_fp16` over the layer's weights.

torch.compile traces the layers, so the op is called as torch knows it there. Other dtypes are none of the op's: they
stay with vLLM, and no call of theirs passes through the shim.
"""

from __future__ import annotations

import torch
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.platforms import current_platform

import shim
from shim.vllm_plugin.hooking import miss, require
from shim.vllm_plugin.models import LINEAR
from shim.vllm_plugin.versions import HookError

matmul_fp16 = shim.get("matmul_fp16")
_stock = utils.default_unquantized_gemm
_create_weights = UnquantizedLinearMethod.create_weights


def unquantized_gemm(
    layer: torch.nn.Module, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    if not x.dtype == weight.dtype == torch.float16:
        return _stock(layer, x, weight, bias)
    if torch.compiler.is_compiling():
        return torch.ops.opshim.matmul_fp16(x, weight, bias)
    return matmul_fp16(x, weight, bias)


def create_weights(self, layer: torch.nn.Module, *args, **kwargs) -> None:
    """vLLM's; a rank that lacks the op ends as its layers are made, not in their first call."""
    _create_weights(self, layer, *args, **kwargs)
    if layer.weight.dtype is not torch.float16:
        return
    if refusal := _refusal(self):
        miss("a linear layer", refusal)
    else:
        require(LINEAR, current_platform.device_type)


def _refusal(method: UnquantizedLinearMethod) -> str | None:
    """Why the layer's calls would not come here: since 0.32 each is given a function as it is made."""
    given = getattr(method, "_gemm_impl", unquantized_gemm)
    return None if given is unquantized_gemm else "--linear-backend asks for FlashInfer's"


def install() -> None:
    utils.default_unquantized_gemm = unquantized_gemm
    if utils.dispatch_unquantized_gemm() is not unquantized_gemm:
        utils.default_unquantized_gemm = _stock
        raise HookError("dispatch_unquantized_gemm does not give out default_unquantized_gemm")
    UnquantizedLinearMethod.create_weights = create_weights
