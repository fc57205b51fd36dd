"""The dtype that vLLM serves a model in, looked for in the order in which vLLM looks for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from shim.vllm_plugin import checkpoint
from shim.vllm_plugin.honoured import DTYPES
from shim.vllm_plugin.options import Options
from shim.vllm_plugin.serve import Model


def served_dtype(model: Model, options: Options) -> str:
    """As asked, else of the whole configuration, of its parts, of the weights. A model in float32, or in one that vLLM
    does not compute in, is served in another, as vLLM has it on CPUs and on GPUs from sm_80 on. So is one whose dtype
    comes by --hf-overrides: that stays a text, which vLLM takes for none that it knows."""
    asked = options.get("--dtype") or "auto"
    if asked != "auto":
        return DTYPES.get(asked, asked)
    preferred = "bfloat16" if options.generates else "float16"
    part, own = next(_given(model.config), (None, None))
    if part in dict(_given(options.fields("--hf-overrides"))):
        return preferred
    own = str(own or _common(_stored(model, options.get("--revision"))))
    dtype = getattr(torch, own, None)  # as transformers reads it: "half", "double"
    if dtype in (torch.float16, torch.bfloat16):
        return str(dtype).removeprefix("torch.")
    return preferred if isinstance(dtype, torch.dtype) else own


def _given(config: Mapping) -> Iterator[tuple[str, str]]:
    """The dtypes that a configuration names, in vLLM's order, each with the part of it that does."""
    for name in ("", "text_config", "vision_config", "encoder_config"):
        part = config.get(name) if name else config
        if isinstance(part, Mapping):
            yield from ((name, part[key]) for key in ("dtype", "torch_dtype") if part.get(key))


def _common(stored: set[str]) -> str:
    """The one that holds all floating-point tensors without loss."""
    floats = tuple(stored & checkpoint.FLOATS.keys())
    return {("F16",): "float16", ("BF16",): "bfloat16"}.get(floats, "float32")


def _stored(model: Model, revision: str | None) -> set[str]:
    """The dtypes of the weights, as safetensors names them; none where nobody can tell."""
    try:
        if model.local:
            return {one.dtype for one in checkpoint.read(Path(model.path)).values()}
        import huggingface_hub

        return set(huggingface_hub.get_safetensors_metadata(model.path, revision=revision).parameter_count)
    except Exception:  # noqa: BLE001  a damaged file is told by the preflight, a hub that does not answer by vLLM
        return set()
