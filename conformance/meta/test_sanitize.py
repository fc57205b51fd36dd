"""`python -m conformance.sanitize`: what it makes of the tool's words, told by a stand-in that says them."""

import pytest
from click.testing import CliRunner

from conformance import sanitize

WORDS = {
    "clean": "echo '========= ERROR SUMMARY: 0 errors' > $L; echo '7 passed, 2 skipped in 3 s'",
    "errors": "echo '========= ERROR SUMMARY: 4 errors' > $L; echo '7 passed in 3 s'",
    "hazards": "echo '========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)' > $L; echo '7 passed'",
    "failing": "echo '========= ERROR SUMMARY: 0 errors' > $L; echo '1 failed, 6 passed in 3 s'",
    "nothing run": "echo '========= ERROR SUMMARY: 0 errors' > $L; echo 'no tests ran'",
    "killed": "echo '========= COMPUTE-SANITIZER' > $L; sleep 60",
}


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """tool(words): from now on the checker is a script that ends with these."""

    def make(words):
        script = tmp_path / "compute-sanitizer"
        options = '[ "$1" = --log-file ] && L=$2; shift 2'
        script.write_text(f"#!/bin/bash\nwhile [[ $1 == --* ]]; do {options}; done\n{words}\n")
        script.chmod(0o755)
        monkeypatch.setattr(sanitize, "checker", lambda: str(script))

    return make


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("clean", "PASS  memcheck   moe_sum                0 found      7 passed, 2 skipped"),
        ("errors", "FAIL  memcheck   moe_sum                4 found      7 passed"),
        ("hazards", "FAIL  memcheck   moe_sum                2 found      7 passed"),
        ("failing", "FAIL  memcheck   moe_sum                0 found      1 failed, 6 passed"),
        ("nothing run", "FAIL  memcheck   moe_sum                0 found      no case ended"),
        ("killed", "FAIL  memcheck   moe_sum                did not end  no case ended"),
    ],
)
def test_only_a_run_that_ended_and_found_nothing_is_clean(tool, tmp_path, words, told):
    tool(WORDS[words])
    assert str(sanitize.check("moe_sum", "memcheck", tmp_path, "quick", "not search", 3.0)) == told


def test_a_tool_that_misses_what_was_put_there_is_not_believed(tool, tmp_path):
    tool(WORDS["clean"])
    done = CliRunner().invoke(sanitize.main, ["--op", "moe_sum", "--out", str(tmp_path)])
    assert done.exit_code == 1
    assert "did not find a read beyond a tensor that was put there" in done.output
