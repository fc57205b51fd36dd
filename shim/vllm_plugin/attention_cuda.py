"""Seam: full attention on CUDA. A backend over the ops reshape_and_cache, paged_attention_v2 and paged_prefill.

vLLM's CUDA platform picks a backend per layer from what the layer needs. It is asked for this one first; a layer whose
needs the ops do not meet goes to the backend that vLLM would have picked, and is a miss. Layout and name of the cache
are FlashAttention's. Decode batches are captured whole in CUDA graphs; other batches run between pieces of graphs.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from ops_reference.attention import MAX_HEAD_SIZE
from shim.vllm_plugin.hooking import miss, require
from shim.vllm_plugin.models import ATTENTION
from shim.vllm_plugin.paged import attend, reshape_and_cache, split
from shim.vllm_plugin.versions import HookError

AUTO = (None, "auto")  # the cache has the model's dtype


class ShimAttentionBackend(FlashAttentionBackend):
    """Says what it serves, so that vLLM's own validation refuses the rest."""

    supported_dtypes = (torch.float16, torch.bfloat16, torch.float32)
    supported_kv_cache_dtypes = ("auto", "float16", "bfloat16")

    @staticmethod
    def get_impl_cls() -> type[ShimAttention]:
        return ShimAttention

    @staticmethod
    def get_builder_cls() -> type[ShimAttentionMetadataBuilder]:
        return ShimAttentionMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return default_block_size

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and head_size <= MAX_HEAD_SIZE

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype) -> bool:
        return kv_cache_dtype is None or kv_cache_dtype in cls.supported_kv_cache_dtypes

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_combination(cls, head_size, dtype, kv_cache_dtype, *others) -> str | None:
        if kv_cache_dtype in AUTO or str(dtype) == f"torch.{kv_cache_dtype}":
            return None
        return f"a {kv_cache_dtype} cache under activations in {dtype}"

    @classmethod
    def _no(cls) -> bool:
        return False

    supports_sink = supports_mm_prefix = supports_per_head_quant_scales = _no
    supports_non_causal = supports_batch_invariance = supports_rswa = _no


@dataclass
class ShimAttentionMetadata:
    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor
    max_seq_len: int
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    num_decodes: int
    num_decode_tokens: int
    prefill_start_loc: Tensor | None
    causal: bool = True


class ShimAttentionMetadataBuilder(AttentionMetadataBuilder[ShimAttentionMetadata]):
    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold = 1  # vLLM puts sequences with one new token first
    supports_update_block_table = True

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        common = common_attn_metadata
        return ShimAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            **split(common),
        )

    def update_block_table(self, metadata, blk_table, slot_mapping):
        """The same batch seen from another group of layers."""
        other = copy.copy(metadata)
        other.block_table, other.slot_mapping = blk_table, slot_mapping
        return other


class ShimAttention(AttentionImpl):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **others,
    ):
        device = current_platform.device_type
        unknown = [name for name, value in others.items() if value is not None]
        if unknown:
            raise HookError(f"opshim's attention does not know {', '.join(unknown)}; run vLLM without opshim")
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads or num_heads, head_size
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.scale = float(scale)
        self.logits_soft_cap, self.sliding_window = logits_soft_cap or 0.0, sliding_window or 0
        self.alibi_slopes = alibi_slopes
        if alibi_slopes is not None:
            self.alibi_slopes = torch.tensor(alibi_slopes, dtype=torch.float32, device=device)
        self.options = self.scale, self.logits_soft_cap, self.sliding_window, self.alibi_slopes
        require(ATTENTION, device)

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
        tokens = slot_mapping.shape[0]  # of key and value, the rows behind are padding
        reshape_and_cache(key[:tokens], value[:tokens], *split_cache(kv_cache, self.head_size), slot_mapping)

    def forward(
        self,
        layer,
        query,
        key,
        value,
        kv_cache,
        attn_metadata,
        output,
        output_scale=None,
        output_block_scale=None,
    ) -> Tensor:
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("opshim's attention does not quantize its output")
        if attn_metadata is None:  # while vLLM measures memory
            return output.fill_(0)
        return attend(query, split_cache(kv_cache, self.head_size), attn_metadata, self.options, output)


def split_cache(kv_cache: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """Keys and values [NB,BS,HK,D] as views of vLLM's cache: [NB,2,BS,HK,D] (0.24), or [NB,HK,BS,2D] (0.32). They are
    not kept from call to call: vLLM measures with a cache that it wants to free before it makes the real one."""
    shape = kv_cache.shape
    if len(shape) == 5 and shape[1] == 2:
        return kv_cache.unbind(1)
    if len(shape) == 4 and shape[3] == 2 * head_size:
        return kv_cache.transpose(1, 2).split(head_size, dim=-1)
    raise HookError(f"opshim does not know vLLM's cache of shape {list(shape)} for heads of {head_size}")


def refusal(selected, config, capability) -> str | None:
    """Why the ops are not the formula of layers that need `config` (vLLM's AttentionSelectorConfig), where the user
    has selected this backend or none (None)."""
    if selected not in (None, AttentionBackendEnum.FLASH_ATTN):
        return f"--attention-backend {selected.name} was asked for"
    parallel = get_current_vllm_config().parallel_config
    if parallel.decode_context_parallel_size > 1:
        return "decode context parallelism is on"
    reasons = ShimAttentionBackend.validate_configuration(device_capability=capability, **config._asdict())
    return "; ".join(reasons) or None


def install() -> None:
    platform = type(current_platform)
    stock = platform.get_attn_backend_cls

    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None) -> str:
        reason = refusal(selected_backend, attn_selector_config, cls.get_device_capability())
        if reason is None:
            return f"{__name__}.{ShimAttentionBackend.__name__}"
        miss("attention layers", reason)
        return stock(selected_backend, attn_selector_config=attn_selector_config, num_heads=num_heads)

    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
