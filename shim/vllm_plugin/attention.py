"""Seam: full attention on the CPU. A backend over the ops reshape_and_cache, paged_attention_v2 and paged_prefill.

vLLM's CPU platform takes CPU_ATTN whatever is asked, so this backend is registered under that name. A page holds the
keys of its tokens [BS,HK,D], then their values; both caches are views of one buffer whose pages may be padded.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from vllm.config import get_current_vllm_config, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from ops_reference.attention import MAX_HEAD_SIZE
from shim.vllm_plugin.hooking import miss, require
from shim.vllm_plugin.models import ATTENTION
from shim.vllm_plugin.paged import attend, reshape_and_cache, split


class ShimAttentionBackend(CPUAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[ShimAttention]:
        return ShimAttention

    @staticmethod
    def get_builder_cls() -> type[ShimAttentionMetadataBuilder]:
        return ShimAttentionMetadataBuilder


@dataclass
class ShimAttentionMetadata(CPUAttentionMetadata):
    num_decodes: int = 0
    prefill_start_loc: Tensor | None = None  # [prefills + 1] int32, of the tokens after the decodes


class ShimAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    reorder_batch_threshold = 1  # vLLM puts sequences with one new token first

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names).values()
        self.refusals = {layer.impl.refusal for layer in layers}

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        if self.refusals != {None}:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        common = common_attn_metadata
        return ShimAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            scheduler_metadata=None,
            **split(common),
        )


class ShimAttention(CPUAttentionBackendImpl):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.refusal = self._refusal()
        if self.refusal:
            miss("an attention layer", self.refusal)
        else:
            require(ATTENTION, current_platform.device_type)

    def _refusal(self) -> str | None:
        """Why the ops are not this layer's formula."""
        config = get_current_vllm_config()
        if self.attn_type != AttentionType.DECODER or config.attention_config.use_non_causal:
            return "it is not causal attention over cached tokens"
        if self.sinks is not None:
            return "it has attention sinks"
        if self.head_size > MAX_HEAD_SIZE:
            return f"its head size is {self.head_size}, above {MAX_HEAD_SIZE}"
        if self.kv_cache_dtype not in ("auto", str(config.model_config.dtype).removeprefix("torch.")):
            return f"its cache is {self.kv_cache_dtype}"
        return None

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
        if self.refusal:
            return super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        tokens = slot_mapping.shape[0]
        reshape_and_cache(key[:tokens], value[:tokens], *self._caches(kv_cache), slot_mapping)

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
        if self.refusal:
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        if attn_metadata is None:  # while vLLM measures memory
            return output
        options = self.scale, self.logits_soft_cap, max(0, self.sliding_window), self.alibi_slopes
        return attend(query, self._caches(kv_cache), attn_metadata, options, output)

    def _caches(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [NB,BS,HK,D] as views of vLLM's [NB,HK,BS,2D], whose pages are dense inside."""
        pages, heads, block_size, _ = kv_cache.shape
        return kv_cache.view(pages, 2, block_size, heads, self.head_size).unbind(1)


def install() -> None:
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{ShimAttentionBackend.__name__}")
