"""Every planted fault is convicted by a case that is named after it, of level quick wherever one can be."""

import pytest

import shim
from conformance.mutants import WRONG, all_mutants
from conformance.mutants.trial import cases_of, convictions, named
from conformance.run import Target, run
from conformance.selection import Selection
from shim.plugins import forget

MUTANTS = all_mutants()
QUICK = [mutant for mutant in MUTANTS if mutant.level == "quick"]
OTHERS = [mutant for mutant in MUTANTS if mutant.level != "quick"]


@pytest.mark.parametrize("mutant", QUICK, ids=[mutant.id for mutant in QUICK])
def test_convicted_by_a_case_named_after_the_fault(mutant):
    if next(convictions(mutant, named(mutant)), None):
        return
    other = next(convictions(mutant, [c for c in cases_of(mutant.op) if c.kind not in mutant.kinds]), None)
    by = f"only {other.case} convicts it ({other.reason}: {other.message})" if other else "no case convicts it"
    pytest.fail(f"{mutant.id}: {mutant.fault} Expected a case of kind {' or '.join(mutant.kinds)}; {by}", pytrace=False)


@pytest.mark.parametrize("mutant", OTHERS, ids=[mutant.id for mutant in OTHERS])
def test_convicted_at_its_level(mutant, selection):
    """Rows far apart take no memory on a CPU; cases that fill it are tried at that level only:
    pytest conformance/meta/test_mutants.py --level exhaustive"""
    lean, large = ([case for case in named(mutant) if ("far" in case.sizes) is lean] for lean in (True, False))
    if next(convictions(mutant, lean), None):
        return
    if large and selection.level != mutant.level:
        pytest.skip(f"shows in a tensor of more than 2^31 elements only: --level {mutant.level}")
    results = [run(case, mutant.target) for case in large]
    if any(result.status == "fail" for result in results):
        return
    if any(result.reason == "no_memory" for result in results):
        pytest.skip(results[0].message)
    pytest.fail(f"{mutant.id}: {mutant.fault} No case convicts it.", pytrace=False)


@pytest.mark.parametrize("op", shim.names())
def test_at_least_four_per_op(op):
    assert len([mutant for mutant in QUICK if mutant.op == op]) >= 4


def test_a_mutant_is_a_provider_as_conform_takes_it(scratch):
    file = next(path for path in WRONG if path.stem == "moe_sum")
    name = "negative_ids_are_summed"
    try:
        selection = Selection.make(provider=name, provider_files=[file])
        case = next(case for _, case in selection.cases() if case.kind == "negative_ids")
        result = run(case, Target.find("moe_sum", name, "cpu"))
    finally:
        forget(file)
    assert (selection.ops, result.provider, result.status) == (("moe_sum",), name, "fail")
