"""The image without Docker: the context that .dockerignore leaves, and the Dockerfile's own commands on it, as a script."""

import fnmatch
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shim import probe

ROOT = Path(__file__).resolve().parents[2]
MOST_BYTES = 20 * 10**6


def ignored(path: str, patterns: list[str]) -> bool:
    """As Docker reads .dockerignore: a pattern names a path or a folder above it; "**/" stands for any folders."""
    parts = path.split("/")
    heads = ["/".join(parts[: n + 1]) for n in range(len(parts))]
    return any(
        fnmatch.fnmatchcase(head if not pattern.startswith("**/") else head.rsplit("/", 1)[-1], pattern.removeprefix("**/"))
        for pattern in patterns
        for head in heads
    )


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    """The build context, copied from the files that git knows and those that are in the way of a careless build."""
    words = (ROOT / ".dockerignore").read_text().splitlines()
    patterns = [word for word in words if word and not word.startswith("#")]
    folder = tmp_path_factory.mktemp("image") / "opshim"
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if not ignored(name, patterns) and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    with pytest.MonkeyPatch.context() as patch:  # whether the one that is committed is current, test_probe asks
        patch.setattr(probe, "MANIFEST", folder / "manifest.sha256")
        probe.probe(record=True)
    return folder


def commands(stage: int) -> list[str]:
    """The RUN commands of a stage, in one line each."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    stages = re.split(r"^FROM .*$", text, flags=re.MULTILINE)[1:]
    return [line.removeprefix("RUN ") for line in stages[stage].splitlines() if line.startswith("RUN ")]


def run(command: str, folder: Path, code: int = 0) -> str:
    """In the folder, with this Python in the place of the image's; what it prints."""
    command = re.sub(r"(/venv/bin/python|(?<![\w/])python3)(?=\s)", sys.executable, command)
    environment = os.environ | {"ARCHS": "90a", "PYTHONPATH": str(folder)}
    done = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_what_docker_ignores():
    patterns = [".git", "docs", "**/__pycache__", "*.egg-info"]
    assert ignored(".git/HEAD", patterns)
    assert ignored("docs/results/a.md", patterns)
    assert ignored("shim/__pycache__/op.pyc", patterns)
    assert not ignored("shim/docs.py", patterns)
    assert not ignored(".gitignore", patterns)


def test_the_context_is_small(context):
    sizes = {file: file.stat().st_size for file in context.rglob("*") if file.is_file()}
    assert sum(sizes.values()) < MOST_BYTES, sorted(sizes, key=sizes.get)[-5:]


def test_every_folder_that_is_built_is_ignored_or_unknown_to_git():
    kept = (ROOT / ".dockerignore").read_text().split()
    for folder in (".venv", ".git", "ops_native/lib", "build", "reports"):
        assert folder in kept


def test_the_steps_build_the_libraries_and_the_probe_is_content(context):
    build = [command for command in commands(0) if "runner.py build" in command]
    check = [command for command in commands(1) if "runner.py probe" in command]
    assert len(build) == len(check) == 1
    # The folder for objects is the cache that the suite has: what has been compiled today is not compiled again.
    built = run(re.sub(r"OPSHIM_CACHE=\S+ ", "", build[0]), context)
    assert "libopshim_cpu.so: built" in built
    probed = run(check[0].split("&&")[-1], context)  # what stands before installs the package
    assert "FAIL" not in probed
    assert re.search(r"^PASS +files +\d+ files", probed, re.MULTILINE), probed
    assert re.search(r"^PASS +libopshim_cpu.so symbols +12 of 12", probed, re.MULTILINE), probed
    if shutil.which("nvcc"):
        assert re.search(r"^PASS +libopshim_cuda.so symbols", probed, re.MULTILINE), probed


def test_files_that_were_lost_or_edited_on_the_way_into_the_image_are_told(context):
    for lost in ("shim/vllm_plugin/status.py", "conftest.py", "models/opshim-tiny/tokenizer.json"):
        (context / lost).unlink()
    for edited in ("shim/op.py", "models/opshim-tiny/config.json"):
        (context / edited).write_text((context / edited).read_text() + "\n")
    (check,) = (command for command in commands(1) if "runner.py probe" in command)
    done = run(check.split("&&")[-1], context, code=1)
    lost = "conftest.py, models/opshim-tiny/tokenizer.json, shim/vllm_plugin/status.py"
    edited = "models/opshim-tiny/config.json, shim/op.py"
    assert re.search(rf"^FAIL +files +missing: {lost} ", done, re.MULTILINE), done
    assert re.search(rf"^FAIL +files +not as recorded: {edited} ", done, re.MULTILINE), done
