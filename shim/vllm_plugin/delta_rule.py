"""What the Gated DeltaNet seams of CPU and CUDA share: the ops over a layer's heads and its state pool.

The state pool `kv_cache[1]` [slots,HV,V,K] goes to the ops as it is (its pages are padded), and q, k, v are views of
the convolution's output.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID

import shim
from shim.vllm_plugin.hooking import miss, require
from shim.vllm_plugin.models import GATED_DELTA_NET

gdn_gating, gdn_prefill, gdn_decode = map(shim.get, GATED_DELTA_NET)


class DeltaRule:
    """Mixed into vLLM's QwenGatedDeltaNetAttention (Qwen3-Next, Qwen3.5)."""

    refusal: str | None

    def serve_or_miss(self) -> None:
        """To be called at the end of the layer's construction."""
        self.refusal = self._refusal()
        if self.refusal:
            miss(f"Gated DeltaNet layer {self.prefix}", self.refusal)
            return
        require(GATED_DELTA_NET, current_platform.device_type)
        # the ops take it in float32: kept so, no call has to convert it
        attributes = vars(self.dt_bias)
        self.dt_bias = torch.nn.Parameter(self.dt_bias.data.float(), requires_grad=False)
        set_weight_attrs(self.dt_bias, attributes)

    def _refusal(self) -> str | None:
        """Why the ops are not this layer's formula."""
        if self.num_spec:
            return "speculative decoding is on"
        state = self.get_state_dtype()[1]
        if state not in (torch.float32, self.model_config.dtype):
            return f"its states are {state}, the model is {self.model_config.dtype}"
        return None

    def decode(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, slots: Tensor) -> Tensor:
        """mixed_qkv [B, q+k+v] after the convolution, b, a [B,HV], slots [B] -> [B,HV,V]; null blocks are padding."""
        _, state = self.states()
        bias = self.dt_bias.float()
        return gdn_decode(*self.heads(mixed_qkv), a, b, self.A_log, bias, state, slots, null_index=NULL_BLOCK_ID)

    def prefill(self, mixed_qkv, b, a, slots, has_initial_state, starts) -> Tensor:
        """mixed_qkv [T, q+k+v] after the convolution, b, a [T,HV]; per sequence its slot -> [T,HV,V]."""
        _, state = self.states()
        g, beta = gdn_gating(a, b, self.A_log, self.dt_bias.float())
        return gdn_prefill(*self.heads(mixed_qkv), g, beta, state, slots, has_initial_state, starts)

    def states(self) -> tuple[Tensor, Tensor]:
        """The pools: convolution [slots, channels, width - 1], recurrent state [slots,HV,V,K]."""
        conv_state, state = self.kv_cache
        return conv_state if is_conv_state_dim_first() else conv_state.transpose(-1, -2), state

    def heads(self, mixed_qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k [T,H,K] and v [T,HV,V] as views."""
        keys, values = self.key_dim // self.tp_size, self.value_dim // self.tp_size
        q, k, v = mixed_qkv.split([keys, keys, values], dim=-1)
        return (
            q.unflatten(-1, (-1, self.head_k_dim)),
            k.unflatten(-1, (-1, self.head_k_dim)),
            v.unflatten(-1, (-1, self.head_v_dim)),
        )
