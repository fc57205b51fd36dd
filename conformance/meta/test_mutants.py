"""Every planted fault is convicted by a quick case that is named after it."""

import pytest

import shim
from conformance.conform import conform
from conformance.mutants import WRONG, all_mutants
from conformance.mutants.trial import cases_of, convictions, named

MUTANTS = all_mutants()
QUICK = [mutant for mutant in MUTANTS if mutant.level == "quick"]


@pytest.mark.parametrize("mutant", QUICK, ids=[mutant.id for mutant in QUICK])
def test_convicted_by_a_case_named_after_the_fault(mutant):
    if next(convictions(mutant, named(mutant)), None):
        return
    other = next(convictions(mutant, [c for c in cases_of(mutant.op) if c.kind not in mutant.kinds]), None)
    by = f"only {other.case} convicts it ({other.reason}: {other.message})" if other else "no case convicts it"
    pytest.fail(f"{mutant.id}: {mutant.fault} Expected a case of kind {' or '.join(mutant.kinds)}; {by}", pytrace=False)


@pytest.mark.parametrize("op", shim.names())
def test_at_least_four_per_op(op):
    assert len([mutant for mutant in MUTANTS if mutant.op == op]) >= 4


def test_a_mutant_fails_conform_as_any_provider_file_does(capfd):
    file = next(path for path in WRONG if path.stem == "moe_sum")
    assert conform(ops=("moe_sum",), provider="negative_ids_are_summed", provider_files=(str(file),)) == 1
    assert "negative" in capfd.readouterr().out
