"""The pytest plugin of the suite: options, workers, and the report that all workers' results end in.

    pytest -n auto                                          everything, native on this CPU, level quick
    pytest -n auto conformance/test_cases.py --op moe_sum --provider mylib --provider-file mylib.py
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import signal
import tempfile
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import shim
from conformance import report as reports
from conformance import run, workers
from conformance.case import LEVELS
from conformance.report.text import text
from conformance.run import Result, Target, poisoned_memory, told
from conformance.search import replay
from conformance.selection import DEVICES, Selection
from shim import device as devices
from shim.errors import is_sticky
from shim.loading import user_cache

SELECTION = pytest.StashKey[Selection]()
RESULT = pytest.StashKey[dict]()  # of a test item: its result
COLLECTOR = pytest.StashKey["Collector"]()
REPORTS = pytest.StashKey[list]()
WORDS = pytest.StashKey[Path]()  # of the controller: the folder of its workers' last words
LAST_WORDS = pytest.StashKey[workers.LastWords]()  # of a worker: its own
LOST = pytest.StashKey[bool]()  # of a process: what happened in it may harm the cases after


def pytest_addoption(parser):
    group = parser.getgroup("opshim conformance")
    group.addoption("--op", action="append", default=[], help="test this op only (repeat, or separate by commas)")
    group.addoption("--provider", default="native", help="whose implementation to test (default: native)")
    group.addoption("--provider-file", action="append", default=[], help="a file that registers providers (repeatable)")
    group.addoption("--device", default="cpu", help=f"{', '.join(DEVICES)} (default: cpu)")
    group.addoption("--level", default="quick", help=f"{', '.join(LEVELS)} (default: quick)")
    group.addoption("--seed", type=int, default=0, help="base of every case's own seed (default: 0)")
    group.addoption("--report-dir", default=None, help="write a JSON report per op and provider into this folder")
    group.addoption("--replay-dir", default=None, help="keep failures here (default: replay in the report's folder)")
    group.addoption("--case-timeout", type=seconds, default=None, help="seconds for one case (default: by level)")
    group.addoption("--judge-on", default=None, help="run references and compare there (default: where the cases run)")
    parts = "2/5: every 5th selected test, from the 2nd (after -k); 2/5+7: without the first 7 of these"
    group.addoption("--part", type=part, default=(1, 1, 0), help=parts)


def seconds(words: str) -> float:
    """A time limit: of 0 there is none that could be set, and a negative one would fail every case."""
    try:
        number = float(words)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"'{words}' is no time limit: a number of seconds above 0")
    return number


def part(words: str) -> tuple[int, int, int]:
    """(which, of how many, without how many at its beginning)"""
    found = re.fullmatch(r"([0-9]+)/([0-9]+)(?:\+([0-9]+))?", words)
    which, count, done = (int(one or 0) for one in found.groups()) if found else (0, 0, 0)
    if not 1 <= which <= count:
        raise argparse.ArgumentTypeError(f"'{words}' is no part: the second of five is 2/5")
    return which, count, done


def pytest_configure(config):
    option = config.option
    given = getattr(config, "workerinput", {})
    if "opshim_gpu" in given:  # before anything asks CUDA
        os.environ["CUDA_VISIBLE_DEVICES"] = given["opshim_gpu"]
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
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    # no more than torch would take by itself, which OMP_NUM_THREADS bounds
    torch.set_num_threads(min(torch.get_num_threads(), workers.threads(workers.cores(), count)))
    folder = option.replay_dir or Path(option.report_dir or user_cache()) / "replay"
    files = [str(Path(file).resolve()) for file in option.provider_file]
    replay.run = replay.Run(Path(folder).absolute(), option.seed, files)
    if option.judge_on not in (None, *devices.DEVICES):
        raise pytest.UsageError(f"--judge-on {option.judge_on}: there are {', '.join(devices.DEVICES)}")
    run.judge_device = option.judge_on
    config.stash[LOST] = False
    if getattr(option, "maxworkerrestart", "") is None:
        option.maxworkerrestart = "1000"  # a provider may well kill its process in many cases: see MOST_LOST


# ---- workers: how many, on which GPU, and what becomes of those that die ---------------------------------------------


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    on_gpus = config.option.device != "cpu"  # the selection is made later
    return workers.count(workers.cores(), workers.free_memory() if on_gpus else [])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Tells a worker where to leave its last words, and on a machine with GPUs which one is its own."""
    config = node.config
    if WORDS not in config.stash:
        config.stash[WORDS] = Path(tempfile.mkdtemp(prefix="opshim-workers-"))
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the folder goes, the workers end
    node.workerinput["opshim_words"] = str(config.stash[WORDS])
    if "cuda" in config.stash[SELECTION].devices:
        node.workerinput["opshim_gpu"] = workers.gpu_of(node.gateway.id, workers.visible_gpus())


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session):
    """Once it has ended, by a signal or not, none may come between the results and their report."""
    try:
        return (yield)
    finally:
        if WORDS in session.config.stash:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)


