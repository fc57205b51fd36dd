"""The pytest plugin of the suite: options, workers, and the report that all workers' results end in.

    pytest -n auto                                          everything, native on this CPU, level quick
    pytest -n auto conformance/test_cases.py --op moe_sum --provider mylib --provider-file mylib.py
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import shim
from conformance import report as reports
from conformance.case import LEVELS
from conformance.report.text import text
from conformance.run import Result
from conformance.selection import DEVICES, Selection

SELECTION = pytest.StashKey[Selection]()
RESULT = pytest.StashKey[dict]()  # of a test item: its result
COLLECTOR = pytest.StashKey["Collector"]()
REPORTS = pytest.StashKey[list]()


def pytest_addoption(parser):
    group = parser.getgroup("opshim conformance")
    group.addoption("--op", action="append", default=[], help="test this op only (repeat, or separate by commas)")
    group.addoption("--provider", default="native", help="whose implementation to test (default: native)")
    group.addoption("--provider-file", action="append", default=[], help="a file that registers providers (repeatable)")
    group.addoption("--device", default="cpu", help=f"{', '.join(DEVICES)} (default: cpu)")
    group.addoption("--level", default="quick", help=f"{', '.join(LEVELS)} (default: quick)")
    group.addoption("--seed", type=int, default=0, help="base of every case's own seed (default: 0)")
    group.addoption("--report-dir", default=None, help="write a JSON report per op and provider into this folder")


def pytest_configure(config):
    option = config.option
    try:
        config.stash[SELECTION] = Selection.make(
            ops=[name for names in option.op for name in names.split(",") if name],
            provider=option.provider,
            provider_files=option.provider_file,
            device=option.device,
            level=option.level,
            seed=option.seed,
        )
    except shim.OpshimError as error:
        raise pytest.UsageError(str(error)) from error
    config.stash[COLLECTOR] = Collector()
    config.pluginmanager.register(config.stash[COLLECTOR])
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, _cores() // workers))


def pytest_xdist_auto_num_workers(config):
    return _cores()


def pytest_xdist_make_scheduler(config, log):
    """Tests go to whoever is free, but those of one file of conformance/serving stay together: they share engines.
    (xdist's own loadgroup does that by marks, but has no effect under this pytest.)"""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0]
            return file if file.startswith("conformance/serving/") else nodeid

    return Scheduling(config, log)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def pytest_generate_tests(metafunc):
    if {"device", "case"} <= set(metafunc.fixturenames):
        cases = metafunc.config.stash[SELECTION].cases()
        metafunc.parametrize(("device", "case"), cases, ids=[f"{device}-{case.id}" for device, case in cases])


@pytest.fixture
def selection(request) -> Selection:
    """What this run covers."""
    return request.config.stash[SELECTION]


@pytest.fixture
def record(request):
    """record(result): puts a conformance result into the run's report, and passes, fails or skips the test by it."""

    def take(result):
        request.node.stash[RESULT] = asdict(result)
        if result.status == "skip":
            pytest.skip(f"{result.reason}: {result.message}")
        if result.status == "fail":
            inputs = "".join(f"\n  {name}: {value}" for name, value in result.arguments.items())
            pytest.fail(f"{result.case} on {result.provider}: {result.reason}: {result.message}{inputs}", pytrace=False)

    return take


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().conformance = item.stash.get(RESULT, None)


class Collector:
    """Keeps the reports of all tests; on the controller those of every worker come by."""

    def __init__(self):
        self.reports = []

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.failed:
            self.reports.append(report)


def _results(config) -> list[dict]:
    """The results that travelled with the tests' reports, and one made up for each case that ended without."""
    collected = config.stash[COLLECTOR].reports
    results = {r.nodeid: r.conformance for r in collected if getattr(r, "conformance", None)}
    lost = [report for report in collected if report.failed and report.nodeid not in results]
    lost = {report.nodeid.partition("[")[2]: report for report in lost if "test_cases.py::test_case[" in report.nodeid}
    selection = config.stash[SELECTION]
    for device, case in selection.cases() if lost else ():
        report = lost.get(f"{device}-{case.id}]")
        if report:
            result = Result.of(case, selection.provider, device, selection.seed)
            results[report.nodeid] = asdict(result.failed(*_fate(report)))
    return list(results.values())


def _fate(report) -> tuple[str, str]:
    words = str(report.longrepr).strip().splitlines() or ["no message"]
    crashed = report.when == "???"  # xdist's mark on a test whose worker died
    return ("crashed", words[-1]) if crashed else ("broken_case", words[-1])


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    config = session.config
    if hasattr(config, "workerinput"):
        return
    selection, results = config.stash[SELECTION], _results(config)
    config.stash[REPORTS] = reports.build(results, selection.level, selection.seed) if results else []
    if results and all(result["status"] == "skip" for result in results):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED  # nothing was proven
    if results and config.option.report_dir:
        reports.write(Path(config.option.report_dir), config.stash[REPORTS])


def pytest_terminal_summary(terminalreporter, config):
    if config.stash.get(REPORTS, None):
        terminalreporter.section("conformance")
        terminalreporter.write_line(text(config.stash[REPORTS]))
