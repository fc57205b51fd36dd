"""What a device really is, asked from the device and never from a table of constants."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from shim.errors import OpUnavailableError, UnknownNameError

DEVICES = ("cpu", "cuda")  # the types that ops are asked for
ISAS = ("base", "avx2", "avx512")  # what CPU kernels are compiled for, weakest first
CGROUPS = Path("/sys/fs/cgroup")
_NEEDS = {
    "base": set(),
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq"},
}


@dataclass(frozen=True)
class Device:
    """Facts of one device. `facts` holds what only its type has: ISA and cores of a CPU; compute capability, SM count,
    shared memory per block (default and opt-in), L2, memory and driver of a GPU. Sizes are in bytes."""

    type: str
    name: str
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """Short, readable, equal only for like devices: "cpu-avx512-1a2b3c4d"."""
        kind = self.facts.get("isa") or "sm" + "".join(map(str, self.facts["capability"]))
        stable = {key: value for key, value in self.facts.items() if key not in ("driver", "memory", "cores")}
        digest = hashlib.sha256(repr((self.type, self.name, sorted(stable.items()))).encode()).hexdigest()
        return f"{self.type}-{kind}-{digest[:8]}"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "fingerprint": self.fingerprint}


def describe(device: str = "cpu") -> Device:
    """The device of that torch name ("cpu", "cuda", "cuda:1"); OpUnavailableError where there is none."""
    wanted = torch.device(device)
    if wanted.type == "cpu":
        facts = {"arch": platform.machine(), "isa": cpu_isa(), "cores": len(os.sched_getaffinity(0))}
        return Device("cpu", _cpu_info()[0], facts)
    if wanted.type == "cuda" and torch.cuda.is_available():
        return _cuda(wanted)
    raise OpUnavailableError(f"this machine has no device {device} that torch can use")


def _cuda(device: torch.device) -> Device:
    facts = torch.cuda.get_device_properties(device)
    return Device(
        "cuda",
        facts.name,
        {
            "capability": (facts.major, facts.minor),
            "sms": facts.multi_processor_count,
            "shared_memory_per_block": facts.shared_memory_per_block,
            "shared_memory_per_block_optin": facts.shared_memory_per_block_optin,
            "l2": facts.L2_cache_size,
            "memory": facts.total_memory,
            "driver": _cuda_driver(),
        },
    )


@functools.cache
def cuda_archs() -> tuple[str, ...]:
    """The archs of this machine's GPUs as nvcc names them ("90a", "86"): with the "a", whose instructions are that
    arch's own, where it exists for wgmma. Empty without a GPU."""
    if not torch.cuda.is_available():
        return ()
    found = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    return tuple(f"{major}{minor}{'a' if (major, minor) == (9, 0) else ''}" for major, minor in sorted(found))


def _cuda_driver() -> str:
    version = Path("/proc/driver/nvidia/version")
    return version.read_text().splitlines()[0] if version.exists() else "unknown"


def driver_version(text: str) -> str:
    """The number in the driver's line of words, "580.95.05"; all of it where there is none."""
    found = re.search(r"\d{3}\.\d+(?:\.\d+)?", text)
    return found.group() if found else text


@functools.cache
def _cpu_info() -> tuple[str, frozenset[str]]:
    """Model name and feature flags; empty where the kernel does not tell."""
    name, flags = platform.processor() or platform.machine(), frozenset()
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        key, _, value = (part.strip() for part in line.partition(":"))
        if key == "model name":
            name = value
        elif key in ("flags", "Features"):
            flags = frozenset(value.split())
            break
    return name, flags


def cpu_isas() -> list[str]:
    """The instruction sets of ISAS that this CPU runs, weakest first."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ["base"]
    return [isa for isa in ISAS if _NEEDS[isa] <= _cpu_info()[1]]


def cpu_isa() -> str:
    """The best instruction set for CPU kernels; OPSHIM_CPU_ISA overrides it with another one that this CPU runs."""
    possible = cpu_isas()
    wanted = os.environ.get("OPSHIM_CPU_ISA")
    if wanted and wanted not in possible:
        raise UnknownNameError("OPSHIM_CPU_ISA of this machine", wanted, possible)
    return wanted or possible[-1]


# ---- memory ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """Of one device, in bytes; `free` is None where nobody tells."""

    total: int
    free: int | None

    def __str__(self) -> str:
        return f"{human(self.total)} of memory, {'' if self.free is None else human(self.free)} free".rstrip()


def host_memory() -> Memory:
    """Of this machine, or of the container that this process runs in."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    told = {name.rstrip(":"): 1024 * int(value) for name, value, *_ in lines}
    total, free = told["MemTotal"], told["MemAvailable"]
    for folder, limit, used, prefix in (
        (CGROUPS, "max", "current", ""),
        (CGROUPS / "memory", "limit_in_bytes", "usage_in_bytes", "total_"),  # version 1
    ):
        try:
            most, taken = (int((folder / f"memory.{name}").read_text()) for name in (limit, used))
        except (OSError, ValueError):  # no such group, or the limit "max"
            continue
        # files that were read count as used, and go when the memory is asked for
        total, free = min(total, most), min(free, most - taken + _files_in_memory(folder, prefix))
    return Memory(total, max(0, free))


def _files_in_memory(group: Path, prefix: str) -> int:
    """Bytes of files that a control group holds; 0 where it does not tell."""
    try:
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return sum(int(stat[f"{prefix}{name}_file"]) for name in ("active", "inactive"))
    except (OSError, ValueError, KeyError):
        return 0


def human(size: float) -> str:
    """Bytes as people read them: "6.2 MiB"."""
    for unit in ("bytes", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
