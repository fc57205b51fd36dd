"""Seam: Gated DeltaNet layers on the CPU. `gdn_decode` for decode tokens, `gdn_gating` and `gdn_prefill` for others.

The layer's projections, its convolution and its norm stay vLLM's. What vLLM runs on the CPU between convolution and
norm takes bfloat16 only; here float16, bfloat16 and float32 are served.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import causal_conv1d_fn_cpu, causal_conv1d_update_cpu
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name

from shim.vllm_plugin.delta_rule import DeltaRule
from shim.vllm_plugin.versions import HookError

_stock_core = gdn_attention.cpu_gdn_attention_core


class ShimGatedDeltaNet(DeltaRule, QwenGatedDeltaNetAttention):
    """vLLM's layer with the core served by the shim."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.serve_or_miss()

    def core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, out: Tensor, metadata) -> None:
        """mixed_qkv [T, q+k+v], a and b [T,HV] -> out [T,HV,V]; decode tokens come first, then whole prefills."""
        split, sequences = metadata.num_decode_tokens, metadata.num_decodes
        end, last = split + metadata.num_prefill_tokens, sequences + metadata.num_prefills
        slots, starts = metadata.non_spec_state_indices_tensor, metadata.non_spec_query_start_loc
        if split:
            mine = slots[:sequences]
            out[:split] = self.decode(self._next_tokens(mixed_qkv[:split], mine), b[:split], a[:split], mine)
        if end > split:
            tokens, mine = slice(split, end), slice(sequences, last)
            whole = slots[mine], metadata.has_initial_state[mine], starts[sequences : last + 1] - split
            out[tokens] = self.prefill(self._sequences(mixed_qkv[tokens], *whole), b[tokens], a[tokens], *whole)

    def _next_tokens(self, mixed_qkv: Tensor, slots: Tensor) -> Tensor:
        """The convolution of one token per sequence."""
        return causal_conv1d_update_cpu(
            x=mixed_qkv,
            conv_state=self.states()[0],
            weight=self._conv_weight(),
            bias=self.conv1d.bias,
            activation=self.activation,
            conv_state_indices=slots,
        )

    def _sequences(self, mixed_qkv: Tensor, slots: Tensor, has_initial_state: Tensor, starts: Tensor) -> Tensor:
        """The convolution of whole sequences."""
        return causal_conv1d_fn_cpu(
            x=mixed_qkv.transpose(0, 1),
            weight=self._conv_weight(),
            bias=self.conv1d.bias,
            conv_states=self.states()[0],
            query_start_loc=starts,
            cache_indices=slots,
            has_initial_state=has_initial_state,
            activation=self.activation,
        ).transpose(0, 1)

    def _conv_weight(self) -> Tensor:
        """[channels, width]. At load vLLM packs a bfloat16 weight for its own kernel and keeps the plain one beside."""
        plain = getattr(self.conv1d, "_cpu_unpacked_conv_weight", None)
        return self.conv1d.weight.squeeze(1) if plain is None else plain


def cpu_gdn_attention_core(
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    core_attn_out: torch.Tensor,
    layer_name: LayerNameType,
) -> None:
    """What vLLM registers as torch.ops.vllm.cpu_gdn_attention_core, opaque to torch.compile."""
    context = get_forward_context()
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if not isinstance(layer, ShimGatedDeltaNet) or layer.refusal:
        return _stock_core(mixed_qkv, b, a, core_attn_out, layer_name)
    if context.attn_metadata is not None:  # None while vLLM measures memory
        layer.core(mixed_qkv, b, a, core_attn_out, context.attn_metadata[layer.prefix])


def install() -> None:
    if gdn_attention._CPU_GDN_ATTENTION_OPS_REGISTERED:
        raise HookError("torch.ops.vllm.cpu_gdn_attention_core was registered before the plugin came")
    gdn_attention.cpu_gdn_attention_core = cpu_gdn_attention_core
    PluggableLayer.register_oot(ShimGatedDeltaNet, name="QwenGatedDeltaNetAttention")
