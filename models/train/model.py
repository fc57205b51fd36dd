"""Qwen3-Next in plain PyTorch, small enough to read, for training on whole sequences (no caches).

The mathematics and the tensor names are those of Hugging Face's `Qwen3NextForCausalLM`, so that `state_dict()` is the
checkpoint, but for the experts: they are stacked here, and `checkpoint()` gives each its own three tensors.
Every expert is computed for every token and weighted by zero where it was not chosen: right, and fast at this size.
"""

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    vocab_size: int = 1536
    hidden_size: int = 128
    num_hidden_layers: int = 4
    full_attention_interval: int = 4
    num_attention_heads: int = 2
    num_key_value_heads: int = 1
    head_dim: int = 256
    partial_rotary_factor: float = 0.25
    rope_theta: float = 10000.0
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    num_experts: int = 16
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 64
    shared_expert_intermediate_size: int = 128
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048

    def layer_type(self, layer: int) -> str:
        return "linear_attention" if (layer + 1) % self.full_attention_interval else "full_attention"

    def hugging_face(self) -> dict:
        """config.json, but for the token ids."""
        return {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "dtype": "float16",
            **asdict(self),
            "layer_types": [self.layer_type(layer) for layer in range(self.num_hidden_layers)],
            "intermediate_size": self.shared_expert_intermediate_size,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "router_aux_loss_coef": 0.01,
            "tie_word_embeddings": False,
            "use_cache": True,
        }


