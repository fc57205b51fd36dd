"""Seam: Gated DeltaNet layers on CUDA. `gdn_decode` for decode tokens, `gdn_gating` and `gdn_prefill` for the others.

The core runs inside vLLM's op qwen_gdn_attention_core, which torch.compile does not look into: eagerly between pieces
of CUDA graphs, and captured whole for batches of decodes. Projections, convolution and norm stay vLLM's; its kernels
of the delta rule are never compiled nor tuned.

A prompt of one token is a decode to vLLM, of whatever state its slot was left with. So the slots of such prompts are
zeroed while the batch is prepared: before a graph reads them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend, GDNAttentionMetadataBuilder

from shim.vllm_plugin.delta_rule import DeltaRule

_resolve = qwen_gdn_linear_attn._resolve_gdn_prefill_backend


class ShimMetadataBuilder(GDNAttentionMetadataBuilder):
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        known = vllm_config.compilation_config.static_forward_context
        self.layers = [known[name] for name in layer_names]

    def build(self, common_prefix_len, common_attn_metadata, *args, **kwargs):
        metadata = super().build(common_prefix_len, common_attn_metadata, *args, **kwargs)
        slots, rows = metadata.non_spec_state_indices_tensor, first_tokens(common_attn_metadata)
        if slots is not None and rows.numel():
            slots = slots[rows.to(slots.device)].long()
            for layer in self.layers:
                for pool in layer.kv_cache:
                    pool.index_fill_(0, slots, 0)
        return metadata


class ShimBackend(GDNAttentionBackend):
    @staticmethod
    def get_builder_cls() -> type[ShimMetadataBuilder]:
        return ShimMetadataBuilder


def first_tokens(common) -> Tensor:
    """Of a batch, the rows whose only token is the first of its sequence. From what vLLM keeps on the host."""
    lengths, prefilling = common.seq_lens_cpu_upper_bound, common.is_prefilling  # the latter is false in padding
    if lengths is None or prefilling is None:
        return torch.empty(0, dtype=torch.int64)
    return ((common.query_start_loc_cpu.diff() == 1) & (lengths <= 1) & prefilling).nonzero().squeeze(1)


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
