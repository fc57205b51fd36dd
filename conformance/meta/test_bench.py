"""`runner.py bench` says what stands in its way before it measures anything."""

import os

import pytest

import shim
from conformance.meta.scratch import double_op
from conformance.perf import bench as bench_module
from conformance.perf.bench import bench, need_sizes
from conformance.selection import SelectionError


@pytest.fixture
def nothing_measured(monkeypatch):
    """Benches of no op: the tables stay empty."""
    monkeypatch.setattr(bench_module, "speeds", lambda *_: iter(()))
    monkeypatch.setattr(bench_module, "overheads", lambda *_: iter(()))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"threads": 0}, "threads must be 1 or more, got 0"),
        ({"json_out": "/nonexist/x.json"}, "folder /nonexist does not exist"),
        ({"ops": ["softmax"]}, "unknown op 'softmax'"),
    ],
)
def test_wrong_usage_exits_2_with_one_line(wrong, words, capsys):
    assert bench(**wrong) == 2
    said = capsys.readouterr()
    assert words in said.err and len(said.err.splitlines()) == 1 and not said.out


def test_an_op_without_sizes_is_told_where_they_go(scratch, capsys):
    double_op("unmeasured")
    assert bench(["unmeasured"]) == 2
    assert "op unmeasured has no sizes to be measured at: LAYER (sizes.py), TINY (sizes.py)" in capsys.readouterr().err
    with pytest.raises(SelectionError, match=r"GPU_LAYER \(gpu_sizes.py\)"):
        need_sizes(["unmeasured"], "cuda")
    need_sizes([name for name in shim.names() if name != "unmeasured"], "cuda")


@pytest.mark.parametrize(("load", "told"), [(0.5, False), (1e4, True)])
def test_a_busy_machine_is_told_in_one_line(nothing_measured, monkeypatch, capsys, load, told):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    assert bench(["moe_sum"]) == 0
    said = capsys.readouterr().err.splitlines()
    assert len(said) == told and all("load average" in line for line in said)
