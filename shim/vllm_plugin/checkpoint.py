"""A checkpoint's tensors, from the headers of its files alone, against the parameters that its model has.

A file of safetensors is 8 bytes (the length of the header, little endian), the header (JSON: of each tensor its dtype,
shape and range of bytes), then the tensors. What vLLM would find out after minutes, or never (one expert's weights that
are missing leave no trace), is seen here in milliseconds.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shim.device import human
from shim.errors import OpshimError
from shim.vllm_plugin.sizes import LINEAR, Sizes

INDEX = "model.safetensors.index.json"
FLOATS = {"F16": 2, "BF16": 2, "F32": 4, "F64": 8}  # bytes of dtypes that vLLM converts to the one it serves in
LONGEST_HEADER = 100_000_000  # bytes, as the format has it
BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
BITS |= dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8)
BITS |= dict.fromkeys(("U16", "I16", "F16", "BF16"), 16) | dict.fromkeys(("U32", "I32", "F32"), 32)
BITS |= dict.fromkeys(("U64", "I64", "F64", "C64"), 64)


class CheckpointError(OpshimError):
    """A file of a checkpoint that cannot be what it says; the message names it."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a file; its size in bytes."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    size: int


def weight_files(folder: Path) -> list[Path]:
    """All files there that may be a checkpoint's, in the formats that vLLM looks for."""
    return [file for kind in ("*.safetensors", "*.bin") for file in folder.glob(kind)]


def read(folder: Path) -> dict[str, Stored]:
    """All tensors of a checkpoint by name; CheckpointError where a file is damaged, cut short or absent. Without an
    index, of all files; with one, of those that it names."""
    index = folder / INDEX
    if not index.exists():
        return {name: stored for file in sorted(folder.glob("*.safetensors")) for name, stored in header(file).items()}
    places = _read_index(index)
    found = {}
    for file in sorted(set(places.values())):
        if not (folder / file).is_file():
            raise CheckpointError(f"{index} names {file}, which is not there")
        found |= header(folder / file)
    for name, file in places.items():
        if name not in found or found[name].file != file:
            raise CheckpointError(f"{index} says that {name} is in {file}, which does not have it")
    return found


def _read_index(index: Path) -> dict[str, str]:
    try:
        places = json.loads(index.read_text())["weight_map"]
        if all(isinstance(file, str) and Path(file).name == file for file in places.values()):
            return places
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise CheckpointError(f"{index} is not an index: expected JSON with a weight_map from tensors to file names")


def header(file: Path) -> dict[str, Stored]:
    """The tensors of one file; CheckpointError where header and size do not fit each other."""
    try:
        if not file.is_file():  # a dangling link, a folder, a pipe that nobody writes to
            raise CheckpointError(f"{file} is no file")
        return _header(file)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from None


def _header(file: Path) -> dict[str, Stored]:
    total = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(8)
        length = int.from_bytes(start, "little")
        if start == b"version ":
            raise CheckpointError(f"{file} is a Git LFS pointer of {total} bytes, not the weights: 'git lfs pull'")
        if total < 8 or length > LONGEST_HEADER:
            raise CheckpointError(f"{file} is not a safetensors file: no header in its {total} bytes")
        if 8 + length > total:
            raise CheckpointError(f"{file} is cut short: its header needs {8 + length} bytes, it has {total}")
        text = opened.read(length)
    try:
        tensors = {name: one for name, one in json.loads(text).items() if name != "__metadata__"}
        found, end = {}, 0
        for name, one in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
            first, last = one["data_offsets"]
            stored = Stored(file.name, one["dtype"], tuple(one["shape"]), last - first)
            if first != end or stored.size * 8 != math.prod(stored.shape) * BITS.get(stored.dtype, 8 * stored.size):
                raise ValueError(f"{name} of {stored.dtype} {list(stored.shape)} at bytes {first} to {last}")
            found[name], end = stored, last
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} has a damaged header: {type(error).__name__}: {error}") from None
    if 8 + length + end != total:
        short = "cut short" if total < 8 + length + end else "damaged"
        raise CheckpointError(f"{file} is {short}: by its header it has {8 + length + end} bytes, in truth {total}")
    return found


# ---- the parameters of the models that are known -----------------------------------------------------------------------

Shape = tuple[int, ...] | None  # None: not compared