class RMSNorm(nn.Module):
    """The weight is stored around zero."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * (1 + self.weight.float())).to(x.dtype)


class GatedRMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight.float() * F.silu(gate.float())).to(x.dtype)


@torch.compiler.disable  # a loop whose length is the sequence's: nothing to gain from unrolling it
def scan_chunks(q: Tensor, k: Tensor, u: Tensor, w: Tensor, inside: Tensor, decay: Tensor) -> Tensor:
    """The sequential half of the chunked rule: carries the state [B, H, K, V] from chunk to chunk."""
    state = q.new_zeros(*q.shape[:2], q.shape[-1], u.shape[-1])
    outputs = []
    for c in range(q.shape[2]):
        new = u[:, :, c] - w[:, :, c] @ state
        outputs.append(q[:, :, c] @ state + inside[:, :, c] @ new)
        state = state * decay[:, :, c, None, None] + k[:, :, c].transpose(-1, -2) @ new
    return torch.stack(outputs, 2)


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int = 64) -> Tensor:
    """q, k [B, T, H, K], v [B, T, H, V], g, beta [B, T, H] -> [B, T, H, V], in float32, chunk by chunk."""
    length, key_size = q.shape[1], q.shape[-1]
    pad = -length % chunk
    q, k, v, g, beta = (F.pad(x.float().transpose(1, 2), (0, 0) * (x.dim() - 3) + (0, pad)) for x in (q, k, v, g, beta))
    q, k, v, g, beta = (x.unflatten(2, (-1, chunk)) for x in (q, k, v, g, beta))
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * key_size**-0.5
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    total = g.cumsum(-1)
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
    k_beta = k * beta[..., None]
    identity = torch.eye(chunk, device=q.device)
    system = identity + (k_beta @ k.transpose(-1, -2) * decay).tril(-1)
    inverse = torch.linalg.solve_triangular(system, identity.expand_as(system), upper=False, unitriangular=True)
    u = inverse @ (v * beta[..., None])
    w = inverse @ (k_beta * total.exp()[..., None])
    inside = q @ k.transpose(-1, -2) * decay
    last = total[..., -1:]
    out = scan_chunks(q * total.exp()[..., None], k * (last - total).exp()[..., None], u, w, inside, last[..., 0].exp())
    return out.flatten(2, 3)[:, :, :length].transpose(1, 2)


class GatedDeltaNet(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.keys = c.linear_num_key_heads * c.linear_key_head_dim
        self.values = c.linear_num_value_heads * c.linear_value_head_dim
        channels, heads = 2 * self.keys + self.values, c.linear_num_value_heads
        self.in_proj_qkvz = nn.Linear(c.hidden_size, channels + self.values, bias=False)
        self.in_proj_ba = nn.Linear(c.hidden_size, 2 * heads, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, c.linear_conv_kernel_dim, groups=channels, bias=False,
                                padding=c.linear_conv_kernel_dim - 1)
        step = torch.empty(heads).uniform_(math.log(0.001), math.log(0.1)).exp()
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))  # softplus(dt_bias) = step
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        self.norm = GatedRMSNorm(c.linear_value_head_dim, c.rms_norm_eps)
        self.out_proj = nn.Linear(self.values, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        c, length = self.c, x.shape[1]
        groups, ratio = c.linear_num_key_heads, c.linear_num_value_heads // c.linear_num_key_heads
        key_size, value_size = c.linear_key_head_dim, c.linear_value_head_dim
        packed = self.in_proj_qkvz(x).unflatten(-1, (groups, -1))  # per key head: its q, k, and its heads' v and z
        q, k, v, z = packed.split([key_size, key_size, ratio * value_size, ratio * value_size], -1)
        b, a = self.in_proj_ba(x).unflatten(-1, (groups, -1)).chunk(2, -1)
        mixed = torch.cat([part.flatten(2) for part in (q, k, v)], -1).transpose(1, 2)
        mixed = F.silu(self.conv1d(mixed)[..., :length]).transpose(1, 2)
        q, k, v = mixed.split([self.keys, self.keys, self.values], -1)
        q, k = (part.unflatten(-1, (groups, -1)).repeat_interleave(ratio, 2) for part in (q, k))
        v, z = v.unflatten(-1, (-1, value_size)), z.reshape(*z.shape[:2], -1, value_size)
        g = -self.A_log.float().exp() * F.softplus(a.flatten(2).float() + self.dt_bias.float())
        with torch.autocast(x.device.type, enabled=False):
            out = gated_delta_rule(q, k, v, g, b.flatten(2).float().sigmoid()).to(v.dtype)
        return self.out_proj(self.norm(out, z).flatten(2))


class Attention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.q_proj = nn.Linear(c.hidden_size, 2 * c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def rotate(self, x: Tensor) -> Tensor:
        """Rotary embedding of the first `partial_rotary_factor` of x [B, T, H, D], halves paired."""
        size = int(self.c.head_dim * self.c.partial_rotary_factor)
        rates = self.c.rope_theta ** -(torch.arange(0, size, 2, device=x.device).float() / size)
        angles = torch.arange(x.shape[1], device=x.device).float()[:, None] * rates
        cos, sin = (f(angles).repeat(1, 2)[:, None].to(x.dtype) for f in (torch.cos, torch.sin))
        turned, rest = x[..., :size], x[..., size:]
        first, second = turned.chunk(2, -1)
        return torch.cat([turned * cos + torch.cat([-second, first], -1) * sin, rest], -1)

    def forward(self, x: Tensor) -> Tensor:
        size = self.c.head_dim
        q, gate = self.q_proj(x).unflatten(-1, (-1, 2 * size)).chunk(2, -1)
        k, v = (proj(x).unflatten(-1, (-1, size)) for proj in (self.k_proj, self.v_proj))
        q, k = self.rotate(self.q_norm(q)), self.rotate(self.k_norm(k))
        q, k, v = (part.transpose(1, 2).to(v.dtype) for part in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
        return self.o_proj((out * gate.sigmoid()).flatten(2))


class MLP(nn.Module):
    def __init__(self, hidden: int, size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, size, bias=False)
        self.up_proj = nn.Linear(hidden, size, bias=False)
        self.down_proj = nn.Linear(size, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(c.num_experts, 2 * c.moe_intermediate_size, c.hidden_size))
        self.down_proj = nn.Parameter(torch.empty(c.num_experts, c.hidden_size, c.moe_intermediate_size))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """x [..., hidden], weights [..., experts], zero where an expert was not chosen."""
        gate, up = (x @ self.gate_up_proj.flatten(0, 1).T).unflatten(-1, (weights.shape[-1], -1)).chunk(2, -1)
        hidden = F.silu(gate) * up * weights.to(up.dtype)[..., None]
        return hidden.flatten(-2) @ self.down_proj.transpose(1, 2).flatten(0, 1)


class MixtureOfExperts(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.top_k, self.noise = c.num_experts_per_tok, 0.0
        self.gate = nn.Linear(c.hidden_size, c.num_experts, bias=False)
        self.experts = Experts(c)
        self.shared_expert = MLP(c.hidden_size, c.shared_expert_intermediate_size)
        self.shared_expert_gate = nn.Linear(c.hidden_size, 1, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """-> output, and how uneven the use of the experts is (1 is even; the Switch Transformer's balance loss)."""
        logits = self.gate(x).float()
        if self.noise:
            logits = logits + 3 * self.noise * torch.randn_like(logits)
        p = logits.softmax(-1)
        top, ids = p.topk(self.top_k, -1)
        weights = torch.zeros_like(p).scatter(-1, ids, top / top.sum(-1, keepdim=True))
        used = (weights > 0).float().flatten(0, -2).mean(0) / self.top_k
        unevenness = p.shape[-1] * (used * p.flatten(0, -2).mean(0)).sum()
        shared = self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
        return self.experts(x, weights) + shared, unevenness


class Layer(nn.Module):
    def __init__(self, c: Config, layer: int) -> None:
        super().__init__()
        self.noise = 0.0
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.full = c.layer_type(layer) == "full_attention"
        if self.full:
            self.self_attn = Attention(c)
        else:
            self.linear_attn = GatedDeltaNet(c)
        self.mlp = MixtureOfExperts(c)

    def shake(self, x: Tensor) -> Tensor:
        return x * (1 + self.noise * torch.randn_like(x)) if self.noise else x

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mixer = self.self_attn if self.full else self.linear_attn
        x = x + mixer(self.input_layernorm(self.shake(x)))
        out, unevenness = self.mlp(self.post_attention_layernorm(self.shake(x)))
        return x + out, unevenness


class Trunk(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c, layer) for layer in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)


