"""Everything the plugin relies on inside vLLM, in one place: versions, hooks, and the names each hook reaches for.

A name is written "module:Class.attribute". `parameters` lists the names of a function's parameters, where the plugin
calls it, replaces it or overrides it; None where only its existence matters.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
from dataclasses import dataclass, field

from shim.errors import OpshimError

OLDEST, NEWEST = (0, 24), (0, 33)
ANY = "OPSHIM_ALLOW_ANY_VLLM"

LAYERS = "vllm.model_executor.layers"
ATTENTION = "vllm.v1.attention"


class HookError(OpshimError):
    """A hook that cannot be set, or a layer that a hook cannot serve; the message names it."""


@dataclass
class Hook:
    """One seam of vLLM: which ops serve there, how the plugin gets in, and how that went."""

    name: str
    module: str  # of this package; its `install()` sets the hook
    ops: tuple[str, ...]
    how: str
    targets: dict[str, str | None]  # name inside vLLM -> parameters
    state: str = "not set"  # "not set" | "set" | "missed"
    reason: str = field(default="")


CPU = [
    Hook(
        "router",
        "shim.vllm_plugin.router",
        ("topk_softmax",),
        "subclass put in the place of CPURouter in router_factory",
        {
            f"{LAYERS}.fused_moe.router.router_factory:CPURouter": None,
            f"{LAYERS}.fused_moe.router.cpu_router:CPURouter._compute_routing": (
                "self, hidden_states, router_logits, indices_type, input_ids"
            ),
        },
    ),
    Hook(
        "experts",
        "shim.vllm_plugin.experts",
        ("fused_moe", "moe_align_block_size", "grouped_gemm", "moe_sum"),
        "CustomOp.register_oot UnquantizedFusedMoEMethod",
        {
            "vllm.model_executor.custom_op:CustomOp.register_oot": "_decorated_op_cls, name",
            f"{LAYERS}.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod.__init__": "self, moe",
            f"{LAYERS}.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod.apply": (
                "self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input"
            ),
            f"{LAYERS}.fused_moe.oracle.unquantized:UnquantizedMoeBackend.OOT": None,
        },
    ),
    Hook(
        "gated_delta_net",
        "shim.vllm_plugin.gated_delta_net",
        ("gdn_gating", "gdn_prefill", "gdn_decode"),
        "PluggableLayer.register_oot QwenGatedDeltaNetAttention; function cpu_gdn_attention_core replaced",
        {
            "vllm.model_executor.custom_op:PluggableLayer.register_oot": "_decorated_layer_cls, name",
            f"{LAYERS}.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention.forward_cpu": "self, hidden_states",
            f"{LAYERS}.mamba.ops.cpu.gdn_attention:cpu_gdn_attention_core": (
                "mixed_qkv, b, a, core_attn_out, layer_name"
            ),
            f"{LAYERS}.mamba.ops.cpu.gdn_attention:register_cpu_gdn_attention_ops": "",
            f"{LAYERS}.mamba.ops.cpu.causal_conv1d:causal_conv1d_fn_cpu": (
                "x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state, activation, "
                "pad_slot_id, kwargs"
            ),
            f"{LAYERS}.mamba.ops.cpu.causal_conv1d:causal_conv1d_update_cpu": (
                "x, conv_state, weight, bias, activation, conv_state_indices, query_start_loc, pad_slot_id, kwargs"
            ),
            f"{LAYERS}.mamba.mamba_utils:is_conv_state_dim_first": "",
            "vllm.utils.torch_utils:_resolve_layer_name": "layer_name",
            f"{ATTENTION}.backends.utils:NULL_BLOCK_ID": None,
        },
    ),
    Hook(
        "attention",
        "shim.vllm_plugin.attention",
        ("reshape_and_cache", "paged_attention_v2", "paged_prefill"),
        "register_backend CPU_ATTN",
        {
            f"{ATTENTION}.backends.registry:register_backend": "backend, class_path, is_mamba",
            f"{ATTENTION}.backends.registry:AttentionBackendEnum.CPU_ATTN": None,
            f"{ATTENTION}.backends.cpu_attn:CPUAttentionMetadata": None,
            f"{ATTENTION}.backends.cpu_attn:CPUAttentionMetadataBuilder.build": (
                "self, common_prefix_len, common_attn_metadata, fast_build"
            ),
            f"{ATTENTION}.backends.cpu_attn:CPUAttentionBackendImpl.forward": (
                "self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale"
            ),
            f"{ATTENTION}.backends.cpu_attn:CPUAttentionBackendImpl.do_kv_cache_update": (
                "self, layer, key, value, kv_cache, slot_mapping"
            ),
            f"{ATTENTION}.backends.utils:split_decodes_and_prefills": (
                "common_attn_metadata, decode_threshold, require_uniform, treat_short_extends_as_decodes"
            ),
        },
    ),
    Hook(
        "linear",
        "shim.vllm_plugin.linear",
        ("matmul_fp16",),
        "function dispatch_cpu_unquantized_gemm replaced",
        {
            f"{LAYERS}.utils:dispatch_cpu_unquantized_gemm": "layer, remove_weight",
            f"{LAYERS}.utils:cpu_unquantized_gemm": "layer, x, weight, bias",
        },
    ),
]
PLATFORMS = {"cpu": CPU}


def check_version(version: str, environ=os.environ) -> None:
    """HookError for a vLLM that the plugin does not know, unless OPSHIM_ALLOW_ANY_VLLM=1."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    known = numbers is not None and OLDEST <= tuple(map(int, numbers.groups())) <= NEWEST
    if not known and environ.get(ANY) != "1":
        raise HookError(
            f"vLLM {version} is not supported: opshim knows {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]} "
            f"(set {ANY}=1 to try it, or VLLM_PLUGINS= to run vLLM without opshim)"
        )


def find(target: str, parameters: str | None):
    """What a name inside vLLM stands for; HookError where it is not there or takes other parameters."""
    module, _, path = target.partition(":")
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise HookError(f"{module} does not import: {error}") from error
    for name in path.split("."):
        if not hasattr(found, name):
            raise HookError(f"{target} does not exist")
        found = getattr(found, name)
    if parameters is not None:
        given = ", ".join(inspect.signature(found).parameters)
        if given != parameters:
            raise HookError(f"{target} takes ({given}), expected ({parameters})")
    return found