def parameters(sizes: Sizes, architecture: str, stored: Iterable[str]) -> dict[str, Shape] | None:
    """Names and shapes of all tensors that the language model needs, in the form that the checkpoint `stored` has
    them; None for an architecture without a table here. Names are those of `canonical`."""
    if not re.match(r"Qwen3(Next|_5|_5Moe)For", architecture):
        return None
    stored = set(stored)
    config, hidden = sizes.config, sizes.hidden
    needed = {"model.embed_tokens.weight": (sizes.need("vocab_size"), hidden), "model.norm.weight": (hidden,)}
    if not config.get("tie_word_embeddings"):
        needed["lm_head.weight"] = (sizes.need("vocab_size"), hidden)
    fused = any(name.endswith("mlp.experts.gate_up_proj") for name in stored)
    for layer, kind in enumerate(sizes.kinds):
        next_ = architecture.startswith("Qwen3Next")
        mixer = _linear(sizes, next_) if kind == LINEAR else _attention(sizes)
        sparse = _is_sparse(sizes, layer) if next_ else "Moe" in architecture
        mlp = _mixture(sizes, fused) if sparse else _mlp("mlp", hidden, sizes.need("intermediate_size"))
        norms = {f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        if config.get("layer_scale"):
            norms |= {f"{name}_layer_scale": (1, 1, hidden) for name in ("attn", "ffn")}
        for name, shape in (norms | mixer | mlp).items():
            needed[f"model.layers.{layer}.{name}"] = shape
    return needed


def _is_sparse(s: Sizes, layer: int) -> bool:
    listed = layer in (s.config.get("mlp_only_layers") or ())
    return not listed and bool(s.config.get("num_experts")) and (layer + 1) % s.need("decoder_sparse_step", 1) == 0


def _attention(s: Sizes) -> dict[str, Shape]:
    gated = 2 if s.config.get("attn_output_gate", True) else 1
    rows = {"q": gated * s.heads * s.head, "k": s.kv_heads * s.head, "v": s.kv_heads * s.head}
    found = {f"self_attn.{name}_proj.weight": (count, s.hidden) for name, count in rows.items()}
    if s.config.get("attention_bias"):
        found |= {f"self_attn.{name}_proj.bias": (count,) for name, count in rows.items()}
    found |= {f"self_attn.{name}_norm.weight": (s.head,) for name in "qk"}
    return found | {"self_attn.o_proj.weight": (s.hidden, s.heads * s.head)}


def _linear(s: Sizes, merged: bool) -> dict[str, Shape]:
    """`merged`: z with q, k, v, and b with a, in one tensor each."""
    values, heads = s.linear_v_heads * s.linear_v, s.linear_v_heads
    rows = {"qkvz": s.channels + values, "ba": 2 * heads}
    if not merged:
        rows = {"qkv": s.channels, "z": values, "b": heads, "a": heads}
    return {f"linear_attn.in_proj_{name}.weight": (count, s.hidden) for name, count in rows.items()} | {
        "linear_attn.conv1d.weight": (s.channels, 1, s.kernel),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (s.linear_v,),
        "linear_attn.out_proj.weight": (s.hidden, values),
    }


def _mlp(name: str, hidden: int, width: int) -> dict[str, Shape]:
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    return {f"{name}.{part}_proj.weight": shape for part, shape in shapes.items()}


def _mixture(s: Sizes, fused: bool) -> dict[str, Shape]:
    """`fused`: all experts of a layer in two tensors."""
    found = {"mlp.gate.weight": (s.experts, s.hidden)}
    if fused:
        found |= {"mlp.experts.gate_up_proj": None, "mlp.experts.down_proj": None}
    else:
        for expert in range(s.experts):
            found |= _mlp(f"mlp.experts.{expert}", s.hidden, s.expert_width)
    shared = s.config.get("shared_expert_intermediate_size")
    if shared:
        found |= _mlp("mlp.shared_expert", s.hidden, shared) | {"mlp.shared_expert_gate.weight": (1, s.hidden)}
    return found


# ---- comparison --------------------------------------------------------------------------------------------------------


@dataclass
class Comparison:
    """Tensors by name, with their bytes. `skipped`: vLLM leaves them out, `vision`: of the vision tower, not compared,
    `unknown`: the model has no parameter for them; `shapes`: in words, those of another shape than the model's."""

    missing: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    vision: dict[str, int] = field(default_factory=dict)
    unknown: dict[str, int] = field(default_factory=dict)
    shapes: list[str] = field(default_factory=list)


def canonical(name: str, architecture: str) -> str:
    """The name without the prefix that Qwen3.5's checkpoints put before the language model's."""
    if architecture.startswith("Qwen3_5"):
        name = re.sub(r"^(?:model\.language_model|language_model\.model)\.", "model.", name)
        name = re.sub(r"^language_model\.lm_head\.", "lm_head.", name)
    return name


def compare(
    stored: Mapping[str, Stored], needed: Mapping[str, Shape], architecture: str, itemsize: int, text_only: bool = False
) -> Comparison:
    """`itemsize`: bytes per element of what is missing; `text_only`: vLLM is told to leave the vision tower out."""
    result, seen = Comparison(), set()
    vision = "ForConditional" in architecture
    for name, one in stored.items():
        known = canonical(name, architecture)
        if known in needed:
            seen.add(known)
            if needed[known] is not None and needed[known] != one.shape:
                result.shapes.append(f"{name} is {list(one.shape)}, the model's is {list(needed[known])}")
            elif one.dtype not in FLOATS:  # vLLM would take its numbers without a scale
                result.shapes.append(f"{name} is of {one.dtype}, a model that is not quantized has {', '.join(FLOATS)}")
        elif known.startswith("mtp.") or known.endswith("rotary_emb.inv_freq") or known == "lm_head.weight":
            result.skipped[name] = one.size
        elif vision and re.match(r"(model\.)?visual\.", known):
            (result.skipped if text_only else result.vision)[name] = one.size
        else:
            result.unknown[name] = one.size
    for name in needed.keys() - seen:
        result.missing[name] = math.prod(needed[name] or (0,)) * itemsize
    return result


def listed(tensors: Mapping[str, int]) -> Iterator[str]:
    """A line per name, those alike but for their numbers together: "model.layers.{0-3}.norm: 4 tensors, 2.0 KiB"."""
    alike = defaultdict(list)
    for name in tensors:
        alike[re.sub(r"(?<=\.)\d+(?=\.)", "{}", name)].append(name)
    for pattern, names in sorted(alike.items()):
        numbers = zip(*(map(int, re.findall(r"(?<=\.)\d+(?=\.)", name)) for name in names))
        count = f"{len(names)} tensors, " if len(names) > 1 else ""
        yield f"{pattern.format(*map(_ranges, numbers))}: {count}{human(sum(tensors[name] for name in names))}"


def _ranges(numbers: Iterable[int]) -> str:
    """As in 7, or in {0-3,5}."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    told = ",".join("-".join(map(str, run)) for run in runs)
    return told if told.isdigit() else f"{{{told}}}"
