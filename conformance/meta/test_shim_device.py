"""The device is asked for its facts; instruction sets are those that this CPU runs."""

from types import SimpleNamespace

import pytest
import torch

import shim
from conformance.run import lacks_memory
from ops_native import libraries
from shim import device


def test_cpu_is_described():
    cpu = device.describe("cpu")
    assert cpu.type == "cpu"
    assert cpu.facts["isa"] in device.ISAS
    assert cpu.facts["cores"] >= 1
    assert cpu.fingerprint.startswith(f"cpu-{cpu.facts['isa']}-")


def test_device_that_is_not_there_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(shim.OpUnavailableError, match="no device cuda:0"):
        device.describe("cuda:0")


def test_shared_memory_is_what_the_device_reports(monkeypatch):
    """Field bug 25: 32 KiB by a constant where the device has 48."""
    facts = SimpleNamespace(
        name="An accelerator",
        major=7,
        minor=1,
        multi_processor_count=16,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=65536,
        L2_cache_size=4 << 20,
        total_memory=32 << 30,
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    described = device.describe("cuda")
    assert described.facts["shared_memory_per_block"] == 49152
    assert described.facts["shared_memory_per_block_optin"] == 65536
    assert described.fingerprint.startswith("cuda-sm71-")
    facts.shared_memory_per_block = 32768
    assert device.describe("cuda").fingerprint != described.fingerprint


@pytest.mark.parametrize(
    ("flags", "isas"),
    [
        ("sse2", ["base"]),
        ("avx2 fma f16c", ["base", "avx2"]),
        ("avx2 f16c", ["base"]),
        ("avx2 fma f16c avx512f avx512bw avx512vl avx512dq", ["base", "avx2", "avx512"]),
        ("avx2 fma f16c avx512f avx512bw avx512dq", ["base", "avx2"]),
    ],
)
def test_instruction_set_needs_every_feature(monkeypatch, flags, isas):
    monkeypatch.delenv("OPSHIM_CPU_ISA", raising=False)
    monkeypatch.setattr(device.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(device, "_cpu_info", lambda: ("A CPU", frozenset(flags.split())))
    assert device.cpu_isas() == isas
    assert device.cpu_isa() == isas[-1]


def test_instruction_set_may_be_lowered_but_not_raised(monkeypatch):
    monkeypatch.setattr(device.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(device, "_cpu_info", lambda: ("A CPU", frozenset({"avx2", "fma", "f16c"})))
    monkeypatch.setenv("OPSHIM_CPU_ISA", "base")
    assert device.cpu_isa() == "base"
    monkeypatch.setenv("OPSHIM_CPU_ISA", "avx512")
    with pytest.raises(shim.UnknownNameError, match="'avx512'; known: avx2, base"):
        device.cpu_isa()


def test_other_architectures_have_the_base_set(monkeypatch):
    monkeypatch.delenv("OPSHIM_CPU_ISA", raising=False)
    monkeypatch.setattr(device.platform, "machine", lambda: "aarch64")
    assert device.cpu_isas() == ["base"]


def test_a_gpu_that_is_too_old_is_said_before_anything_is_compiled(monkeypatch, tmp_path):
    monkeypatch.setenv("OPSHIM_CACHE", str(tmp_path))
    monkeypatch.setattr(libraries, "cuda_archs", lambda: ("75",))
    library = shim.loading.NativeLibrary("cuda", libraries.CUDA.spec, unfit=libraries.CUDA.unfit)
    assert library.compiled({"f": "p"}).reason == "needs GPUs of sm_80 or later, here is sm_75"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("folder", "limit", "used", "stat"),
    [
        ("", "memory.max", "memory.current", "anon 5\nactive_file 1048576\ninactive_file 2097152\n"),
        (
            "memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "active_file 1\ntotal_active_file 1048576\ntotal_inactive_file 2097152\n",
        ),
    ],
)
def test_a_container_has_what_its_limit_leaves_beside_files_that_were_read(
    monkeypatch, tmp_path, folder, limit, used, stat
):
    monkeypatch.setattr(device, "CGROUPS", tmp_path)
    machine = device.host_memory()
    group = tmp_path / folder
    group.mkdir(exist_ok=True)
    for name, text in ((limit, "8388608\n"), (used, "7340032\n"), ("memory.stat", stat)):
        (group / name).write_text(text)
    assert device.host_memory() == device.Memory(8 * 2**20, 4 * 2**20)
    assert lacks_memory("cpu", 5 * 2**20) == "needs 5.0 MiB, 4.0 MiB are free"
    for unread in ("", "active_file 1\n", "active_file\n", "active_file x\ninactive_file 1\n"):
        (group / "memory.stat").write_text(unread)
        assert device.host_memory() == device.Memory(8 * 2**20, 2**20)
    (group / "memory.stat").unlink()
    assert device.host_memory() == device.Memory(8 * 2**20, 2**20)
    (group / limit).write_text("max\n" if not folder else "9223372036854771712\n")
    assert device.host_memory().total == machine.total > 2**28
