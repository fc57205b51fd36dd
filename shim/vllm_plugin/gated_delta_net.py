"""Seam: Gated DeltaNet layers. `gdn_decode` for decode tokens, `gdn_gating` and `gdn_prefill` for the others.

The layer's projections, its convolution and its norm stay vLLM's. What vLLM runs on the CPU between convolution and
norm takes bfloat16 only; here float16, bfloat16 and float32 are served. The state pool `kv_cache[1]` [slots,HV,V,K]
goes to the ops as it is (its pages are padded), and q, k, v are views of the convolution's output.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import causal_conv1d_fn_cpu, causal_conv1d_update_cpu
from vllm.platforms import current_platform
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID

import shim
from shim.vllm_plugin.hooking import miss, require
from shim.vllm_plugin.versions import HookError

OPS = ("gdn_gating", "gdn_prefill", "gdn_decode")
gdn_gating, gdn_prefill, gdn_decode = map(shim.get, OPS)
_stock_core = gdn_attention.cpu_gdn_attention_core


class ShimGatedDeltaNet(QwenGatedDeltaNetAttention):
    """vLLM's layer with the core served by the shim (Qwen3-Next, Qwen3.5)."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.refusal = "speculative decoding is on" if self.num_spec else None
        if self.refusal:
            miss(f"Gated DeltaNet layer {self.prefix}", self.refusal)
        else:
            require(OPS, current_platform.device_type)

    def core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, out: Tensor, metadata) -> None:
        """mixed_qkv [T, q+k+v], a and b [T,HV] -> out [T,HV,V]; decode tokens come first, then whole prefills."""
        split, sequences = metadata.num_decode_tokens, metadata.num_decodes
        end, last = split + metadata.num_prefill_tokens, sequences + metadata.num_prefills
        slots, starts = metadata.non_spec_state_indices_tensor, metadata.non_spec_query_start_loc
        if split:
            self._decode(mixed_qkv[:split], b[:split], a[:split], out[:split], slots[:sequences])
        if end > split:
            self._prefill(
                mixed_qkv[split:end],
                b[split:end],
                a[split:end],
                out[split:end],
                slots[sequences:last],
                metadata.has_initial_state[sequences:last],
                starts[sequences : last + 1] - split,
            )

    def _decode(self, mixed_qkv, b, a, out, slots) -> None:
        conv_state, state = self._states()
        mixed_qkv = causal_conv1d_update_cpu(
            x=mixed_qkv,
            conv_state=conv_state,
            weight=self._conv_weight(),
            bias=self.conv1d.bias,
            activation=self.activation,
            conv_state_indices=slots,
        )
        bias = self.dt_bias.float()
        out.copy_(gdn_decode(*self._heads(mixed_qkv), a, b, self.A_log, bias, state, slots, null_index=NULL_BLOCK_ID))

    def _prefill(self, mixed_qkv, b, a, out, slots, has_initial_state, starts) -> None:
        conv_state, state = self._states()
        mixed_qkv = causal_conv1d_fn_cpu(
            x=mixed_qkv.transpose(0, 1),
            weight=self._conv_weight(),
            bias=self.conv1d.bias,
            conv_states=conv_state,
            query_start_loc=starts,
            cache_indices=slots,
            has_initial_state=has_initial_state,
            activation=self.activation,
        ).transpose(0, 1)
        g, beta = gdn_gating(a, b, self.A_log, self.dt_bias.float())
        out.copy_(gdn_prefill(*self._heads(mixed_qkv), g, beta, state, slots, has_initial_state, starts))

    def _states(self) -> tuple[Tensor, Tensor]:
        """The pools: convolution [slots, channels, width - 1], recurrent state [slots,HV,V,K]."""
        conv_state, state = self.kv_cache
        return conv_state if is_conv_state_dim_first() else conv_state.transpose(-1, -2), state

    def _conv_weight(self) -> Tensor:
        """[channels, width]. At load vLLM packs a bfloat16 weight for its own kernel and keeps the plain one beside."""
        plain = getattr(self.conv1d, "_cpu_unpacked_conv_weight", None)
        return self.conv1d.weight.squeeze(1) if plain is None else plain

    def _heads(self, mixed_qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k [T,H,K] and v [T,HV,V] as views."""
        keys, values = self.key_dim // self.tp_size, self.value_dim // self.tp_size
        q, k, v = mixed_qkv.split([keys, keys, values], dim=-1)
        return (
            q.unflatten(-1, (-1, self.head_k_dim)),
            k.unflatten(-1, (-1, self.head_k_dim)),
            v.unflatten(-1, (-1, self.head_v_dim)),
        )


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
