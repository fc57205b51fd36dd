"""Every selected case on the selected provider, one test each."""

from conformance.run import run
from conformance.selection import target_of


def test_case(device, case, selection, record):
    record(run(case, target_of(case.op, selection.provider, device), selection.seed))
