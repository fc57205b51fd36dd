"""Counters survive SIGKILL and forks; the breaker opens after failures in a row and lets a try through later."""

import os
import signal
import time

import pytest
import torch

import shim
from conformance.meta.scratch import Clock, double_op, provider
from shim import health
from shim.health import CALLS, FAILURES, OPEN_UNTIL, Breaker, Counters, Row, counters


def in_child(work, then_kill=False):
    """Runs work() in a forked child, which ends at once, or by SIGKILL."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            if then_kill:
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert status == (signal.SIGKILL if then_kill else 0)


def test_counts_per_op_and_candidate(scratch):
    mine = Counters()
    mine.values[mine.slot("a", "native:jit") + CALLS] += 2
    mine.values[mine.slot("a", "native:jit") + FAILURES] += 1
    mine.slot("a", "reference")  # never counted: no row
    mine.values[mine.slot("b", "reference") + CALLS] += 1
    assert mine.rows() == [Row("a", "native:jit", 2, 1, 0, 0), Row("b", "reference", 1, 0, 0, 0)]


def test_calls_through_an_op_are_counted_in_the_run_folder(scratch, monkeypatch):
    monkeypatch.setenv("OPSHIM_RUN_DIR", str(scratch / "run"))
    op = double_op("counted")
    provider(op, "p")
    for _ in range(3):
        op(torch.ones(1))
    assert Row("counted", "p", 3, 0, 0, 0) in health.summary(scratch / "run")


def test_counts_so_far_move_into_the_run_folder(scratch):
    mine = Counters()
    mine.values[mine.slot("a", "p")] += 4
    mine.open(scratch / "run")
    mine.values[mine.slot("a", "p")] += 1
    assert health.summary(scratch / "run") == [Row("a", "p", 5, 0, 0, 0)]


def test_counts_of_a_killed_process_survive(scratch):
    def work():
        counters.open(scratch / "run")
        counters.values[counters.slot("killed", "p")] += 7

    in_child(work, then_kill=True)
    assert Row("killed", "p", 7, 0, 0, 0) in health.summary(scratch / "run")


def test_forked_child_counts_into_its_own_file_and_sums_add_up(scratch):
    counters.open(scratch / "run")
    slot = counters.slot("forked", "p")
    counters.values[slot] += 1

    def work():
        counters.values[slot] += 10
        counters.values[counters.slot("forked", "q")] += 5

    in_child(work)
    in_child(work, then_kill=True)
    assert counters.values[slot] == 1
    assert len(list((scratch / "run").glob("calls-*.bin"))) == 3
    rows = [row for row in health.summary(scratch / "run") if row.op == "forked"]
    assert rows == [Row("forked", "p", 21, 0, 0, 0), Row("forked", "q", 10, 0, 0, 0)]


def test_forked_child_of_a_process_that_counts_in_memory_starts_from_zero(scratch):
    slot = counters.slot("memory", "p")
    counters.values[slot] += 1

    def work():
        assert counters.values[slot] == 0
        counters.values[slot] += 1

    in_child(work)
    assert counters.values[slot] == 1


def test_run_folder_that_cannot_be_written_is_a_warning_not_an_end(scratch, caplog):
    (scratch / "file").write_text("")
    mine = Counters()
    mine.open(scratch / "file" / "run")
    mine.values[mine.slot("a", "p")] += 1
    assert mine.rows() == [Row("a", "p", 1, 0, 0, 0)]
    assert "counted in memory only" in caplog.text


def test_run_folder_that_cannot_be_written_is_told_once(scratch, caplog, monkeypatch):
    (scratch / "file").write_text("")
    monkeypatch.setenv("OPSHIM_RUN_DIR", str(scratch / "file" / "run"))
    mine = Counters()
    for slot in [mine.slot("a", candidate) for candidate in "pqr"]:
        mine.values[slot] += 1
    assert len(mine.rows()) == 3
    assert caplog.text.count("counted in memory only") == 1


def test_a_full_disk_is_met_when_the_file_is_made_and_not_by_a_count(scratch):
    mine = Counters()
    mine.open(scratch / "run")
    made = mine.path.stat()
    assert made.st_blocks * 512 >= made.st_size > 0  # no hole, in which a count would be a SIGBUS


def test_a_breaker_counts_as_open_until_its_pause_is_over_on_other_machines_too(scratch):
    now = int(time.time())
    for until in (now + 60, now + 60, now - 1):  # three processes
        mine = Counters()
        mine.open(scratch / "run")
        mine.values[mine.slot("a", "p") + CALLS] = 2
        mine.values[mine.slot("a", "p") + OPEN_UNTIL] = until
    assert mine.rows() == [Row("a", "p", 2, 0, 0, 0)]
    (scratch / "other").mkdir()
    (scratch / "other" / "calls-of-node1.bin").write_bytes(health.packed(scratch / "run"))
    for folder in ("run", "other"):
        assert health.summary(scratch / folder) == [Row("a", "p", 6, 0, 0, 0, breaker_open=2)]


def test_half_made_counter_file_is_skipped(scratch):
    (scratch / "calls-1-1.bin").write_bytes(b"")
    assert health.summary(scratch) == []


def test_too_many_names_are_an_error(monkeypatch):
    monkeypatch.setattr(health, "_RECORDS", 3)
    mine = Counters()
    mine.slot("a", "p")
    mine.slot("b", "p")
    with pytest.raises(shim.OpshimError, match="no counter left for c p"):
        mine.slot("c", "p")


def test_breaker_opens_after_failures_in_a_row_and_lets_one_try_through():
    clock = Clock()
    breaker = Breaker(clock, limit=2, pause=60)
    breaker.failed()
    assert not breaker.is_open()
    breaker.failed()
    assert breaker.is_open()
    clock.now += 60
    assert not breaker.is_open()
    breaker.failed()
    assert breaker.is_open()
    clock.now += 60
    breaker.succeeded()
    breaker.failed()
    assert not breaker.is_open()
