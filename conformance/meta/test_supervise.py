"""The cause of a server's end, as its log has it."""

import pytest

from shim.vllm_plugin.supervise import Server, Supervisor, cause_in


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (
            "(EngineCore pid=7) ERROR 11-30 20:08:45 [x.py:3] Worker proc VllmWorker-0 died unexpectedly (exit code: None)",
            "Worker proc VllmWorker-0 died unexpectedly: killed, or out of memory?",
        ),
        (
            "(APIServer pid=7) WARNING 11-30 [x.py:8] [shutdown] MPClient: engine core exited unexpectedly; cleanup",
            "engine core exited unexpectedly: killed, or out of memory?",
        ),
        ("ERROR vllm.v1.engine.exceptions.EngineDeadError: dead", "vllm.v1.engine.exceptions.EngineDeadError: dead"),
        (
            "RuntimeError: Engine core initialization failed. See root cause above. Failed: {}",
            "RuntimeError: Engine core initialization failed. See root cause above. Failed: {}: killed, or out of memory?",
        ),
        ("(Worker pid=7) INFO worker is well", None),
    ],
)
def test_the_log_tells_a_lost_process_from_an_error(line, cause):
    assert cause_in(line) == cause


def test_an_option_with_a_wrong_value_is_named():
    ended = Supervisor(Server("http://127.0.0.1:9/health", 9), on_ready=print, on_stop=print)
    for line in (
        "pydantic_core._pydantic_core.ValidationError: 2 validation errors for SchedulerConfig",
        "max_num_batched_tokens",
        "  Input should be greater than or equal to 1 [type=greater_than_equal, input_value=0, input_type=int]",
        "    For further information visit https://errors.pydantic.dev",
    ):
        ended._note(line)
    (cause,) = ended.causes
    assert cause.words.endswith(": max_num_batched_tokens: Input should be greater than or equal to 1")


def test_an_error_without_a_message_is_told_with_the_line_above_it():
    ended = Supervisor(Server("http://127.0.0.1:9/health", 9), on_ready=print, on_stop=print)
    for line in ("Traceback (most recent call last):", "    raise ValueError", "    assert dp_rank == 0", "AssertionError"):
        ended._note(f"(APIServer pid=7) {line}")
    assert ended._cause(0.0) == "AssertionError: assert dp_rank == 0"


def test_a_last_line_that_was_cut_short_is_read(tmp_path):
    ended = Supervisor(Server("http://127.0.0.1:9/health", 9), on_ready=print, on_stop=print)
    (tmp_path / "log").write_text("INFO all is well\nValueError: no room")
    with (tmp_path / "log").open("rb") as log:
        ended._pass_on(log)
    assert ended._cause(0.0) == "ValueError: no room"


REFUSED = "(ApiServer_1 pid=7) ERROR 12-01 [api_router.py:75] vllm.exceptions.VLLMValidationError: max_tokens=5000"
LOST = "(APIServer pid=7) WARNING 12-01 [x.py:8] [shutdown] MPClient: engine core exited unexpectedly; cleanup"
FATAL = "(EngineCore pid=8) ERROR 12-01 [core.py:3] RuntimeError: no such block"


@pytest.mark.parametrize(
    ("was_ready", "lines", "told"),
    [
        (True, [*[(60, REFUSED)] * 200, (20, REFUSED), (1, LOST)], "engine core exited unexpectedly: killed"),
        (True, [(1, REFUSED), (1, FATAL), (1, LOST)], "RuntimeError: no such block"),
        (True, [(60, FATAL)], ""),
        (True, [(1, "OSError: the socket is gone"), (1, "RuntimeError: see above")], "OSError: the socket"),
        (False, [(60, "ValueError: no room"), (1, FATAL), (1, LOST)], "ValueError: no room"),
    ],
)
def test_the_cause_of_an_end_is_no_request_that_was_refused(monkeypatch, was_ready, lines, told):
    """Lines of the log, each with the seconds from it to the end."""
    ended = Supervisor(Server("http://127.0.0.1:9/health", 9), on_ready=print, on_stop=print, ready=was_ready)
    for before, line in lines:
        monkeypatch.setattr("time.monotonic", lambda before=before: 100.0 - before)
        ended._note(line)
    assert ended._cause(100.0).startswith(told) and bool(ended._cause(100.0)) == bool(told)
