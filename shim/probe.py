"""`runner.py probe`: is everything here that serving needs? A line per check, PASS, FAIL or SKIP, with the next step.

With `static`, nothing starts CUDA: an image can be checked where it is built, on a machine without a GPU. Files are
compared with manifest.sha256, which is committed with them, so that what was left out, cut short or edited on the way to
an image shows; `probe --record` renews it. What is built has its hash beside it, from its build (ops_native/build.py).
"""

from __future__ import annotations

import importlib.util
import json
import logging
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

from shim.errors import OpshimError

ROOT = Path(__file__).resolve().parents[1]
MANIFEST = ROOT / "manifest.sha256"  # `sha256sum -c` reads it, too
# What the commands need, as git's patterns. The suite's own tests are left out: nothing else needs them.
PACKAGES = ("shim", "ops_reference", "ops_native", "conformance", ":!conformance/meta")
NEEDED = (*PACKAGES, "models/opshim-tiny", ":(glob)*.py", "pyproject.toml", "setup.cfg")
RECORD, AGAIN = "python runner.py probe --record", "copy the whole tree again"
PASS, FAIL, SKIP = "PASS", "FAIL", "SKIP"


@dataclass(frozen=True)
class Check:
    """One finding. `next_step` says what to do about a FAIL."""

    name: str
    state: str
    finding: str
    next_step: str = ""


def probe(static: bool = False, as_json: bool = False, record: bool = False) -> int:
    """Prints the checks. 0, or 1 where one is FAIL. record: renews the manifest instead."""
    if record:
        MANIFEST.write_text("".join(f"{digest}  {name}\n" for name, digest in files().items()))
        print(f"{MANIFEST}: {len(recorded())} files; commit it with them")
        return 0
    checks = [one for check in (_manifest, _tools, _libraries, _vllm, _device) for one in _safely(check, static)]
    if as_json:
        print(json.dumps([asdict(one) for one in checks], indent=2))
    else:
        width = max(len(one.name) for one in checks)
        for one in checks:
            print(f"{one.state}  {one.name:{width}}  {one.finding}{f'  -> {one.next_step}' if one.next_step else ''}")
    return 1 if any(one.state == FAIL for one in checks) else 0


def _safely(check: Callable[[bool], Iterator[Check]], static: bool) -> Iterator[Check]:
    try:
        yield from check(static)
    except Exception as error:  # noqa: BLE001 - a probe must get to its end
        yield Check(check.__name__.strip("_"), FAIL, f"{type(error).__name__}: {error}")


# ---- files ----------------------------------------------------------------------------------------------------------


def files() -> dict[str, str]:
    """Path below the root -> sha256 now, of each file that the commands need. Git lists them, in a clone: so that neither
    one that is missing goes unseen, nor one counts that is built or left over. OpshimError where it cannot."""
    if not shutil.which("git"):
        raise OpshimError("only a clone can be recorded, as git lists its files: git is not installed")
    command = ["git", "ls-files", "-z", "--", *NEEDED]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    names = listed.stdout.split("\0")[:-1]
    if not names:
        raise OpshimError(f"only a clone can be recorded, as git lists its files: {listed.stderr.strip() or ROOT}")
    for name in names:
        if not (ROOT / name).exists():
            raise OpshimError(f"{name} is missing: 'git checkout {name}', or 'git rm {name}' where it is to go")
    return {name: _digest(name) for name in sorted(names)}


def recorded() -> dict[str, str]:
    """The same, as the manifest says it."""
    lines = (line.partition("  ") for line in MANIFEST.read_text().splitlines())
    return {name: digest for digest, _, name in lines}


def _digest(name: str) -> str:
    return sha256((ROOT / name).read_bytes()).hexdigest()


def _manifest(static: bool) -> Iterator[Check]:
    if not MANIFEST.exists():
        state = FAIL if (ROOT / "setup.cfg").exists() else SKIP  # a wheel has none
        yield Check("files", state, f"no {MANIFEST}", AGAIN if state == FAIL else "")
        return
    wanted = recorded()
    missing = [name for name in wanted if not (ROOT / name).exists()]
    changed = [name for name in wanted if name not in missing and wanted[name] != _digest(name)]
    edited = f"{AGAIN}, or if you edited it: {RECORD}"
    for what, names, step in (("missing", missing, AGAIN), ("not as recorded", changed, edited)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            yield Check("files", FAIL, f"{what}: {', '.join(names[:3])}{more}", step)
    if not missing and not changed:
        yield Check("files", PASS, f"{len(wanted)} files are as recorded")


# ---- compilers ------------------------------------------------------------------------------------------------------


def _tools(static: bool) -> Iterator[Check]:
    """Needed only where a library has to be compiled on first use: their lack is no failure."""
    from ops_native.build import cpu_spec, cuda_spec

    for spec in (cpu_spec(), cuda_spec(tuple)):
        name = f"compiler of {spec.name}"
        try:
            command = spec.compiler()
        except OpshimError as error:
            yield Check(name, SKIP, str(error), "none is needed where the library is precompiled")
            continue
        words = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False).stdout.split("\n")
        told = next((line for line in words if re.search(r"\d+\.\d+", line)), words[0]).strip()
        yield Check(name, PASS, f"{shutil.which(command[0])}: {told}")
    ninja = importlib.util.find_spec("ninja") is not None or shutil.which("ninja")
    yield Check("ninja", PASS, "there") if ninja else Check("ninja", SKIP, "not there", "pip install ninja")


