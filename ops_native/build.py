"""Builds native libraries with ninja. A library is data (`Spec`); ahead of time and just in time are one path.

A build reads the sources once, names them by their content, and compiles that snapshot, so an edit in the middle of a
build cannot mix versions. Objects are kept in the user cache under a hash of everything that goes into them: only what
changed is compiled again. Builds of one folder take turns under a file lock; each works in a folder of its own beside
the target and moves the finished library in place, so a killed build leaves nothing half-written.
"""

from __future__ import annotations

import fcntl
import functools
import json
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path

from shim.errors import BuildError, UnknownNameError
from shim.loading import MARK, Identity, build_info, examine, is_as_built, record, shown, user_cache

log = logging.getLogger("opshim")
NATIVE = Path(__file__).parent
KEPT_DAYS = 30  # objects and libraries in the user cache that no build wrote for so long are removed

ARCHS = ("80", "86", "89", "90a", "100")  # of CUDA code, where nobody says
OLDEST = 80  # the first with cp.async and bfloat16, which the kernels are made of

PASSING = ("Killed", "No space left", "Cannot allocate memory", "out of memory")  # failures that may not come again

_INCLUDE = re.compile(rb'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_VERSION = re.compile(r"\d+\.\d+")
_ERROR = re.compile(r"\berror\b|undefined reference|not found", re.IGNORECASE)
_X86 = (
    ("avx2", ("-mavx2", "-mfma", "-mf16c")),
    ("avx512", ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c")),
)


@dataclass(frozen=True)
class Spec:
    """One shared library: every source compiled once per variant, linked in the order of the variants. Flags are one
    shell word each. `archs()` names the GPU archs that its code is for: they tell builds apart, yet a library for other
    archs, which may well include this machine's, is no other library."""

    name: str
    folder: Path  # holds sources and headers
    sources: str  # glob patterns
    headers: str
    compilers: tuple[str, ...]  # the first on the PATH is used ...
    variable: str  # ... unless this environment variable names one
    flags: tuple[str, ...]
    link_flags: tuple[str, ...]
    variants: tuple[tuple[str, tuple[str, ...]], ...]  # name -> further flags
    archs: Callable[[], tuple[str, ...]] = tuple
    package: Path = NATIVE / "lib"  # where `build_all` puts it

    @property
    def filename(self) -> str:
        return f"lib{self.name}.so"

    def snapshot(self) -> dict[str, bytes]:
        """File name -> content, of all sources and headers."""
        files = sorted([*self.folder.glob(self.sources), *self.folder.glob(self.headers)])
        if not any(file.match(self.sources) for file in files):
            raise BuildError(f"no sources {self.sources} in {self.folder}")
        return {file.name: file.read_bytes() for file in files}

    def compiler(self) -> list[str]:
        """The compiler's command."""
        given = shlex.split(os.environ.get(self.variable, ""))
        for command in [given] if given else [[name] for name in self.compilers]:
            if shutil.which(command[0]):
                return command
        if given:
            raise BuildError(f"no compiler: {self.variable} names {given[0]}, which is not on the PATH")
        raise BuildError(f"no compiler: none of {', '.join(self.compilers)} is on the PATH, {self.variable} is not set")

    def identity(self, snapshot: dict[str, bytes] | None = None) -> Identity:
        try:
            command = self.compiler()
            compiler = " ".join([_version(tuple(command)), *command[1:]])  # CXX may hold flags
        except BuildError:
            compiler = None
        flags = (self.flags, self.link_flags, self.variants)
        arch = " ".join([platform.machine(), *(f"sm_{arch}" for arch in self.archs())])
        return Identity(_hash(snapshot or self.snapshot()), _hash(flags), compiler, arch)

    def build(self, folder: Path) -> Path:
        return build(self, folder, partial=True).path


def cpu_spec() -> Spec:
    """libopshim_cpu.so: ops_native/cpu/*.cpp for every instruction set. Base comes first: should an inline function
    escape its namespace, the linker keeps the copy that every machine can run. OpenMP is torch's, hence not linked."""
    isas = (("base", ()), *(_X86 if platform.machine() == "x86_64" else ()))
    return Spec(
        name="opshim_cpu",
        folder=NATIVE / "cpu",
        sources="*.cpp",
        headers="*.h",
        compilers=("g++", "c++", "clang++"),
        variable="CXX",
        flags=("-std=c++17", "-O3", "-fopenmp", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")
        + ("-Wno-maybe-uninitialized",),
        link_flags=("-shared",),
        variants=tuple((isa, (f"-DOPSHIM_ISA={isa}", *flags)) for isa, flags in isas),
    )


def cuda_spec(archs: Callable[[], tuple[str, ...]]) -> Spec:
    """libopshim_cuda.so: ops_native/cuda/*.cu, without libtorch; CUDA's runtime is linked statically."""
    return Spec(
        name="opshim_cuda",
        folder=NATIVE / "cuda",
        sources="*.cu",
        headers="*.cuh",
        compilers=("nvcc",),
        variable="NVCC",
        flags=("-std=c++17", "-O3", "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall", "-Xptxas=-v"),
        link_flags=("-shared", "-ldl"),
        variants=(("cuda", ()),),
        archs=archs,
    )


@dataclass(frozen=True)
class Built:
    """A finished library; seconds is 0 where it was there already. identity is None where `note` says why not."""

    path: Path
    identity: Identity | None
    seconds: float
    note: str = ""


def build_all(
    folder: Path | None = None, specs: Iterable[Spec] | None = None, archs: tuple[str, ...] = ARCHS
) -> Iterator[Built]:
    """Builds every library of this tree, into `folder`, or else the package, or the user cache where that is read-only.
    Gives each as it is ready. One without compiler is left out where others were built: a machine may have no nvcc."""
    first = True
    for spec in [cpu_spec(), cuda_spec(lambda: archs)] if specs is None else specs:
        target = folder or spec.package
        try:
            spec.compiler()
        except BuildError as error:
            if first:
                raise
            yield Built(target / spec.filename, None, 0.0, str(error))
            continue
        first = False
        if folder or _writable(target):  # a folder that was asked for is used, or the error says why not
            yield build(spec, target)
        else:
            built = build(spec, user_cache() / f"{spec.name}-{spec.identity().key}")
            yield replace(built, note=f"{target} cannot be written")


def build_command(folder: str | None, arch: str | None) -> None:
    """`runner.py build`: says what became of each library. arch: "80,90a"; UnknownNameError for one that cannot be."""
    known = cuda_archs_known()
    archs = tuple(arch.split(",")) if arch is not None else tuple(one for one in ARCHS if one in known)
    for one in archs if known else ():
        if one not in known:
            note = f"opshim's kernels need sm_{OLDEST} or later, of which this nvcc knows these"
            raise UnknownNameError("GPU arch", one, known, note)
    for built in build_all(Path(folder) if folder else None, archs=archs):
        how = f"built in {built.seconds:.0f} s" if built.seconds else "up to date" if built.identity else "not built"
        print(f"{built.path}: {how}{f' ({built.note})' if built.note else ''}", flush=True)


def cuda_archs_known() -> list[str]:
    """The archs of opshim's kernels that this machine's nvcc compiles for, also with the "a" of instructions that are
    one arch's own; empty without nvcc."""
    try:
        command = cuda_spec(tuple).compiler()
    except BuildError:
        return []
    run = subprocess.run([*command, "--list-gpu-code"], capture_output=True, text=True, check=False)
    plain = [word.removeprefix("sm_") for word in run.stdout.split() if word.startswith("sm_")]
    return [one for one in plain if int(one) >= OLDEST] + [f"{one}a" for one in plain if int(one) >= 90]


def build(spec: Spec, folder: Path, partial: bool = False) -> Built:
    """Builds the library into `folder` unless it is there; BuildError says why it cannot be built. `partial`: where some
    sources do not compile, a library of the others is built before the error is raised; it counts as not built."""
    started = time.monotonic()
    snapshot = spec.snapshot()
    identity = spec.identity(snapshot)
    target = folder / spec.filename
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f".{spec.name}.lock"):
            if _is_built(target, identity):
                return Built(target, identity, 0.0)
            for abandoned in folder.glob(f".{spec.name}-*.build"):  # whoever made it was killed: the lock is ours
                shutil.rmtree(abandoned, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=f".{spec.name}-", suffix=".build", dir=folder) as work:
                failure = _compile(spec, snapshot, identity, Path(work), partial)
                made = Path(work) / spec.filename
                # first: where the library is not moved any more, the next build sees that it is not this one
                record(target).write_text(f"{sha256(made.read_bytes()).hexdigest()}  {spec.filename}\n")
                os.replace(made, target)
    except OSError as error:
        raise BuildError(f"cannot build {spec.filename} in {folder}: {error}") from error
    _prune(user_cache())
    if failure:
        raise failure
    return Built(target, identity, time.monotonic() - started)


def _is_built(target: Path, identity: Identity) -> bool:
    if examine(target, identity) is not None or not is_as_built(target):
        return False
    info = build_info(target.read_bytes())
    return info["complete"] and (info["compiler"], info["arch"]) == (identity.compiler, identity.arch)


def _compile(
    spec: Spec, snapshot: dict[str, bytes], identity: Identity, work: Path, partial: bool
) -> BuildError | None:
    """Makes the library in `work` of all sources, or raises what does not compile; with `partial` of those that compile,
    and returns what does not."""
    compiler, ninja = spec.compiler(), _ninja()
    for name, content in snapshot.items():
        (work / name).write_bytes(content)
    objects = _writable(user_cache() / "objects") or work
    command = " ".join(map(shlex.quote, compiler))
    part = f"$out.{os.getpid()}"  # the compiler's words stay beside the object: of nvcc, registers and spills
    said = f"{part}.log 2>&1 || {{ cat {part}.log; exit 1; }} && mv {part}.log $out.log && mv {part} $out"
    rules = [f"rule object\n  command = {command} $flags -c $in -o {part} > {said}"]
    outputs = []
    for name, file, flags in _objects(spec, snapshot, identity):
        outputs.append(objects / file)
        if not outputs[-1].exists():
            rules.append(f"build {_escape(outputs[-1])}: object {name}\n  flags = {' '.join(flags)}")
    (work / "build.ninja").write_text("\n".join(rules) + "\n")
    failure, new = None, len(rules) - 1
    if new:  # a warning, so that it is seen whatever the logging: what follows may take minutes
        log.warning("compiling %s for %s, %d of %d objects", shown(work.parent / spec.filename), identity.arch, new, len(outputs))
        failure = _run([*ninja, "-k", "0", "-C", str(work)], spec)
    usable = [str(output) for output in outputs if output.exists()]
    if failure and not (partial and usable):
        raise failure
    info = {**asdict(identity), "complete": failure is None, "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    text = json.dumps(MARK.decode() + json.dumps(info))
    visible = '__attribute__((visibility("default")))'
    source = work / "build_info.cpp"
    source.write_text(f'extern "C" {{ {visible} extern const char opshim_build_info[] = {text}; }}\n')
    target = str(work / spec.filename)
    unlinked = _run([*compiler, *spec.flags, *spec.link_flags, *usable, str(source), "-o", target], spec)
    if unlinked:
        raise unlinked
    return failure


def _objects(spec: Spec, snapshot: dict[str, bytes], identity: Identity) -> Iterator[tuple[str, str, list[str]]]:
    """(source, object file, flags), in the order of linking."""
    for variant, extra in spec.variants:
        flags = [*spec.flags, *extra, *(f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in spec.archs())]
        for name in (name for name in snapshot if Path(name).match(spec.sources)):
            key = _hash((_included(name, snapshot), flags, identity.compiler, identity.arch))
            yield name, f"{Path(name).stem}-{variant}-{key}.o", flags


def _run(command: list[str], spec: Spec) -> BuildError | None:
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode == 0:
        return None
    output = run.stdout + run.stderr
    return BuildError(f"compiling {spec.filename} failed: {_errors(output, spec)}", lasting=not any(words in output for words in PASSING))


def _included(name: str, snapshot: dict[str, bytes]) -> dict[str, bytes]:
    """The file and all that it includes from the snapshot, directly or through another."""
    found, open_ends = {}, [name]
    while open_ends:
        file = open_ends.pop()
        if file in snapshot and file not in found:
            found[file] = snapshot[file]
            open_ends += [included.decode() for included in _INCLUDE.findall(snapshot[file])]
    return dict(sorted(found.items()))


def _errors(output: str, spec: Spec) -> str:
    """The first error of each source, with the sources' real folder; the output's last line where there is none."""
    lines = [line.strip() for line in output.splitlines() if not line.startswith(("ninja:", "[", "FAILED:"))]
    firsts = {}
    for line in lines:
        if _ERROR.search(line):
            firsts.setdefault(line.split(":")[0], line)
    names = {file.name for file in spec.folder.iterdir()}
    chosen = list(firsts.values())[:5] or lines[-1:]
    return "; ".join(f"{spec.folder}/{line}" if line.split(":")[0] in names else line for line in chosen)


def _ninja() -> list[str]:
    try:
        import ninja

        return [str(Path(ninja.BIN_DIR) / "ninja")]
    except ImportError:
        found = shutil.which("ninja")
    if not found:
        raise BuildError("no ninja: neither the Python package nor a program on the PATH")
    return [found]


@functools.cache
def _version(command: tuple[str, ...]) -> str:
    """The first line with a version in it: nvcc's first one has none."""
    run = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    lines = (run.stdout or run.stderr).strip().splitlines()
    return next((line for line in lines if _VERSION.search(line)), lines[0] if lines else "unknown")


def _hash(thing) -> str:
    return sha256(repr(thing).encode()).hexdigest()[:16]


def _escape(path: Path) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def _writable(folder: Path) -> Path | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a file lock; the system drops it when the process ends, however it ends."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _prune(cache: Path) -> None:
    """Removes what is old and has a name that a build gives: OPSHIM_CACHE may be a folder of other programs, too."""
    oldest = time.time() - KEPT_DAYS * 86400
    for path in [*cache.glob(f"objects/*-*-{16 * '[0-9a-f]'}.o*"), *cache.glob("opshim_*-*/libopshim_*.so*")]:
        with suppress(FileNotFoundError):  # another process tidies up too
            if path.stat().st_mtime < oldest:
                path.unlink()