def pytest_sessionstart(session):
    given = getattr(session.config, "workerinput", None)
    if given:
        words = workers.LastWords(Path(given["opshim_words"]), given["workerid"])
        session.config.stash[LAST_WORDS] = words
        with poisoned_memory():
            pass  # torch imports a lot at the first use, which would count as the first case's time


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item):
    """A case ends at its time limit: by an exception, or with its process."""
    if not _parameters(item):
        yield
        return
    words, process = item.config.stash.get(LAST_WORDS, None), os.getpid()
    if words:
        words.clear()
    level = item.config.stash[SELECTION].level
    with workers.time_limit(item.config.option.case_timeout or workers.SECONDS[level], file=words and words.file):
        outcome = yield
    if os.getpid() != process:  # the provider has forked: one process goes on
        os._exit(0)
    if words and outcome.excinfo and issubclass(outcome.excinfo[0], KeyboardInterrupt):  # the user's own ends the controller
        outcome.force_exception(RuntimeError("KeyboardInterrupt"))


def pytest_runtest_setup(item):
    """Of an op whose cases keep losing processes, the others are failures too, but are not run."""
    words, parameters = item.config.stash.get(LAST_WORDS, None), _parameters(item)
    if words and parameters and workers.has_lost_too_many(words.folder, parameters["case"].op):
        selection, message = item.config.stash[SELECTION], "cases before it have lost too many processes, or much time"
        result = Result.of(parameters["case"], selection.provider, parameters["device"], selection.seed)
        result.failed("not_run", message)
        item.stash[RESULT] = asdict(result)
        pytest.fail(str(result), pytrace=False)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    """A process whose device is lost, or that was interrupted anywhere, runs nothing more: xdist replaces it."""
    yield
    if item.config.stash[LOST]:
        if hasattr(item.config, "workerinput"):
            os._exit(1)  # its reports are with the controller
        item.session.shouldfail = "this process is lost; with -n auto another would run the rest"


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem, report):
    """The result of a case whose worker died; one that ended its process after reporting has its result already."""
    config = report.node.config
    known = [one for one in config.stash[COLLECTOR].reports if one.nodeid == crashitem]
    if known:
        report.when, report.outcome = "teardown", "passed"
        return
    selection, fate = config.stash[SELECTION], workers.fate(config.stash[WORDS], report.node.gateway.id)
    report.longrepr = f"{report.longrepr}: {fate[1]}"
    for device, case in selection.cases():
        if crashitem.endswith(f"::test_case[{device}-{case.id}]"):
            workers.lose(config.stash[WORDS], case.op, fate[0])
            result = Result.of(case, selection.provider, device, selection.seed).failed(*fate)
            report.conformance = asdict(_kept(result, case))
            report.longrepr = str(result)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from conformance.scheduling import Scheduling  # needs xdist

    return Scheduling(config, log)


# ---- cases and their results -----------------------------------------------------------------------------------------


def pytest_generate_tests(metafunc):
    if {"device", "case"} <= set(metafunc.fixturenames):
        cases = metafunc.config.stash[SELECTION].cases()
        metafunc.parametrize(("device", "case"), cases, ids=[f"{device}-{case.id}" for device, case in cases])


