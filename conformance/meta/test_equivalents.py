"""Implementations that are right by another route than the reference's pass every quick case of their op."""

import pytest
import torch

import shim
from conformance.mutants import equivalents, power
from conformance.mutants.trial import cases_of
from conformance.run import run

PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("op", shim.names())
def test_acquitted(op, part):
    """In parts, so that workers share an op with many cases."""
    results = [run(case, equivalents()[op]) for case in cases_of(op)[part::PARTS]]
    failed = [f"{result.case}: {result.reason}: {result.message}" for result in results if result.status == "fail"]
    assert not failed
    assert any(result.status == "pass" for result in results)


def test_every_op_has_one():
    assert equivalents().keys() == set(shim.names())


def test_the_sum_on_which_the_budget_is_measured_is_no_copy():
    case = power.case_for("moe_sum", torch.float32)
    assert case.arguments("cpu", 0)["y"].shape[1] > 1
    assert case.id in power.RESULT.read_text()


def test_searches_of_right_implementations_are_counted():
    row = power.searched("moe_sum", 2)
    assert (row["native"], row["another route"]) == ("0", "0") and 0 < float(row["worst"]) <= 1
