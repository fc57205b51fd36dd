"""Certificates: a full pass is a proof for one build on one device, and the chain knows it from everything less."""

import itertools
import json
from dataclasses import asdict

import pytest
import torch

from conformance import certificates as writing
from conformance import report
from conformance.case import Case
from conformance.meta.scratch import double_native, double_op, provider, tiny_library
from conformance.run import Result, Target
from shim import certificates, device, plugins, table
from shim.candidates import bind
from shim.dispatch import Chain
from shim.policy import Policy

FILE = """
import shim, torch

@shim.implementation("{op}", provider="p")
def double(x, times=1):
    return x * 2 ** times
"""
CERTIFIED = Policy("auto", require_certified=True)
numbers = itertools.count()


@pytest.fixture
def op(scratch):
    return double_op(f"certified_double_{next(numbers)}")


def result(op, name, size, failed=False):
    one = Result.of(Case(op.name, "sizes", {"T": size}, torch.float32), name, "cpu", 0)
    one.build = Target.find(op.name, name, "cpu").build
    return asdict(one.failed("unequal", "wrong") if failed else one)


def of(op, name="p", failed=(False, False), level="quick", listed=2):
    """A report of one case per entry of `failed`, out of `listed`."""
    (one,) = report.build([result(op, name, size, wrong) for size, wrong in enumerate(failed)], level, 0)
    one["coverage"] = {"listed": listed, "run": len(failed)}
    return one


def words(op, policy=None):
    return Chain(op, "cpu", policy).candidates[0].told


# ---- what is written ------------------------------------------------------------------------------------------------


def test_a_full_pass_is_a_certificate_with_build_device_level_and_the_reports_hash(op, tmp_path):
    provider(op, "p")
    one = of(op)
    writing.issue([one], tmp_path)
    fingerprint = device.describe("cpu").fingerprint
    written = json.loads((tmp_path / fingerprint / f"{op.name}.p.{one['build']['identity']}.json").read_text())
    assert written["verdict"] == "pass"
    assert written["build"] == one["build"] and written["build"]["file"] == "scratch.py"
    assert (written["level"], written["suite"], written["seed"]) == ("quick", one["environment"]["suite"], 0)
    assert written["device"]["fingerprint"] == fingerprint
    assert written["report"] == report.digest(one)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"listed": 3}, "only 2 of 3 cases"),
        ({"listed": 0}, "only 2 of 0 cases"),
        ({"level": "standard", "listed": 9}, "of 9"),
    ],
)
def test_a_partial_run_certifies_nothing(op, tmp_path, change, why):
    provider(op, "p")
    (line,) = writing.issue([of(op, **change)], tmp_path)
    assert why in line
    assert not list(tmp_path.rglob("*.json"))


def test_neither_a_run_without_a_pass_nor_code_without_identity_is_certified(op, tmp_path):
    provider(op, "p")
    one, other = of(op), of(op)
    one["summary"] |= {"passed": 0, "skipped": 2, "verdict": "nothing ran"}
    other["build"] = {}
    assert "nothing ran" in writing.issue([one], tmp_path)[0]
    assert "cannot be identified" in writing.issue([other], tmp_path)[0]


def test_a_case_that_broke_by_itself_proves_nothing_of_the_provider(op, tmp_path):
    provider(op, "p")
    one = of(op, failed=[True, False])
    (case,) = (case for case in one["cases"] if case["status"] == "fail")
    case["reason"] = "broken_case"
    (line,) = writing.issue([one], tmp_path)
    assert "p: no certificate, as 1 cases broke: a fault of the suite or of this machine" in line
    assert not list(tmp_path.rglob("*.json"))


def test_a_failure_withdraws_the_certificate_until_a_pass_as_thorough(op):
    provider(op, "p")
    writing.issue([of(op)])
    writing.issue([of(op, failed=[True, False], level="standard", listed=9)])
    assert "not certified: 1 of 2 cases failed" in words(op) and "(standard)" in words(op)
    assert Chain(op, "cpu").candidates[0].certificate.failed
    assert "stays" in writing.issue([of(op)])[0]
    assert "not certified" in words(op)
    writing.issue([of(op, level="exhaustive")])
    assert "(exhaustive)" in words(op) and words(op).startswith("certified")
    assert "stays" in writing.issue([of(op)])[0]


def test_the_reference_needs_no_certificate(op, tmp_path):
    assert writing.issue([of(op, "reference")], tmp_path) == []


# ---- what the chain says --------------------------------------------------------------------------------------------


def test_the_chain_says_certified_when_and_at_which_level(op):
    provider(op, "p")
    assert words(op) == "not certified"
    one = of(op)
    writing.issue([one])
    assert words(op) == f"certified {one['date'][:10]} (quick)"
    assert f"certified {one['date'][:10]}" in table.text([Chain(op, "cpu")])
    assert table.as_dict([Chain(op, "cpu")])["ops"][0]["candidates"][0]["certified"] is True


