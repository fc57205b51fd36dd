"""Seam: unquantized linear layers in float16, logits included. `matmul_fp16` over the checkpoint's own weights.

vLLM repacks weights for its CPU matmuls at load; here they stay as they are. Other dtypes are none of the op's: they
stay with vLLM, and no call of theirs passes through the shim.
"""

from __future__ import annotations

import torch
from vllm.model_executor.layers import utils
from vllm.platforms import current_platform

import shim
from shim.vllm_plugin.hooking import require
from shim.vllm_plugin.models import LINEAR

matmul_fp16 = shim.get("matmul_fp16")
_dispatch = utils.dispatch_cpu_unquantized_gemm


def dispatch_cpu_unquantized_gemm(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Sets `layer.cpu_linear`, which vLLM calls as (x, weight, bias). Convolutions and expert weights, which come here
    too, are none of matmul_fp16's."""
    if layer.weight.is_meta or layer.weight.ndim != 2 or layer.weight.dtype is not torch.float16:
        return _dispatch(layer, remove_weight)
    require(LINEAR, current_platform.device_type)
    layer.cpu_linear = linear


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return torch.ops.opshim.matmul_fp16(x, weight, bias)
    return matmul_fp16(x, weight, bias)


def install() -> None:
    utils.dispatch_cpu_unquantized_gemm = dispatch_cpu_unquantized_gemm