class Model(nn.Module):
    """`noise` is the relative size of the noise that training adds to the residual stream and, three times as large,
    to the router's logits: it makes the model indifferent to rounding, so that it says the same in every dtype."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.model = Trunk(c)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() > 1 and "conv1d" not in name:
                nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
        nn.init.normal_(self.model.embed_tokens.weight, std=0.3)
        for name, weight in self.named_parameters():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
                weight.data *= (2 * c.num_hidden_layers) ** -0.5

    def set_noise(self, noise: float) -> None:
        for module in self.modules():
            if isinstance(module, Layer | MixtureOfExperts):
                module.noise = noise

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """ids [B, T] -> logits [B, T, vocabulary], mean unevenness of the experts' use."""
        x, total = self.model.embed_tokens(ids), 0.0
        for layer in self.model.layers:
            x, unevenness = layer(x)
            total = total + unevenness
        return self.lm_head(self.model.norm(x)), total / len(self.model.layers)

    def checkpoint(self) -> dict[str, Tensor]:
        """float16 tensors under Hugging Face's names, each value exact in bfloat16 too: both dtypes load the same."""
        tensors = {}
        for name, weight in self.state_dict().items():
            weight = weight.cpu().bfloat16().half()
            stem, _, kind = name.rpartition(".")
            if kind == "gate_up_proj":
                for expert, pair in enumerate(weight):
                    gate, up = pair.chunk(2)
                    tensors[f"{stem}.{expert}.gate_proj.weight"] = gate.contiguous()
                    tensors[f"{stem}.{expert}.up_proj.weight"] = up.contiguous()
            elif kind == "down_proj":
                for expert, down in enumerate(weight):
                    tensors[f"{stem}.{expert}.down_proj.weight"] = down.contiguous()
            else:
                tensors[name] = weight.contiguous()
        return tensors
