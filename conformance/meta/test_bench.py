"""`runner.py bench` says what stands in its way before it measures anything; its plots and tables."""

import itertools
import json
import os
import re
import sys
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner

import shim
from conformance.meta.scratch import double_op
from conformance.perf import bench as bench_module
from conformance.perf import cold, end_to_end, plot
from conformance.perf.bench import bench, need_sizes
from conformance.selection import SelectionError
from shim.policy import Policy, using


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
        ({"cold": True, "providers": ["reference"]}, "--cold measures the provider that serves each op by itself"),
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


def test_a_cold_start_that_fails_is_told_beside_the_others(monkeypatch, tmp_path, capsys):
    told = {"seconds": 0.5, "device_seconds": 0.1, "served by": "native"}
    words = "import sys\nif sys.argv[1] == 'moe_sum': raise RuntimeError('no kernel\\nfor this GPU')\n"
    monkeypatch.setattr(cold, "CHILD", f"{words}print('{json.dumps(told)}')")
    out = tmp_path / "out.json"
    assert bench(["moe_sum", "gdn_gating"], cold=True, json_out=str(out)) == 1
    assert {row["op"]: row.get("reason") for row in json.loads(out.read_text())["cold"]} == {
        "moe_sum": "RuntimeError: no kernel",
        "gdn_gating": None,
    }
    assert re.search(r"^moe_sum +failed: RuntimeError: no kernel$", capsys.readouterr().out, re.MULTILINE)
    monkeypatch.setattr(cold, "CHILD", "import time; time.sleep(60)")
    monkeypatch.setattr(cold, "LIMIT_SECONDS", 0.2)
    assert [row["reason"] for row in cold.cold(["moe_sum"], "cpu")] == ["no result after 0.2 s"]
    monkeypatch.setattr(cold, "CHILD", "import os; os.kill(os.getpid(), 9)")
    monkeypatch.setattr(cold, "LIMIT_SECONDS", 60)
    assert [row["reason"] for row in cold.cold(["moe_sum"], "cpu")] == ["the process ended with code -9"]


@pytest.mark.parametrize("full", ["out.json", "out.svg"])
def test_results_that_cannot_be_written_are_printed_and_exit_1(full, nothing_measured, tmp_path, capsys):
    (tmp_path / full).symlink_to("/dev/full")
    assert bench(["moe_sum"], json_out=str(tmp_path / "out.json")) == 1
    said = capsys.readouterr()
    assert said.out.startswith("op ") and f"bench: {tmp_path / full} cannot be written: No space left" in said.err


@pytest.mark.parametrize(("load", "told"), [(0.5, False), (1e4, True)])
def test_a_busy_machine_is_told_in_one_line(nothing_measured, monkeypatch, capsys, load, told):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    assert bench(["moe_sum"]) == 0
    said = capsys.readouterr().err.splitlines()
    assert len(said) == told and all("load average" in line for line in said)


def test_a_provider_that_raises_is_told_beside_the_others(scratch, monkeypatch, capsys):
    """In its first call, in a later one, and in its guard."""
    reference = shim.get("moe_sum").reference

    def guard(y, topk_ids=None):
        raise KeyError("guard")

    def register(name, fails_at, **options):
        calls = itertools.count(1)

        @shim.implementation("moe_sum", provider=name, **options)
        def moe_sum(y, topk_ids=None):
            if next(calls) == fails_at:
                raise ValueError("no luck\nat all")
            return reference(y, topk_ids)

    register("first", 1, explicit=True)
    register("later", 3, explicit=True)
    register("guarded", 0, explicit=True, supports=guard)
    register("never", 0, explicit=True)
    monkeypatch.setitem(bench_module.LAYER, "moe_sum", (torch.float32, [{"T": 3, "topk": 2, "N": 8}]))
    monkeypatch.setattr(bench_module, "REFERENCE_SECONDS", 0.0)
    monkeypatch.setattr(bench_module, "PROVIDER_SECONDS", 0.0)
    monkeypatch.setattr(bench_module, "overheads", lambda *_: iter(()))
    names = ["first", "later", "guarded", "never"]
    assert bench(["moe_sum"], providers=names) == 0
    (row,) = bench_module.speeds(["moe_sum"], "cpu", names[2:])
    assert [one["reason"] for one in row["providers"].values()] == ["KeyError: 'guard'", ""]
    assert row["providers"]["never"]["ms"] > 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("moe_sum"))
    assert line.endswith("ValueError: no luck; ValueError: no luck; KeyError: 'guard'")


def test_an_op_that_nobody_serves_or_whose_provider_raises_has_a_row_of_overhead_too(scratch, capsys):
    @shim.implementation("moe_sum", provider="broken", explicit=True)
    def moe_sum(y, topk_ids=None):
        raise ValueError("no luck")

    shim.implementation("moe_sum", provider="absent", explicit=True, available=lambda: "not installed")(moe_sum)
    absent = "absent: not installed; native: absent was chosen; reference: only for calls outside the op's domain"
    for name, words in (("absent", f"- - - - {absent}"), ("broken", "broken - - - ValueError: no luck")):
        with using(Policy("strict", {"moe_sum": name})):
            list(bench_module.printed_overheads(bench_module.overheads(["moe_sum"], "cpu")))
        assert capsys.readouterr().out.splitlines()[-1].split() == ["moe_sum", *words.split()]


