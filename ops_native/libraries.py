"""The native libraries, and what their C functions are told of tensors: dtype, device, stream."""

import torch

from ops_native.build import ARCHS, OLDEST, cpu_spec, cuda_spec
from shim.device import cpu_isa, cuda_archs
from shim.loading import NativeLibrary

DTYPE = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # enum Dtype of cpu/opshim.h and cuda/opshim.cuh


def _unfit(built_for: str) -> str:
    """Why a CUDA library for these archs ("x86_64 sm_80 sm_90a") does not run on this machine's GPUs, or ""."""
    mine = cuda_archs()
    if not mine:
        return "torch sees no CUDA device on this machine"
    old = [f"sm_{arch}" for arch in mine if int(arch.rstrip("a")) < OLDEST]
    if old:
        return f"needs GPUs of sm_{OLDEST} or later, here is {', '.join(old)}"
    theirs = [word.removeprefix("sm_") for word in built_for.split() if word.startswith("sm_")]
    lacking = [f"sm_{arch}" for arch in mine if not any(_runs(code, arch) for code in theirs)]
    return f"holds code for {', '.join(theirs)}, not for {', '.join(lacking)}" if lacking else ""


def _runs(code: str, arch: str) -> bool:
    """Whether machine code for sm_`code` runs on a device of `arch`: the same major version, and no later minor; with
    an "a" on that very arch only."""
    if code.endswith("a"):
        return code == arch
    return int(code) // 10 == int(arch.rstrip("a")) // 10 and int(code) <= int(arch.rstrip("a"))


CPU = NativeLibrary("cpu", cpu_spec(), tail="i", suffix=lambda: f"_{cpu_isa()}")
CUDA = NativeLibrary("cuda", cuda_spec(lambda: cuda_archs() or ARCHS), tail="ip", unfit=_unfit)


def where(tensor: torch.Tensor) -> tuple[int, ...]:
    """The last arguments of every C function: on the CPU the threads, on a GPU its index and torch's current stream."""
    if tensor.is_cuda:
        device = tensor.get_device()
        return device, torch._C._cuda_getCurrentRawStream(device)
    return (torch.get_num_threads(),)


def pointers(*tensors: torch.Tensor | None) -> list[int]:
    """The tensors' addresses, 0 for None."""
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
