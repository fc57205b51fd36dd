"""The ops of each seam, and which of them a model needs, from its configuration alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ATTENTION = ("reshape_and_cache", "paged_attention_v2", "paged_prefill")
GATED_DELTA_NET = ("gdn_gating", "gdn_prefill", "gdn_decode")
ROUTER, LINEAR = ("topk_softmax",), ("matmul_fp16",)
STAGES = ("moe_align_block_size", "grouped_gemm", "moe_sum")  # of fused_moe
EXPERTS = ("fused_moe", *STAGES)
WITHOUT_ATTENTION = ("mamba", "mamba2", "falcon_mamba")


def ops_for_model(hf_config: Any, dtype: Any) -> list[str]:
    """Names of the ops that serve a model: its Hugging Face configuration (an object or the dict of config.json) and
    the dtype it is served in (a torch.dtype or its name). A quantized model's experts and linear layers stay vLLM's,
    and so do latent attention and models without any."""
    text = _get(hf_config, "text_config") or hf_config
    kinds = _get(text, "layer_types") or []
    linear = "linear_attention" in kinds if kinds else _get(text, "linear_num_value_heads") is not None
    attention = any(kind != "linear_attention" for kind in kinds) if kinds else True
    attention &= _get(text, "kv_lora_rank") is None and _get(text, "model_type") not in WITHOUT_ATTENTION
    quantized = is_quantized(hf_config)
    experts = (_get(text, "num_experts") or _get(text, "num_local_experts")) and not quantized
    needed = ROUTER + EXPERTS if experts else ()
    needed += GATED_DELTA_NET if linear else ()
    needed += ATTENTION if attention else ()
    if str(dtype).removeprefix("torch.") in ("float16", "half") and not quantized:
        needed += LINEAR
    return list(needed)


def is_quantized(hf_config: Any) -> bool:
    """Whether the checkpoint's weights are, of the whole model or of its text part."""
    parts = hf_config, _get(hf_config, "text_config")
    return any(_get(part, "quantization_config") for part in parts if part)


def _get(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