def test_an_edited_provider_file_is_another_build(op, scratch):
    file = scratch / "p.py"
    file.write_text(FILE.format(op=op.name))
    plugins.load_file(file)
    writing.issue([of(op)])
    assert words(op).startswith("certified")
    file.write_text(FILE.format(op=op.name) + "# faster\n")
    assert words(op) == "certificate is for another build"
    plugins.forget(file)


def test_each_build_of_a_provider_keeps_its_own_certificate(op, scratch):
    file = scratch / "p.py"
    for text, failed, said in (("", [False, False], "certified"), ("# wrong\n", [True, False], "not certified: 1 of 2")):
        file.write_text(FILE.format(op=op.name) + text)
        plugins.load_file(file)
        writing.issue([of(op, failed=failed)])
        assert words(op).startswith(said)
        plugins.forget(file)
        op.implementations.clear()
    file.write_text(FILE.format(op=op.name))
    plugins.load_file(file)
    assert words(op).startswith("certified")
    file.write_text(FILE.format(op=op.name) + "# a third\n")
    assert words(op) == "certificate is for another build"
    plugins.forget(file)


def test_a_provider_whose_name_goes_on_has_other_certificates(op):
    provider(op, "p.q")
    writing.issue([of(op, "p.q")])
    provider(op, "p")
    assert Chain(op, "cpu").candidates[1].told == "not certified"


def test_build_of_a_module_counts_as_its_code(op):
    def function(x, times=1):
        return x

    before = certificates.python_build(function)
    function.__globals__["BUILD"] = "library 1.0"
    try:
        after = certificates.python_build(function)
    finally:
        del function.__globals__["BUILD"]
    assert after["version"] == "library 1.0" and after["identity"] != before["identity"]


def test_a_certificate_of_another_device_is_no_proof_here(op):
    provider(op, "p")
    writing.issue([of(op)])
    folder = certificates.folders()[0]
    (folder / device.describe("cpu").fingerprint).rename(folder / "cpu-other-00000000")
    assert words(op) == "certificate is for another device (cpu-other-00000000)"


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "7", '"x"', '{"schema": 1}', '{"schema": 99}', '{"schema": 1, "build": 3}', "\xff\x00"]
    + [10**5 * "[", {"cases": {}}, {"cases": {"passed": 2}}, {"cases": {"failed": "one"}}, {"cases": 3}],
    ids=lambda text: str(text)[:30],
)
def test_an_unreadable_certificate_is_told_and_stops_nothing(op, text):
    """Also one that is cut short, or a record of a failure (a dict: what is wrong in it)."""
    provider(op, "p")
    writing.issue([of(op, failed=[True, False])])
    (path,) = certificates.folders()[0].rglob(f"{op.name}.p.*.json")
    text = json.dumps(json.loads(path.read_text()) | text) if isinstance(text, dict) else text
    path.write_text(text, encoding="latin-1")
    assert words(op).startswith("unreadable certificate: ")
    assert Chain(op, "cpu").selected.label == "p"
    writing.issue([of(op)])
    assert words(op).startswith("certified")


def test_a_folder_of_ones_own_comes_before_the_cache(op, scratch, monkeypatch):
    provider(op, "p")
    monkeypatch.setenv("OPSHIM_CERTIFICATES", str(scratch / "proofs"))
    writing.issue([of(op)])
    assert list((scratch / "proofs").rglob("*.json"))
    assert f"{scratch / 'proofs'}" in table.text([Chain(op, "cpu")])


# ---- require certified ----------------------------------------------------------------------------------------------


def test_without_certificate_a_candidate_is_unavailable_where_one_is_required(op):
    provider(op, "p")
    chain = Chain(op, "cpu", CERTIFIED)
    assert (chain.candidates[0].state, chain.candidates[0].reason) == ("unavailable", "not certified")
    assert chain.selected.label == "reference"
    assert Chain(op, "cpu", Policy("strict", require_certified=True)).selected is None
    writing.issue([of(op)])
    assert Chain(op, "cpu", CERTIFIED).selected.label == "p"


def test_native_code_is_not_compiled_in_vain_and_serves_once_certified(op, scratch):
    library = tiny_library(scratch)
    double_native(op, library)
    chain = Chain(op, "cpu", CERTIFIED)
    assert [one.reason for one in chain.candidates[:2]] == ["no libtiny.so on the search path", "not certified"]
    assert not library.cache().exists()
    assert bind(op, "cpu", "native").label == "native:jit"
    writing.issue([of(op, "native")])
    library.reset()
    assert Chain(op, "cpu", CERTIFIED).selected.told.endswith("(quick)")


def test_the_requirement_reaches_child_processes_through_the_environment():
    assert Policy.parse(environ=CERTIFIED.environment()) == CERTIFIED
    assert not Policy.parse(environ={"OPSHIM_REQUIRE_CERTIFIED": "0"}).require_certified
    assert Policy.parse(environ={}, require_certified=True).require_certified
