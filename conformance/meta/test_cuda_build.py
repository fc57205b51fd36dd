"""The CUDA library compiles where there is an nvcc, and its hot kernels keep their registers."""

import re

import pytest

from ops_native import build
from shim.errors import BuildError
from shim.loading import user_cache

SPEC = build.cuda_spec(lambda: ("90a",))
PROPERTIES = re.compile(r"Function properties for (\S+)\s+(\d+) bytes stack frame, (\d+) bytes spill stores")
SLOW = re.compile(r"C75\d\d")  # what ptxas says where it makes wgmma wait for each other, or ignores setmaxnreg
FRAME = 96  # bytes of a stack: more is an array that should be in registers, less a call out of the way
# Not hot there: what is served otherwise on sm_90a (paged_prefill_wgmma.cu), one element at a time for want of
# alignment; and a few values outside of the loop over tokens.
COLD = {"paged_prefill.cu: prefill_kernel", "fused_moe.cu: sum_kernel", "gdn_prefill.cu: steps_kernel"}


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """What the compiler said of each source."""
    try:
        SPEC.compiler()
    except BuildError as error:
        pytest.skip(str(error))
    (built,) = build.build_all(tmp_path_factory.mktemp("lib"), specs=[SPEC])
    assert built.identity
    snapshot = SPEC.snapshot()
    objects = build._objects(SPEC, snapshot, SPEC.identity(snapshot))
    return {name: (user_cache() / "objects" / f"{file}.log").read_text() for name, file, _ in objects}


def slow(log):
    """The kernels with values in local memory."""
    found = PROPERTIES.findall(log)
    return {re.search(r"\d([a-z_]+_kernel)", name)[1] for name, frame, spill in found if int(spill) or int(frame) > FRAME}


def test_every_source_tells_of_its_kernels(logs):
    assert set(logs) == {source.name for source in SPEC.folder.glob(SPEC.sources)}
    for source, log in logs.items():
        assert PROPERTIES.search(log), source


def test_spills_and_arrays_in_memory_are_seen():
    line = "ptxas info    : Function properties for _ZN3_x12sort_kernelIfEEv\n  {} bytes stack frame, {} bytes spill stores"
    assert slow(line.format(8, 4)) == {"sort_kernel"}
    assert slow(line.format(512, 0)) == {"sort_kernel"}
    assert slow(line.format(40, 0)) == set()


def test_no_hot_kernel_has_values_in_memory(logs):
    assert {f"{source}: {name}" for source, log in logs.items() for name in slow(log)} <= COLD


def test_no_kernel_waits_for_each_product(logs):
    assert not {source: SLOW.search(log)[0] for source, log in logs.items() if SLOW.search(log)}
