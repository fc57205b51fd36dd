"""Seam: Gated DeltaNet layers on CUDA. `gdn_decode` for decode tokens, `gdn_gating` and `gdn_prefill` for the others.

The core runs inside vLLM's op qwen_gdn_attention_core, which torch.compile does not look into: eagerly between pieces
of CUDA graphs, and captured whole for batches of decodes. Projections, convolution and norm stay vLLM's. Its
convolution kernels are compiled by Triton for the very pool that they work on, so they are run once as soon as there
is one; vLLM's own kernels of the delta rule are never compiled.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID

from shim.vllm_plugin.delta_rule import DeltaRule

BATCHES = (1, 2, 16)  # what Triton tells apart of a count of sequences: one, multiples of 16, others
_compiled: set[tuple] = set()  # pools and activations that vLLM's convolution has been compiled for


class ShimGatedDeltaNet(DeltaRule, QwenGatedDeltaNetAttention):
    """vLLM's layer with the core served by the shim."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.serve_or_miss()

    def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
        if self.refusal:
            return super()._forward_core(mixed_qkv, b, a, core_attn_out)
        metadata = get_forward_context().attn_metadata
        if isinstance(metadata, dict):
            metadata = metadata.get(self.prefix)
        if metadata is None:  # while vLLM measures memory and compiles
            self._compile_convolution(mixed_qkv)
        elif metadata.num_prefills:
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

    def _compile_convolution(self, mixed_qkv: Tensor) -> None:
        """Runs the convolution on the null block of the pool, if vLLM has bound one by now: nothing changes there."""
        pools = getattr(self, "kv_cache", None)
        if not pools or pools[0].numel() == 0 or (mixed_qkv.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        conv_state, weight = self.states()[0], self._conv_weight()
        step = mixed_qkv.stride(0), 1
        key = conv_state.shape, conv_state.stride(), conv_state.dtype, weight.shape, mixed_qkv.dtype, step
        if key in _compiled:
            return
        _compiled.add(key)
        for batch in BATCHES:
            tokens = mixed_qkv.new_empty_strided((max(batch, 2), mixed_qkv.size(1)), step)  # strides of size 1 vanish
            nulls = torch.full((batch,), NULL_BLOCK_ID, dtype=torch.int32, device=mixed_qkv.device)
            causal_conv1d_update(
                tokens[:batch], conv_state, weight, self.conv1d.bias, self.activation, conv_state_indices=nulls
            )
        causal_conv1d_fn(
            tokens[:2].transpose(0, 1),
            weight,
            self.conv1d.bias,
            conv_state,
            torch.tensor([0, 2], dtype=torch.int32, device=mixed_qkv.device),
            cache_indices=nulls[:1],
            has_initial_state=torch.zeros(1, dtype=torch.bool, device=mixed_qkv.device),
            activation=self.activation,
        )


def dense_slots(metadata) -> Tensor:
    """A batch's slots at stride 1: Triton would compile the convolution for each other stride. Made once per batch."""
    slots = metadata.non_spec_state_indices_tensor
    if slots.stride(0) != 1:
        slots = slots.clone(memory_format=torch.contiguous_format)
        metadata.non_spec_state_indices_tensor = slots
    return slots


def install() -> None:
    PluggableLayer.register_oot(ShimGatedDeltaNet, name="QwenGatedDeltaNetAttention")
