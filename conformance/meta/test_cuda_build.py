"""The CUDA library compiles where there is an nvcc, and its hot kernels keep their registers."""

import re

import pytest

from ops_native.build import build_all, compile_logs, cuda_spec
from shim.errors import BuildError

SPEC = cuda_spec(lambda: ("90a",))
SPILLED = re.compile(r"Function properties for (\S+)\s+.*?(\d+) bytes spill stores")
# Not hot there: what is served otherwise on sm_90a (paged_prefill_wgmma.cu), one element at a time for want of
# alignment; and a few values outside of the loop over tokens.
COLD = {"paged_prefill.cu: prefill_kernel", "fused_moe.cu: sum_kernel", "gdn_prefill.cu: steps_kernel"}


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    try:
        SPEC.compiler()
    except BuildError as error:
        pytest.skip(str(error))
    (built,) = build_all(tmp_path_factory.mktemp("lib"), specs=[SPEC])
    assert built.identity
    return compile_logs(SPEC)


def spilled(log):
    return {re.search(r"\d([a-z_]+_kernel)", name)[1] for name, size in SPILLED.findall(log) if int(size)}


def test_every_source_tells_of_its_kernels(logs):
    assert set(logs) == {source.name for source in SPEC.folder.glob(SPEC.sources)}
    for source, log in logs.items():
        assert SPILLED.search(log), source


def test_a_spill_is_seen():
    line = "ptxas info    : Function properties for _ZN3_x12sort_kernelIfEEv\n  8 bytes stack frame, {} bytes spill stores"
    assert spilled(line.format(4)) == {"sort_kernel"}
    assert spilled(line.format(0)) == set()


def test_no_hot_kernel_spills_registers(logs):
    assert {f"{source}: {name}" for source, log in logs.items() for name in spilled(log)} <= COLD
