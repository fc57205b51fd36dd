"""How much KV cache a model's sequences need, and how much memory there is for it: an estimate by vLLM's own rules.

vLLM deals out pages of one size. Layers of a kind are put into groups of equal size, and a page holds a group's keys
and values of `block` tokens, or the states of one sequence. In hybrid models the page of an attention layer is made as
large as a state at least, so that both come from one pool. A sequence takes a page per block of tokens from each group
of attention, and one or two from each group of states.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from shim.device import Memory, human
from shim.errors import OpshimError
from shim.vllm_plugin.model_class import vllm_folder
from shim.vllm_plugin.options import PIPELINE, TENSOR, Options
from shim.vllm_plugin.sizes import Sizes

GIB = 2**30
CPU_SPACE = "VLLM_CPU_KVCACHE_SPACE"
DEFAULT_SPACE = "1"  # GiB that `serve` sets it to
UTILIZATION = "0.9"  # of a GPU's memory, where vLLM's source does not tell what it takes if not told
GPU_OVERHEAD = 2 * GIB  # what activations, graphs and libraries take beside the weights, roughly
SIZES = {"float16": 2, "half": 2, "bfloat16": 2, "float32": 4, "float": 4}
FULL_SIZE = (None, "", "auto")


@dataclass(frozen=True)
class Demand:
    """What sequences need on one rank. `block`: tokens per page, `page`: bytes of a page over the layers of a group,
    `attention` and `states`: pages that a sequence takes per block of tokens, and once."""

    block: int
    page: int
    attention: int
    states: int

    def pages(self, tokens: int) -> int:
        return -(-tokens // self.block) * self.attention + self.states

    def bytes(self, tokens: int) -> int:
        """Of a pool that serves one sequence of that length; vLLM keeps one page for itself."""
        return (self.pages(tokens) + 1) * self.page

    def longest(self, room: int) -> int:
        """The longest sequence that a pool of `room` bytes holds; 0 for none."""
        left = room // self.page - 1 - self.states
        return max(0, left // self.attention) * self.block

    def at_once(self, room: int, tokens: int) -> float:
        """How many sequences of that length a pool holds, as vLLM counts them."""
        return room // self.page / self.pages(tokens)


def demand(sizes: Sizes, options: Options, dtype: str, device: str) -> Demand | None:
    """None for a model whose cache is of another kind, or does not grow."""
    ranks, stages = options.whole(1, *TENSOR), options.whole(1, *PIPELINE)
    attention, linear = (-(-count // stages) for count in (sizes.attention_layers, sizes.linear_layers))
    if not attention or not sizes.has_plain_cache:
        return None
    cache = options.get("--kv-cache-dtype")
    item = SIZES.get(dtype if cache in FULL_SIZE else cache, 1)
    token = 2 * max(1, sizes.kv_heads // ranks) * sizes.head * item  # bytes of a token in one layer
    block = options.whole(128 if device == "cpu" else 16, "--block-size")
    if not linear:
        return Demand(block, token * block * attention, 1, 0)
    state = _state_bytes(sizes, options, dtype, device) // ranks
    block *= -(-state // (block * token))
    few, many = sorted((attention, linear))
    group = many if many < 1.5 * few else few  # layers
    caching = "--no-enable-prefix-caching" not in options
    return Demand(block, token * block * group, -(-attention // group), -(-linear // group) * (2 if caching else 1))


def _state_bytes(sizes: Sizes, options: Options, dtype: str, device: str) -> int:
    """Of one sequence in one layer over all ranks: the convolution's last inputs and the recurrent state."""
    import torch

    conv = options.get("--mamba-cache-dtype")
    conv = dtype if conv in FULL_SIZE else conv
    state = options.get("--mamba-ssm-cache-dtype")
    if state in FULL_SIZE:
        state = sizes.config.get("mamba_ssm_dtype") or conv
        if device == "cpu" and getattr(torch.cpu, "_is_avx512_bf16_supported", bool)():
            state = "float32"  # vLLM's platform sets it so, for a kernel of its own
    recurrent = sizes.linear_v_heads * sizes.linear_v * sizes.linear_k
    return sizes.channels * (sizes.kernel - 1) * SIZES.get(conv, 2) + recurrent * SIZES.get(state, 4)


def human_number(text: str, option: str) -> int:
    """As vLLM reads "8192", "8k" (thousands), "8K" (1024s), "1.5M"; OpshimError for what it would not take."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT]?)", text)
    if not found or ("." in found[1] and not found[2].islower()):
        raise OpshimError(f"{option} must be a number such as 8192, 8k or 8K, got {text or 'nothing'!r}")
    power = " kmgt".index(found[2].lower() or " ")
    return int(float(found[1]) * (1024 if found[2].isupper() else 1000) ** power)


# ---- memory ------------------------------------------------------------------------------------------------------------


def gpu_memory() -> Memory:
    """Of the visible GPU that has the least free. Asked of nvidia-smi: torch would take some for a context."""
    import torch

    total = torch.cuda.get_device_properties(0).total_memory
    query = ["nvidia-smi", "--query-gpu=index,uuid,memory.free", "--format=csv,noheader,nounits"]
    if not shutil.which(query[0]):
        return Memory(total, None)
    told = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20).stdout
    rows = [[cell.strip() for cell in line.split(",")] for line in told.splitlines()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    wanted = visible.split(",") if visible else [row[0] for row in rows]
    free = [int(row[2]) for row in rows if len(row) == 3 and row[2].isdigit() and {row[0], row[1]} & set(wanted)]
    return Memory(total, min(free) * 2**20 if free else None)


def utilization(options: Options) -> float:
    """The share of a GPU's memory that vLLM takes."""
    given = options.get("--gpu-memory-utilization") or _default_utilization()
    try:
        value = float(given)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise OpshimError(f"--gpu-memory-utilization must be a number above 0 and up to 1, got {given!r}")
    return value


def _default_utilization() -> str:
    """As vLLM's source has it, read as text: an import takes seconds."""
    folder = vllm_folder()
    file = folder and folder / "config" / "cache.py"
    text = file.read_text() if file and file.is_file() else ""
    found = re.search(r"gpu_memory_utilization: float =\D*([\d.]+)", text)
    return found[1] if found else UTILIZATION


def room(options: Options, device: str, memory: Memory, weights: int, environ: Mapping[str, str]) -> tuple[int, str]:
    """Bytes for the cache on one rank whose weights take `weights` bytes, and where that figure comes from."""
    given = options.get("--kv-cache-memory-bytes")
    space = environ.get(CPU_SPACE) if device == "cpu" else None
    if space is None and given is None and device == "cpu":
        space = DEFAULT_SPACE
    if space:
        if not space.isdigit() or not int(space):
            raise OpshimError(f"{CPU_SPACE} must be a whole number of GiB from 1 on, got {space!r}")
        return int(space) * GIB, f"{CPU_SPACE}={space}"
    if given is not None:
        return human_number(given, "--kv-cache-memory-bytes"), "--kv-cache-memory-bytes"
    share = utilization(options)
    overhead = GPU_OVERHEAD if device == "cuda" else GIB
    words = f"{share:g} of {human(memory.total)} less {human(weights)} of weights and {human(overhead)} for the rest"
    return max(0, int(share * memory.total) - weights - overhead), words