@pytest.hookimpl(trylast=True)  # when -k has chosen
def pytest_collection_modifyitems(config, items):
    """Cases of the higher levels first: they take longest, and the end of a run should not wait for one."""
    items.sort(key=lambda item: -LEVELS.index(_parameters(item)["case"].level) if _parameters(item) else 0)
    which, count, done = config.option.part
    mine = items[which - 1 :: count][done:]
    if len(mine) < len(items):
        chosen = set(mine)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = mine


@pytest.fixture
def selection(request) -> Selection:
    """What this run covers."""
    return request.config.stash[SELECTION]


@pytest.fixture
def record(request):
    """record(result): puts a conformance result into the run's report, and passes, fails or skips the test by it."""

    def take(result):
        item = request.node
        if result.reason == "raised" and is_sticky(Exception(result.message)):
            result.reason = "poisoned_device"
            _lost(item, result.op, result.reason)
        if result.status == "fail":
            _kept(result, _parameters(item)["case"])
        item.stash[RESULT] = asdict(result)
        if result.status == "skip":
            pytest.skip(f"{result.reason}: {result.message}")
        if result.status == "fail":
            pytest.fail(str(result), pytrace=False)

    return take


def _parameters(item) -> dict:
    """Device and case of a test that has them."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    return parameters if {"device", "case"} <= parameters.keys() else {}


def _kept(result: Result, case) -> Result:
    """The failure, with a file to replay it from; a search leaves its own, even when it does not live to report. Where
    no file can be written the failure counts all the same."""
    target = Target(shim.get(case.op), result.provider, result.device)
    own = replay.place(case, target)
    if not result.replay and case.kind == "search" and own.exists():
        result.replay = str(own)
    try:
        result.replay = result.replay or replay.keep(case, target, result=result)
    except OSError as error:
        result.message += f" (no replay file: {error})"
    return result


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    parameters, error = _parameters(item), call.excinfo and call.excinfo.value
    if error and parameters and RESULT not in item.stash:  # also where the provider raised pytest's own skip or xfail
        result = _broken_off(item, error, **parameters)
        item.stash[RESULT] = asdict(result)
        outcome.get_result().outcome, outcome.get_result().longrepr = "failed", str(result)
    if call.when == "call" and RESULT in item.stash:
        item.stash[RESULT]["seconds"] = round(call.duration, 3)
    outcome.get_result().conformance = item.stash.get(RESULT, None)


def _broken_off(item, error: BaseException, device: str, case) -> Result:
    """The result of a case that ended without: at its time limit, with its device, or by an error of its own."""
    selection = item.config.stash[SELECTION]
    reason = "timeout" if isinstance(error, workers.TimeLimit) else "broken_case"
    reason = "poisoned_device" if is_sticky(error) else reason
    if reason != "broken_case":
        _lost(item, case.op, reason)
    result = Result.of(case, selection.provider, device, selection.seed)
    return _kept(result.failed(reason, told(error)), case)


def _lost(item, op: str, reason: str) -> None:
    item.config.stash[LOST] = True
    if LAST_WORDS in item.config.stash:
        workers.lose(item.config.stash[LAST_WORDS].folder, op, reason)


class Collector:
    """Keeps the reports of all tests; on the controller those of every worker come by."""

    def __init__(self):
        self.reports = []

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.failed:
            self.reports.append(report)


def _results(config) -> list[dict]:
    """The results that travelled with the tests' reports, one per test."""
    collected = config.stash[COLLECTOR].reports
    return list({r.nodeid: r.conformance for r in collected if getattr(r, "conformance", None)}.values())


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    config = session.config
    if hasattr(config, "workerinput"):
        return
    if WORDS in config.stash:
        shutil.rmtree(config.stash[WORDS], ignore_errors=True)
    selection, results = config.stash[SELECTION], _results(config)
    config.stash[REPORTS] = reports.build(results, selection.level, selection.seed) if results else []
    if results and all(one["summary"]["verdict"] == "nothing ran" for one in config.stash[REPORTS]):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED  # nothing was proven
    if results and config.option.report_dir:
        reports.write(Path(config.option.report_dir), config.stash[REPORTS])


def pytest_terminal_summary(terminalreporter, config):
    if config.stash.get(REPORTS, None):
        terminalreporter.section("conformance")
        terminalreporter.write_line(text(config.stash[REPORTS]))
