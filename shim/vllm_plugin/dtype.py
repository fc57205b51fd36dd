"""The dtype that vLLM serves a model in, looked for in the order in which vLLM looks for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shim.vllm_plugin import checkpoint
from shim.vllm_plugin.honoured import DTYPES
from shim.vllm_plugin.options import Options
from shim.vllm_plugin.serve import Model


def served_dtype(model: Model, options: Options) -> str:
    """As asked, else of the whole configuration, of its parts, of the weights. A model in float32 is served in less, as
    vLLM has it on CPUs and on GPUs from sm_80 on."""
    asked = options.get("--dtype") or "auto"
    if asked != "auto":
        return DTYPES.get(asked, asked)
    parts = (model.config, *map(model.config.get, ("text_config", "vision_config", "encoder_config")))
    given = (part.get(name) for part in parts if isinstance(part, Mapping) for name in ("dtype", "torch_dtype"))
    own = next(filter(None, given), None) or _common(_stored(model, options.get("--revision")))
    if own == "float32":
        return "bfloat16" if options.generates else "float16"
    return own


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
