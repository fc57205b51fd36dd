"""A model's sizes, as its config.json gives them: checked, and with transformers' defaults where it is silent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shim.errors import OpshimError

COUNTS = {  # whole numbers, and the least that each may be
    **dict.fromkeys(("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"), 1),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim", "full_attention_interval"), 1),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_conv_kernel_dim"), 1),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "decoder_sparse_step"), 1),
    **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok", "intermediate_size"), 0),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 0),
}
MOST = {  # far above what any model has, so that nobody waits for a list of each
    **dict.fromkeys(("num_hidden_layers", "num_experts", "num_local_experts", "num_experts_per_tok"), 10_000),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), 10_000),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 10_000),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"), 10_000),
    **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 10_000_000),
}
FULL, LINEAR = "full_attention", "linear_attention"
# Fields of models whose caches are of other kinds: latent, windowed, shared between layers, states of other formulas.
OTHER_CACHES = (
    *("kv_lora_rank", "sliding_window", "attention_chunk_size", "num_kv_shared_layers", "is_encoder_decoder"),
    *(
        "attn_layer_indices",
        "attn_layer_period",
        "hybrid_override_pattern",
        "layers_block_type",
        "ssm_cfg",
        "state_size",
    ),
    *("mamba_d_state", "block_configs"),
)


class ConfigError(OpshimError):
    """A field of config.json that is missing or of another kind; the message names it."""


def text_of(config: Mapping) -> Mapping:
    """The part of a configuration that describes the language model."""
    return config.get("text_config") or config


def architecture_of(config: Mapping) -> str:
    """The name of the model's class."""
    return config["architectures"][0]


def overridden(config: Mapping, overrides: Mapping) -> dict:
    """A configuration with vLLM's --hf-overrides: what is said of a part of the model (text_config) is merged into it,
    all else replaces what was there."""
    nested = {name for name in overrides if name.endswith("_config") and name != "quantization_config"}
    return {**config, **overrides, **{name: _merged(config.get(name), overrides[name]) for name in nested}}


def _merged(old: Any, new: Any) -> Any:
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return new
    return {**old, **{name: _merged(old.get(name), value) for name, value in new.items()}}


def check_types(config: Mapping, where: str) -> None:
    """ConfigError for a field that is not of its kind; what is absent is no error. `where`: how to call the file."""

    def need(fits: bool, name: str, value: Any, expected: str) -> None:
        if not fits:
            raise ConfigError(f"{where}: {name} must be {expected}, got {value!r}")

    architectures = config.get("architectures")
    need(_strings(architectures) and bool(architectures), "architectures", architectures, "a list of names")
    text = config.get("text_config")
    need(isinstance(text, Mapping | None), "text_config", text, "an object")
    for part in {id(part): part for part in (config, text_of(config))}.values():
        for name, least in COUNTS.items():
            value = part.get(name)
            each = value if isinstance(value, list) and value else [value]  # some models give one per layer
            need(
                value is None or all(_is_count(one, least) for one in each),
                name,
                value,
                f"a whole number from {least} on",
            )
        for name, most in MOST.items():
            value = part.get(name)
            need(not isinstance(value, int) or value <= most, name, value, f"at most {most:,}")
        quantized, dense = part.get("quantization_config"), part.get("mlp_only_layers")
        need(isinstance(quantized, Mapping | None), "quantization_config", quantized, "an object")
        need(isinstance(dense, list | None), "mlp_only_layers", dense, "a list of layers")
        for name in ("dtype", "torch_dtype", "model_type"):
            need(isinstance(part.get(name), str | None), name, part.get(name), "a name")
        kinds, layers = part.get("layer_types"), part.get("num_hidden_layers")
        need(kinds is None or _strings(kinds), "layer_types", kinds, "a list of names")
        need(
            not kinds or not isinstance(layers, int) or len(kinds) == layers,
            "layer_types",
            kinds,
            f"a list of {layers} names",
        )


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


@dataclass(frozen=True)
class Sizes:
    """Of the whole model, over all ranks. Those of parts that it does not have are 0."""

    config: Mapping  # of the language model
    kinds: tuple[str, ...]  # of attention, a layer each
    hidden: int
    heads: int
    kv_heads: int
    head: int
    linear_k_heads: int
    linear_v_heads: int
    linear_k: int
    linear_v: int
    kernel: int
    experts: int
    top_k: int
    expert_width: int

    @property
    def attention_layers(self) -> int:
        return sum(kind != LINEAR for kind in self.kinds)

    @property
    def linear_layers(self) -> int:
        return sum(kind == LINEAR for kind in self.kinds)

    @property
    def has_plain_cache(self) -> bool:
        """Whether every layer keeps all keys and values, or a state of Gated DeltaNet, and nothing else."""
        windows = self.config.get("use_sliding_window", True)
        others = [name for name in OTHER_CACHES if self.config.get(name) and (windows or name != "sliding_window")]
        return set(self.kinds) <= {FULL, LINEAR} and not others

    def need(self, name: str, default: int | None = None) -> int:
        """A field of config.json that is not among these; ConfigError where it is absent and has no default."""
        return _get(self.config, name, default=default)

    @property
    def channels(self) -> int:
        """Of a linear layer's convolution: its queries, keys and values."""
        return 2 * self.linear_k_heads * self.linear_k + self.linear_v_heads * self.linear_v


def read(config: Mapping) -> Sizes:
    """The sizes in a config.json that has passed `check_types`; ConfigError for a field that has to be there."""
    text = text_of(config)

    def get(*names: str, default: int | None = None) -> int:
        return _get(text, *names, default=default)

    layers, heads, hidden = get("num_hidden_layers"), get("num_attention_heads"), get("hidden_size")
    hybrid = text.get("linear_num_value_heads") is not None
    qwen = str(text.get("model_type")).startswith("qwen3_")
    interval = get("full_attention_interval", default=4) if hybrid else 1
    kinds = text.get("layer_types") or [LINEAR if (layer + 1) % interval else FULL for layer in range(layers)]
    linear = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    experts = get("num_experts", "num_local_experts", default=0)
    return Sizes(
        text,
        tuple(kinds),
        hidden,
        heads,
        get("num_key_value_heads", default=heads),
        get("head_dim", default=256 if qwen and hybrid else max(1, hidden // heads)),
        *(get(f"linear_{name}") if LINEAR in kinds else 0 for name in linear),
        experts,
        get("num_experts_per_tok") if experts else 0,
        get("moe_intermediate_size", "intermediate_size") if experts else 0,
    )


def _get(text: Mapping, *names: str, default: int | None = None) -> int:
    given = next((text[name] for name in names if text.get(name) is not None), default)
    if given is None:
        raise ConfigError(f"config.json has no {names[0]}")
    if isinstance(given, list):
        raise ConfigError(f"config.json has a {names[0]} per layer")
    return given
