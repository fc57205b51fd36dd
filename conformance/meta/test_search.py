"""The search finds what no table lists, makes it small, and says how to run it again."""

import sys

import pytest
import torch

import shim
from conformance.run import Target, run
from conformance.search import hunt, replay
from conformance.search.hunt import search
from conformance.search.plans import PLANS
from conformance.search.problem import LAYOUTS, VALUES, Problem
from conformance.workers import TimeLimit

SUM = shim.get("moe_sum").reference


@pytest.fixture(autouse=True)
def notes(tmp_path, monkeypatch):
    """The folder in which this test's failures are kept; shrinking takes the time it needs."""
    monkeypatch.setattr(replay, "run", replay.Run(tmp_path))
    monkeypatch.setattr(hunt, "SHRINKING", 1e9)
    return tmp_path


def hunted(function, examples=60, op="moe_sum", **more):
    return run(search(op, examples), Target(shim.get(op), "mine", "cpu", function, **more))


def smallest(result):
    """The problem that a failed search ended with."""
    assert result.status == "fail"
    return Problem(**replay.read(replay.Path(result.replay))["problem"])


def off_by_one(out, wrong):
    return out + 1 if wrong else out


def test_a_fault_beyond_some_size_ends_at_that_size():
    result = hunted(lambda y, topk_ids: off_by_one(SUM(y, topk_ids), y.shape[2] > 40 and y.dtype != torch.float32))
    assert result.reason in ("error_budget", "row_error_budget")
    sizes = {"T": 1, "topk": 1, "N": 41, "with_ids": False}
    assert smallest(result) == Problem("moe_sum", sizes, "f16")
    assert "[1, 1, 41]" in result.arguments["y"]


def test_a_fault_of_certain_values_ends_with_only_those():
    result = hunted(lambda y, topk_ids: SUM(y, topk_ids).nan_to_num())
    problem = smallest(result)
    assert result.reason == "non_finite"
    assert problem.values in ({"y": "one_nan"}, {"y": "one_inf"}, {"y": "minus_inf"})
    assert (problem.layouts, problem.sizes["N"]) == ({}, 1)


def test_a_fault_that_certain_contents_show_is_made_smaller_with_others():
    def without_expert_0(y, topk_ids):
        return SUM(y if topk_ids is None else y.masked_fill(topk_ids[..., None] == 0, 0), topk_ids)

    problem = smallest(hunted(without_expert_0))
    assert problem.sizes == {"T": 1, "topk": 1, "N": 1, "with_ids": True}


def test_a_fault_of_a_layout_ends_with_only_that():
    def packed(y, topk_ids):
        return SUM(y.as_strided(y.shape, torch.empty(y.shape, device="meta").stride()), topk_ids)

    problem = smallest(hunted(packed))
    assert problem.layouts in ({"y": "rows_apart"}, {"y": "elements_apart"}, {"y": "transposed"})
    assert problem.values == {}


def test_the_same_seed_searches_the_same_problems():
    def problems():
        tried = []
        hunted(lambda y, topk_ids: tried.append((*y.shape, y.dtype)) or SUM(y, topk_ids), examples=20)
        return tried

    assert problems() == problems()


def test_the_printed_call_runs_the_failure_again(scratch, capsys):
    @shim.implementation("moe_sum", provider="mine", device="cpu")
    def moe_sum(y, topk_ids=None):
        return off_by_one(SUM(y, topk_ids), len(y) > 2)

    message = hunted(moe_sum).message
    exec(message[message.index("from conformance") :], {})  # noqa: S102 - it is Python for people to run
    printed = capsys.readouterr().out
    assert printed.startswith("FAIL  moe_sum-search-T3_topk1_N1_with_idsFalse-f32 on mine (cpu)")
    assert "float32 [3, 1, 1]" in printed


def test_a_search_that_passes_leaves_no_file_and_says_how_close_it_came(notes):
    result = hunted(SUM, examples=10)
    assert (result.status, result.message) == ("pass", "")
    assert 0 < result.ratio < 1
    assert "Problem(" in result.findings[0]["text"]
    assert not list(notes.iterdir())


def test_a_call_that_never_returns_has_left_its_problem():
    def hangs(y, topk_ids):
        raise TimeLimit

    case, target = search("moe_sum", 10), Target(shim.get("moe_sum"), "mine", "cpu", hangs)
    with pytest.raises(TimeLimit):
        run(case, target)
    assert replay.read(replay.place(case, target))["problem"]["op"] == "moe_sum"


@pytest.mark.parametrize(("fault", "verdict"), [(0, ("pass", "")), (1, ("fail", "row_error_budget"))])
def test_on_a_full_disk_a_search_ends_as_it_would_and_leaves_no_file(fault, verdict):
    def function(**given):
        assert not place.is_symlink(), "a file that was cut short is left"
        place.symlink_to("/dev/full")  # the next one is written there
        return SUM(**given) + fault

    case, target = search("moe_sum", 10), Target(shim.get("moe_sum"), "mine", "cpu", function)
    place = replay.place(case, target)
    place.symlink_to("/dev/full")
    result = run(case, target)
    assert (result.status, result.reason, result.replay) == (*verdict, ""), result.message


def test_a_provider_that_refuses_every_problem_is_skipped_in_its_words():
    result = hunted(SUM, supports=lambda y, topk_ids=None: "not today")
    assert (result.status, result.reason, result.message) == ("skip", "refused", "not today")


def test_without_hypothesis_a_search_is_skipped(monkeypatch):
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    result = hunted(SUM)
    assert (result.status, result.reason) == ("skip", "not_installed")
    assert "opshim[test]" in result.message


def test_every_op_has_a_plan_and_a_plan_names_only_what_there_is():
    assert PLANS.keys() == set(shim.names())
    for op, plan in PLANS.items():
        arguments = shim.get(op).signature.parameters.keys()
        assert {argument for argument, _ in [*plan.value_pairs, *plan.layout_pairs]} <= arguments
        assert {value for _, value in plan.value_pairs} <= VALUES.keys()
        assert {layout for _, layout in plan.layout_pairs} <= LAYOUTS.keys()


@pytest.mark.parametrize("op", PLANS)
def test_the_reference_passes_the_search(op):
    result = hunted(shim.get(op).reference, examples=4, op=op)
    assert (result.status, result.message) == ("pass", "")