# ---- libraries ------------------------------------------------------------------------------------------------------


def _libraries(static: bool) -> Iterator[Check]:
    import opshim  # noqa: F401 - registers every op and its native implementations
    import shim
    from ops_native.libraries import CPU, CUDA
    from shim import loading

    for library in (CPU, CUDA):
        name = library.spec.filename
        identity = library.identity()
        if isinstance(identity, OpshimError):
            yield Check(name, FAIL, str(identity), AGAIN)
            continue
        places = {path: loading.examine(path, identity) for path in library.paths()}
        good = [path for path, problem in places.items() if problem is None]
        if not good:
            state = SKIP if library is CUDA and _cuda_is_elsewhere(static) else FAIL
            why = "; ".join(f"{path}: {problem}" for path, problem in places.items() if problem != loading.ABSENT)
            yield Check(name, state, why or "not there", "python runner.py build")
            continue
        loaded = loading.load(good[0], identity) if loading.is_as_built(good[0]) else "is not as it was built"
        if isinstance(loaded, str):
            yield Check(name, FAIL, f"{good[0]}: {loaded}", "python runner.py build")
            continue
        yield Check(name, PASS, f"{good[0]}, built for {loaded.info['arch']} on {loaded.info['date']}")
        wanted = [
            symbol + library.suffix()
            for op in map(shim.get, shim.names())
            for one in op.implementations
            if one.library is library
            for symbol in one.symbols
        ]
        missing = [symbol for symbol in wanted if not hasattr(loaded.handle, symbol)]
        yield Check(
            f"{name} symbols",
            FAIL if missing else PASS,
            f"lacks {', '.join(missing)}" if missing else f"{len(wanted)} of {len(wanted)} are exported",
            "python runner.py build" if missing else "",
        )
        problem = "" if static or library is CPU else library.unfit(loaded.info["arch"])
        if problem and not _cuda_is_elsewhere(static):
            yield Check(f"{name} arch", FAIL, problem, "python runner.py build --arch ARCH")


def _cuda_is_elsewhere(static: bool) -> bool:
    """Whether this machine is not expected to run CUDA code."""
    return static or not Path("/dev/nvidiactl").exists()


# ---- vLLM and the device --------------------------------------------------------------------------------------------


def _vllm(static: bool) -> Iterator[Check]:
    if importlib.util.find_spec("vllm") is None:
        yield Check("vllm", FAIL, "not installed", "see README, 'On a GPU machine'")
        return
    import vllm

    from shim.vllm_plugin import plugin, versions

    try:
        versions.check_version(vllm.__version__)
        yield Check("vllm", PASS, vllm.__version__)
    except OpshimError as error:
        yield Check("vllm", FAIL, str(error))
    from vllm.platforms import current_platform

    logging.getLogger("torch._library.triton").addFilter(_not_about_triton)  # it speaks as vLLM's modules are imported
    for hook in plugin.hooks(current_platform.device_type):
        try:
            for target, parameters in hook.targets.items():
                versions.find(target, parameters)
            yield Check(f"hook {hook.name}", PASS, hook.how)
        except OpshimError as error:
            yield Check(f"hook {hook.name}", FAIL, str(error), "a supported vLLM, or --policy auto without this hook")


def _not_about_triton(record: logging.LogRecord) -> bool:
    """Not what torch warns of wherever there is no Triton, as on every CPU: it looks like a finding of the probe."""
    return not record.getMessage().startswith("Triton not available, find_triton_kernels")


def _device(static: bool) -> Iterator[Check]:
    from shim import device

    cpu = device.describe("cpu")
    yield Check("cpu", PASS, f"{cpu.name}: {cpu.facts['isa']}, {cpu.facts['cores']} cores")
    if static:
        yield Check("gpu", SKIP, "not asked with --static")
        return
    import torch

    if not torch.cuda.is_available():
        expected = Path("/dev/nvidiactl").exists()
        yield Check("gpu", FAIL if expected else SKIP, "torch sees none", "a CUDA build of torch" if expected else "")
        return
    for index in range(torch.cuda.device_count()):
        facts = device.describe(f"cuda:{index}").facts
        shared = f"{facts['shared_memory_per_block_optin']} bytes of shared memory per block"
        major, minor = facts["capability"]
        told = f"{torch.cuda.get_device_name(index)}: sm_{major}{minor}, {facts['sms']} SMs, {shared}"
        yield Check(f"gpu {index}", PASS, f"{told}, driver {device.driver_version(facts['driver'])}")