def test_a_plot_has_a_mark_for_each_time_where_it_stands():
    given = [
        {"op": "a", "size": "small", "floor_us": 0.1, "providers": {"native": {"us": 2.0}, "vllm": {"us": None}}},
        {"op": "b", "size": "<large>", "floor_us": 10.0, "providers": {"native": {"us": 10.0}, "vllm": {"us": 5e4}}},
    ]
    marks = re.findall(r'<circle cx="([\d.]+)" .*<title>(.*)</title>', plot.over_floor(given, ["native", "vllm"]))
    left, right = plot.LEFT, plot.LEFT + plot.WIDTH
    assert [told for _, told in marks] == ["native: 2 us", "native: 10 us", "vllm: 5e+04 us"]
    assert left < float(marks[0][0]) < right  # twice 1 us
    assert [float(x) for x, _ in marks[1:]] == [left, right]
    assert "&lt;large&gt;" in plot.over_floor(given, ["native"])
    one = {"op": "a", "size": "small", "reference_ms": 4.0, "providers": {"native": {"ms": 0.4}}}
    assert f'cx="{left + plot.WIDTH / 2:.1f}"' in plot.over_reference([one], ["native"])


def test_both_sides_are_compared_round_by_round_end_to_end():
    shim = {"ready_s": 100.0, "compiled_late": 0, "tokens_per_s": [1.0, 9.0, 8.0], "tokens_per_s_of_one": [4.0]}
    stock = {"ready_s": 200.0, "compiled_late": 6, "tokens_per_s": [2.0, 6.0, 4.0], "tokens_per_s_of_one": [5.0]}
    shim["first_token_ms"], stock["first_token_ms"] = [9.0, 2.0], [4.0, 4.0]
    lines = end_to_end.table({"shim": shim, "stock": stock}).splitlines()[2:]
    assert [line.split(" | ")[1:] for line in lines] == [
        ["100.0", "200.0", "0.50 |"],
        ["0", "6", "0.00 |"],
        ["8 (9)", "4 (6)", "1.50 (0.50 to 2.00) |"],
        ["4", "5", "0.80 |"],
        ["5.5 (2.0)", "4.0 (4.0)", "1.38 (0.50 to 2.25) |"],
    ]


ENGINE = """
import json, os, sys
if os.environ.get("OPSHIM_POLICY", "stock") == sys.argv[1]:
    sys.exit("no such model")
print(json.dumps({"ready_s": 1.0, "process": os.getpid()}), flush=True)
for _ in sys.stdin:
    print("JIT compilation during inference", file=sys.stderr, flush=True)
    print(json.dumps({"tokens_per_s": 2.0, "tokens_per_s_of_one": 3.0, "first_token_ms": 4.0}), flush=True)
"""


def test_end_to_end_takes_turns_and_ends_both_sides(monkeypatch, tmp_path):
    monkeypatch.setattr(end_to_end, "ENGINE", [sys.executable, "-c", ENGINE])
    monkeypatch.setattr(end_to_end, "REST", 0.0)
    assert list(end_to_end.turns(3)) == ["shim", "stock", "stock", "shim", "shim", "stock"]
    found = end_to_end.compare(["none"], 2, 60.0, tmp_path, tmp_path)
    assert [one["tokens_per_s"] for one in found.values()] == [[2.0, 2.0]] * 2
    assert [one["compiled_late"] for one in found.values()] == [2, 2]
    assert not any(Path(f"/proc/{one['process']}").exists() for one in found.values())


@pytest.mark.parametrize(("there", "state"), [(("shim", "stock"), "filled"), (("shim",), "empty"), ((), "empty")])
def test_end_to_end_tells_whether_both_sides_had_their_caches(monkeypatch, tmp_path, there, state):
    for side in there:
        (tmp_path / side).mkdir()
    monkeypatch.setattr(end_to_end, "compare", lambda *given: {})
    monkeypatch.setattr(end_to_end, "table", lambda found: "")
    out = tmp_path / "found.json"
    done = CliRunner().invoke(end_to_end.main, ["--caches", str(tmp_path), "--json", str(out)])
    assert (done.exit_code, json.loads(out.read_text())["caches"]) == (0, state)


def test_end_to_end_shows_the_log_of_a_side_that_fails(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(end_to_end, "ENGINE", [sys.executable, "-c", ENGINE])
    with pytest.raises(click.ClickException, match="^stock ended with code 1; .*/stock.log:\nno such model"):
        end_to_end.compare(["stock"], 2, 60.0, tmp_path, tmp_path)
    shim = json.loads(capsys.readouterr().err.removeprefix("shim: "))
    assert not Path(f"/proc/{shim['process']}").exists()
