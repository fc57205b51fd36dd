"""Everything the plugin relies on inside vLLM, in one place: versions, hooks, and the names each hook reaches for.

A name is written "module:Class.attribute". `parameters` lists the names of a function's parameters, where the plugin
calls it, replaces it or overrides it; None where only its existence matters, a tuple where versions differ in a way
that the plugin does not mind.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
from dataclasses import dataclass, field

from shim import variables
from shim.errors import OpshimError
from shim.vllm_plugin.models import ATTENTION, EXPERTS, GATED_DELTA_NET, LINEAR, ROUTER

OLDEST, NEWEST = (0, 24), (0, 33)
ANY = "OPSHIM_ALLOW_ANY_VLLM"

LAYERS = "vllm.model_executor.layers"
ATTN = "vllm.v1.attention"
MOE = f"{LAYERS}.fused_moe"
Parameters = str | tuple[str, ...] | None


class HookError(OpshimError):
    """A hook that cannot be set, or a layer that a hook cannot serve; the message names it."""


@dataclass
class Hook:
    """One seam of vLLM: which ops serve there, how the plugin gets in, and how that went."""

    name: str
    module: str  # of this package; its `install()` sets the hook
    ops: tuple[str, ...]
    how: str
    targets: dict[str, Parameters]  # name inside vLLM -> parameters
    state: str = "not set"  # "not set" | "set" | "missed"
    reason: str = field(default="")


# What CPU and CUDA have in common.

DELTA_RULE = {
    f"{LAYERS}.mamba.gdn.base:GatedDeltaNetAttention.get_state_dtype": "self",
    f"{LAYERS}.mamba.mamba_utils:is_conv_state_dim_first": "",
    "vllm.model_executor.utils:set_weight_attrs": "weight, weight_attrs",
    f"{ATTN}.backends.utils:NULL_BLOCK_ID": None,
}
UPDATE = (
    "x, conv_state, weight, bias, activation, conv_state_indices, num_accepted_tokens, query_start_loc, max_query_len, "
    "null_block_id, block_idx_last_scheduled_token, initial_state_idx, validate_data"
)
PAGED = {
    f"{ATTN}.backends.utils:split_decodes_and_prefills": (
        "common_attn_metadata, decode_threshold, require_uniform, treat_short_extends_as_decodes"
    ),
}


def _experts() -> Hook:
    return Hook(
        "experts",
        "shim.vllm_plugin.experts",
        EXPERTS,
        "CustomOp.register_oot UnquantizedFusedMoEMethod",
        {
            "vllm.model_executor.custom_op:CustomOp.register_oot": "_decorated_op_cls, name",
            f"{MOE}.unquantized_fused_moe_method:UnquantizedFusedMoEMethod.__init__": "self, moe",
            f"{MOE}.unquantized_fused_moe_method:UnquantizedFusedMoEMethod.apply": (
                "self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input"
            ),
            f"{MOE}.fused_moe_method_base:FusedMoEMethodBase.topk_indices_dtype": None,
            f"{MOE}.oracle.unquantized:UnquantizedMoeBackend.OOT": None,
            f"{MOE}.config:FusedMoEConfig.moe_backend": None,
            f"{MOE}.config:FusedMoEParallelConfig.use_all2all_kernels": None,
            f"{MOE}.config:FusedMoEParallelConfig.use_ag_rs_all2all_kernels": None,
            f"{MOE}.routed_experts:RoutedExperts.expert_map": None,
        },
    )


CPU = [
    Hook(
        "router",
        "shim.vllm_plugin.router",
        ROUTER,
        "subclass put in the place of CPURouter in router_factory",
        {
            f"{MOE}.router.router_factory:CPURouter": None,
            f"{MOE}.router.cpu_router:CPURouter._compute_routing": (
                "self, hidden_states, router_logits, indices_type, input_ids"
            ),
        },
    ),
    _experts(),
    Hook(
        "gated_delta_net",
        "shim.vllm_plugin.gated_delta_net",
        GATED_DELTA_NET,
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
            "vllm.utils.torch_utils:_resolve_layer_name": "layer_name",
            **DELTA_RULE,
        },
    ),
    Hook(
        "attention",
        "shim.vllm_plugin.attention",
        ATTENTION,
        "register_backend CPU_ATTN",
        {
            f"{ATTN}.backends.registry:register_backend": "backend, class_path, is_mamba",
            f"{ATTN}.backends.registry:AttentionBackendEnum.CPU_ATTN": None,
            f"{ATTN}.backends.cpu_attn:CPUAttentionMetadata": None,
            f"{ATTN}.backends.cpu_attn:CPUAttentionMetadataBuilder.build": (
                "self, common_prefix_len, common_attn_metadata, fast_build"
            ),
            f"{ATTN}.backends.cpu_attn:CPUAttentionBackendImpl.forward": (
                "self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale"
            ),
            f"{ATTN}.backends.cpu_attn:CPUAttentionBackendImpl.do_kv_cache_update": (
                "self, layer, key, value, kv_cache, slot_mapping"
            ),
            **PAGED,
        },
    ),
    Hook(
        "linear",
        "shim.vllm_plugin.linear",
        LINEAR,
        "function dispatch_cpu_unquantized_gemm replaced",
        {
            f"{LAYERS}.utils:dispatch_cpu_unquantized_gemm": "layer, remove_weight",
            f"{LAYERS}.utils:cpu_unquantized_gemm": "layer, x, weight, bias",
        },
    ),
]
CUDA = [
    Hook(
        "router",
        "shim.vllm_plugin.router_cuda",
        ROUTER,
        "subclass put in the place of FusedTopKRouter in router_factory; function create_fused_moe_router replaced",
        {
            f"{MOE}.router.router_factory:FusedTopKRouter": None,
            f"{MOE}.router.fused_topk_router:FusedTopKRouter.__init__": (
                "self, top_k, global_num_experts, scoring_func, renormalize, eplb_state"
            ),
            f"{MOE}.router.fused_topk_router:FusedTopKRouter._compute_routing": (
                "self, hidden_states, router_logits, indices_type, input_ids"
            ),
            f"{MOE}.layer:create_fused_moe_router": None,
        },
    ),
    _experts(),
    Hook(
        "gated_delta_net",
        "shim.vllm_plugin.gated_delta_net_cuda",
        GATED_DELTA_NET,
        "PluggableLayer.register_oot QwenGatedDeltaNetAttention, its _forward_core overridden",
        {
            "vllm.model_executor.custom_op:PluggableLayer.register_oot": "_decorated_layer_cls, name",
            f"{LAYERS}.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention._forward_core": (
                "self, mixed_qkv, b, a, core_attn_out"
            ),
            f"{LAYERS}.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention.get_attn_backend": "self",
            f"{LAYERS}.mamba.gdn.qwen_gdn_linear_attn:_resolve_gdn_prefill_backend": "vllm_config",
            **DELTA_RULE,
            f"{LAYERS}.mamba.ops.causal_conv1d:causal_conv1d_fn": (
                "x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state, activation, "
                "pad_slot_id, null_block_id, block_idx_first_scheduled_token, block_idx_last_scheduled_token, "
                "initial_state_idx, num_computed_tokens, block_size_to_align, metadata, validate_data"
            ),
            f"{LAYERS}.mamba.ops.causal_conv1d:causal_conv1d_update": (UPDATE, f"{UPDATE}, out"),  # 0.24, 0.32
            "vllm.forward_context:get_forward_context": "",
            f"{ATTN}.backends.gdn_attn:GDNAttentionBackend.get_builder_cls": "",
            f"{ATTN}.backends.gdn_attn:GDNAttentionMetadataBuilder.__init__": (
                "self, kv_cache_spec, layer_names, vllm_config, device"
            ),
            f"{ATTN}.backend:CommonAttentionMetadata.seq_lens_cpu_upper_bound": None,
            f"{ATTN}.backend:CommonAttentionMetadata.is_prefilling": None,
            f"{ATTN}.backends.gdn_attn:GDNAttentionMetadata.has_initial_state": None,
            f"{ATTN}.backends.gdn_attn:GDNAttentionMetadata.non_spec_query_start_loc": None,
            f"{ATTN}.backends.gdn_attn:GDNAttentionMetadata.non_spec_state_indices_tensor": None,
            f"{ATTN}.backends.gdn_attn:GDNAttentionMetadata.prefill_query_start_loc": None,
            f"{ATTN}.backends.gdn_attn:GDNAttentionMetadata.prefill_has_initial_state": None,
            f"{ATTN}.backends.gdn_attn:GDNAttentionMetadata.prefill_state_indices": None,
            f"{ATTN}.backend:AttentionMetadataBuilder.supports_update_block_table": None,
            f"{ATTN}.backend:AttentionMetadataBuilder.update_block_table": "self, metadata, blk_table, slot_mapping",
            f"{ATTN}.backends.utils:mamba_get_block_table_tensor": (
                "block_table, seq_lens, kv_cache_spec, mamba_cache_mode"
            ),
        },
    ),
    Hook(
        "attention",
        "shim.vllm_plugin.attention_cuda",
        ATTENTION,
        "the platform's get_attn_backend_cls asks for opshim's backend first",
        {
            "vllm.platforms.cuda:CudaPlatformBase.get_attn_backend_cls": (
                "selected_backend, attn_selector_config, num_heads"
            ),
            f"{ATTN}.backends.registry:AttentionBackendEnum.FLASH_ATTN": None,
            f"{ATTN}.backends.flash_attn:FlashAttentionBackend.validate_configuration": None,
            f"{ATTN}.backends.flash_attn:FlashAttentionBackend.forward_includes_kv_cache_update": None,
            f"{ATTN}.backends.flash_attn:FlashAttentionImpl.__init__": (
                "self, num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, "
                "logits_soft_cap, attn_type, kv_sharing_target_layer_name, sinks"
            ),
            f"{ATTN}.backends.flash_attn:FlashAttentionImpl.forward": (
                "self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale"
            ),
            f"{ATTN}.backends.flash_attn:FlashAttentionImpl.do_kv_cache_update": (
                "self, layer, key, value, kv_cache, slot_mapping"
            ),
            f"{ATTN}.backend:AttentionMetadataBuilder.__init__": (
                "self, kv_cache_spec, layer_names, vllm_config, device"
            ),
            f"{ATTN}.backend:AttentionMetadataBuilder.build": (
                "self, common_prefix_len, common_attn_metadata, fast_build"
            ),
            f"{ATTN}.backend:AttentionMetadataBuilder.update_block_table": "self, metadata, blk_table, slot_mapping",
            f"{ATTN}.backend:AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE": None,
            **PAGED,
        },
    ),
    Hook(
        "linear",
        "shim.vllm_plugin.linear_cuda",
        LINEAR,
        "function default_unquantized_gemm replaced; UnquantizedLinearMethod.create_weights asks who serves",
        {
            f"{LAYERS}.linear:UnquantizedLinearMethod.create_weights": None,
            f"{LAYERS}.utils:default_unquantized_gemm": "layer, x, weight, bias",
            f"{LAYERS}.utils:dispatch_unquantized_gemm": ("", "linear_backend"),  # 0.24, 0.32
        },
    ),
    Hook(
        "warm_up",
        "shim.vllm_plugin.warm_up",
        (),
        "method compile_or_warm_up_model put into WorkerWrapperBase",
        {
            "vllm.v1.worker.worker_base:WorkerBase.compile_or_warm_up_model": "self",
            "vllm.v1.worker.worker_base:WorkerWrapperBase.__getattr__": "self, attr",
            "vllm.triton_utils:HAS_TRITON": None,
        },
    ),
]
PLATFORMS = {"cpu": CPU, "cuda": CUDA}


def check_version(version: str, environ=os.environ) -> None:
    """HookError for a vLLM that the plugin does not know, unless OPSHIM_ALLOW_ANY_VLLM=1."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    known = numbers is not None and OLDEST <= tuple(map(int, numbers.groups())) <= NEWEST
    if not known and not variables.is_on(ANY, environ):
        raise HookError(
            f"vLLM {version} is not supported: opshim knows {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]} "
            f"(set {ANY}=1 to try it, or VLLM_PLUGINS= to run vLLM without opshim)"
        )


def find(target: str, parameters: Parameters):
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
        check_parameters(target, ", ".join(inspect.signature(found).parameters), parameters)
    return found


def check_parameters(target: str, given: str, expected: str | tuple[str, ...]) -> None:
    """HookError where a function takes other parameters than expected."""
    forms = (expected,) if isinstance(expected, str) else expected
    if given not in forms:
        raise HookError(f"{target} takes ({given}), expected {' or '.join(f'({form})' for form in forms)}")
