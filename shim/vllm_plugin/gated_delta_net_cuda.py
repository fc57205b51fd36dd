"""Seam: Gated DeltaNet layers on CUDA. `gdn_decode` for decode tokens, `gdn_gating` and `gdn_prefill` for the others.

The core runs inside vLLM's op qwen_gdn_attention_core, which torch.compile does not look into: eagerly between pieces
of CUDA graphs, and captured whole for batches of decodes. Projections, convolution and norm stay vLLM's; its kernels
of the delta rule are never compiled nor tuned.

A prompt of one token is a decode to vLLM, of whatever state its slot was left with. So the slots of such prompts are
zeroed while the batch is prepared: before a graph reads them.

A model has several groups of such layers (vLLM makes groups of equal size), whose batches differ in their slots only.
With a few sequences that decode, the host takes longer to prepare a batch than the GPU to run it; so only the first
group's is prepared from the start, and of one in which all decode, no more than these layers read.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from vllm.v1.attention.backends.gdn_attn import (
    GDNAttentionBackend,
    GDNAttentionMetadata,
    GDNAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID, mamba_get_block_table_tensor

from shim.vllm_plugin.delta_rule import DeltaRule

_resolve = qwen_gdn_linear_attn._resolve_gdn_prefill_backend
# What a builder has of its own where graphs read a batch's slots.
STAGING = ("use_full_cuda_graph", "decode_cudagraph_max_bs", "non_spec_state_indices_tensor")


class ShimMetadataBuilder(GDNAttentionMetadataBuilder):
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        known = vllm_config.compilation_config.static_forward_context
        self.layers = [known[name] for name in layer_names]
        # Of what a graph has captured, update_block_table() renews the slots: vLLM's own layers read more. And vLLM
        # would have it make the second of two microbatches of the first.
        served = not any(layer.refusal for layer in self.layers)
        whole = not vllm_config.parallel_config.use_ubatching
        self.supports_update_block_table = served and whole and all(hasattr(self, name) for name in STAGING)

    def build(self, common_prefix_len, common_attn_metadata, *args, **kwargs):
        common = common_attn_metadata
        if self.supports_update_block_table and not args and not kwargs and all_decode(common):
            return self._decodes(common)
        metadata = super().build(common_prefix_len, common, *args, **kwargs)
        metadata.seq_lens, metadata.first_tokens = common.seq_lens, first_tokens(common)
        self._clear(metadata)
        return metadata

    def _decodes(self, common) -> GDNAttentionMetadata:
        """What super().build() comes to for such a batch, of that what update_block_table() and the layers read."""
        counts = {"num_decodes": common.num_reqs, "num_decode_tokens": common.num_actual_tokens}
        none = dict.fromkeys(("num_prefills", "num_prefill_tokens", "num_spec_decodes", "num_spec_decode_tokens"), 0)
        metadata = GDNAttentionMetadata(num_actual_tokens=common.num_actual_tokens, **counts, **none)
        metadata.seq_lens, metadata.first_tokens = common.seq_lens, None
        return self.update_block_table(metadata, common.block_table_tensor, common.slot_mapping)

    def update_block_table(self, metadata, blk_table, slot_mapping):
        """The same batch seen from another group of layers: `blk_table` [N,MB] is its blocks."""
        mode = self.vllm_config.cache_config.mamba_cache_mode
        other, decodes = copy.copy(metadata), metadata.num_decodes
        slots = mamba_get_block_table_tensor(blk_table, metadata.seq_lens, self.kv_cache_spec, mode)[:, 0]
        if metadata.num_prefills:
            other.prefill_state_indices = slots[decodes:]
            if getattr(metadata, "checkpoint", None) is not None:  # from vLLM 0.32 on
                other.checkpoint = metadata.checkpoint.regather_state_indices(blk_table)
        elif self.use_full_cuda_graph and decodes <= self.decode_cudagraph_max_bs:
            slots = staged(slots[:decodes], self.non_spec_state_indices_tensor[: len(slots)])
        other.non_spec_state_indices_tensor = slots
        self._clear(other)
        return other

    def _clear(self, metadata: GDNAttentionMetadata) -> None:
        slots, rows = metadata.non_spec_state_indices_tensor, metadata.first_tokens
        if slots is None or rows is None:
            return
        slots = slots[rows.to(slots.device)].long()
        for layer in self.layers:
            for pool in layer.kv_cache:
                pool.index_fill_(0, slots, 0)


class ShimBackend(GDNAttentionBackend):
    @staticmethod
    def get_builder_cls() -> type[ShimMetadataBuilder]:
        return ShimMetadataBuilder


def all_decode(common) -> bool:
    """Whether each sequence of a batch has one new token, and none its first."""
    return common.max_query_len == 1 and common.is_prefilling is not None and not common.is_prefilling.any()


def first_tokens(common) -> Tensor | None:
    """Of a batch, the rows whose only token is the first of its sequence, if any. From what vLLM keeps on the host."""
    lengths, prefilling = common.seq_lens_cpu_upper_bound, common.is_prefilling  # the latter is false in padding
    if lengths is None or prefilling is None or not prefilling.any():  # in most batches nobody prefills
        return None
    rows = ((common.query_start_loc_cpu.diff() == 1) & (lengths <= 1) & prefilling).nonzero().squeeze(1)
    return rows if len(rows) else None


def staged(slots: Tensor, memory: Tensor) -> Tensor:
    """`slots` where a graph reads them, the null block behind."""
    memory[: len(slots)].copy_(slots, non_blocking=True)
    if len(slots) < len(memory):
        memory[len(slots) :].fill_(NULL_BLOCK_ID)
    return memory


class ShimGatedDeltaNet(DeltaRule, QwenGatedDeltaNetAttention):
    """vLLM's layer with the core served by the shim."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.serve_or_miss()

    def get_attn_backend(self) -> type[ShimBackend]:
        return ShimBackend

    def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
        if self.refusal:
            return super()._forward_core(mixed_qkv, b, a, core_attn_out)
        metadata = get_forward_context().attn_metadata
        if isinstance(metadata, dict):
            metadata = metadata.get(self.prefix)
        if metadata is None:  # while vLLM measures memory and compiles
            return
        if metadata.num_prefills:
            self._mixed(mixed_qkv, b, a, core_attn_out, metadata)
        elif metadata.num_decodes:
            self._decodes(mixed_qkv, b, a, core_attn_out, metadata)

    def _decodes(self, mixed_qkv, b, a, out, metadata) -> None:
        """One token per sequence; in a graph's padded rows the slot is the null block."""
        slots = dense_slots(metadata)
        rows = min(metadata.num_actual_tokens, len(slots))
        slots = slots[:rows]
        mixed_qkv = causal_conv1d_update(
            mixed_qkv[:rows],
            self.states()[0],
            self._conv_weight(),
            self.conv1d.bias,
            self.activation,
            conv_state_indices=slots,
        )
        out[:rows] = self.decode(mixed_qkv, b[:rows], a[:rows], slots)

    def _mixed(self, mixed_qkv, b, a, out, metadata) -> None:
        """Sequences with one new token, then whole prefills; the convolution takes them all at once."""
        split, first, count = metadata.num_decode_tokens, metadata.num_decodes, metadata.num_prefills
        end = split + metadata.num_prefill_tokens
        slots = dense_slots(metadata)
        mixed_qkv = causal_conv1d_fn(
            mixed_qkv[: metadata.num_actual_tokens].transpose(0, 1),
            self._conv_weight(),
            self.conv1d.bias,
            self.states()[0],
            metadata.non_spec_query_start_loc,
            cache_indices=slots,
            has_initial_state=metadata.has_initial_state,
            activation=self.activation,
            metadata=metadata,
        ).transpose(0, 1)
        if split:
            out[:split] = self.decode(mixed_qkv[:split], b[:split], a[:split], slots[:first])
        out[split:end] = self.prefill(
            mixed_qkv[split:end],
            b[split:end],
            a[split:end],
            slots[first : first + count],
            metadata.prefill_has_initial_state[:count],
            metadata.prefill_query_start_loc[: count + 1],
        )

    def _conv_weight(self) -> Tensor:
        """[channels, width]."""
        weight = self.conv1d.weight
        return weight.view(weight.size(0), weight.size(2))


def dense_slots(metadata) -> Tensor:
    """A batch's slots at stride 1: Triton would compile the convolution for each other stride. Made once per batch."""
    slots = metadata.non_spec_state_indices_tensor
    if slots.stride(0) != 1:
        slots = slots.clone(memory_format=torch.contiguous_format)
        metadata.non_spec_state_indices_tensor = slots
    return slots


def prefill_backend(vllm_config) -> tuple[str, str]:
    """What was asked for, and the kernel of vLLM's for it: none that is compiled for minutes unless it was asked for."""
    asked, active = _resolve(vllm_config)
    return asked, "triton" if asked == "auto" else active


def install() -> None:
    qwen_gdn_linear_attn._resolve_gdn_prefill_backend = prefill_backend
    PluggableLayer.register_oot(ShimGatedDeltaNet, name="QwenGatedDeltaNetAttention")
