"""Native libraries: precompiled, else compiled here, else unavailable because of a reason in words.

A library is identified by its sources, flags, compiler and arch. The identity stands inside the file (after MARK), so
it can be read without loading the file; one that was built from other sources or flags than this tree's is never used.

    search path for precompiled libraries         where compiled here
    1. folders of OPSHIM_LIBRARY_PATH             the user cache (OPSHIM_CACHE, default ~/.cache/opshim),
    2. the package's own lib folder               in a folder named after the identity
    3. the user cache

The search is per op: where a library lacks the symbols of one op, that op alone goes on to the next place. A compile
that fails on some sources still gives a library of the others.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import platform
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Protocol

import torch  # brings the OpenMP runtime that native libraries are linked against

from shim.errors import BuildError

ABSENT = "not there"
MARK = b"OPSHIM_BUILD_INFO"
STATUS = {1: "dtype not supported", 2: "out of memory", 3: "bad argument"}  # enum Status of opshim.h
CUDA_ERROR = 1000  # added to CUDA's own codes
_CODES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "d": ctypes.c_double}
_MACHINES = {3: "i386", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv64", 21: "ppc64le", 22: "s390x"}


@dataclass(frozen=True)
class Identity:
    """What a library was built from: hash of sources and headers, hash of flags, compiler version, arch."""

    source: str
    flags: str
    compiler: str | None  # None: this machine has none
    arch: str

    @property
    def key(self) -> str:
        return sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


class Spec(Protocol):
    """What ops_native.build.Spec offers: a library as data."""

    name: str
    filename: str
    package: Path

    def identity(self) -> Identity: ...  # BuildError where a source is missing

    def build(self, folder: Path) -> Path: ...  # BuildError where it cannot be built


@dataclass(frozen=True)
class Loaded:
    """A library in this process."""

    path: Path
    info: dict
    handle: ctypes.CDLL


@dataclass(frozen=True)
class Found:
    """The C functions of one op, or the reason why there are none."""

    functions: SimpleNamespace | None
    reason: str
    library: Loaded | None = None


class NativeLibrary:
    """The native library of one device type. `tail`: the codes of the arguments that all its functions end with.
    `suffix()` is appended to every C function's name; `unfit(arch)` says why a library built for these archs cannot
    serve on this machine's device, or "" where it can."""

    def __init__(
        self,
        device: str,
        spec: Spec,
        tail: str = "",
        suffix: Callable[[], str] = str,
        unfit: Callable[[str], str] = lambda arch: "",
    ):
        self.device, self.spec, self.tail, self.suffix, self.unfit = device, spec, tail, suffix, unfit
        self._lock = threading.RLock()
        self.reset()

    def reset(self) -> None:
        """Forgets what was found, so that the next look-up searches and compiles anew (libraries in use stay loaded).
        A compile that failed on the same sources is not repeated."""
        self._identity: Identity | BuildError | None = None
        self._places: dict[Path, Loaded | str] = {}
        self._built: tuple[Loaded | str, str] | None = None  # the library or why there is none, what failed to compile
        self._failed: dict[str, str] = getattr(self, "_failed", {})  # identity -> what failed to compile

    def precompiled(self, symbols: dict[str, str]) -> Found:
        """The functions named in `symbols`, from the first library of the search path that has them all."""
        with self._lock:
            reasons = []
            for path, outcome in self.search():
                found = self._functions(outcome, symbols) if isinstance(outcome, Loaded) else Found(None, outcome)
                if found.functions:
                    return found
                if found.reason != ABSENT:
                    reasons.append(f"{shown(path)}: {found.reason}")
            return Found(None, "; ".join(reasons) or f"no {self.spec.filename} on the search path")

    def compiled(self, symbols: dict[str, str]) -> Found:
        """The functions named in `symbols` from a library compiled here, now if need be."""
        with self._lock:
            if self._built is None:
                self._built = self._compile()
            library, failure = self._built
            found = Found(None, library) if isinstance(library, str) else self._functions(library, symbols)
            return found if found.functions or not failure else replace(found, reason=failure)

    def search(self) -> Iterator[tuple[Path, Loaded | str]]:
        """Each place of the search path and the library there, or why it is not used."""
        for path in self.paths():
            if path not in self._places:
                self._places[path] = self._load(path)
            yield path, self._places[path]

    def findings(self) -> list[tuple[Path, str]]:
        """What the search for precompiled libraries found at each place so far, in words, and what was compiled since."""
        with self._lock:
            places = {path: self._places.get(path, "not needed") for path in self.paths()}
            built = self._built and self._built[0]
        told = {path: "loaded" if isinstance(found, Loaded) else found for path, found in places.items()}
        if isinstance(built, Loaded) and told.get(built.path) != "loaded":
            told[built.path] = "compiled now"
        return list(told.items())

    def paths(self) -> list[Path]:
        """The files that the search looks for, in order; absolute, as dlopen looks elsewhere for one without folder."""
        folders = os.environ.get("OPSHIM_LIBRARY_PATH", "").split(os.pathsep)
        given = [Path(folder).absolute() for folder in folders if folder]
        return [folder / self.spec.filename for folder in [*given, self.spec.package, self.cache()]]

    def cache(self) -> Path:
        """The folder in the user cache for a library of this tree's identity."""
        identity = self.identity()
        return user_cache() / f"{self.spec.name}-{identity.key if isinstance(identity, Identity) else 'unknown'}"

    def identity(self) -> Identity | BuildError:
        if self._identity is None:
            try:
                self._identity = self.spec.identity()
            except BuildError as error:
                self._identity = error
        return self._identity

    def _load(self, path: Path) -> Loaded | str:
        identity = self.identity()
        if isinstance(identity, BuildError):
            return str(identity)
        loaded = examine(path, identity) or load(path, identity)
        return loaded if isinstance(loaded, str) else self.unfit(loaded.info.get("arch", "")) or loaded

    def _compile(self) -> tuple[Loaded | str, str]:
        identity, folder = self.identity(), self.cache()
        hopeless = self.unfit(identity.arch) if isinstance(identity, Identity) else ""
        if hopeless:
            return hopeless, ""
        failure = self._failed.get(identity.key, "") if isinstance(identity, Identity) else str(identity)
        if not failure:
            try:
                self.spec.build(folder)
            except BuildError as error:
                failure = str(error)
                if error.lasting:
                    self._failed[identity.key] = failure
        return self._load(folder / self.spec.filename), failure

    def _functions(self, library: Loaded, symbols: dict[str, str]) -> Found:
        functions, suffix = {}, self.suffix()
        for name, codes in symbols.items():
            try:
                functions[name] = _wrap(library.handle[name + suffix], name + suffix, codes)
            except AttributeError as error:
                return Found(None, f"{library.path.name} has no symbol {name}{suffix} ({error})", library)
        variant = f" ({suffix.strip('_')})" if suffix else ""
        return Found(SimpleNamespace(**functions), f"{shown(library.path)}{variant}", library)


def _wrap(raw, name: str, codes: str) -> Callable:
    """The C function as a Python function that raises where it returns a nonzero status."""
    raw.argtypes = [_CODES[code] for code in codes]
    raw.restype = ctypes.c_int

    def call(*args):
        status = raw(*args)
        if status:
            raise RuntimeError(f"{name} returned status {status} ({_status(status)})")

    return call


def _status(status: int) -> str:
    if status > CUDA_ERROR:
        runtime = torch.cuda.cudart()
        text = runtime.cudaGetErrorString(runtime.cudaError(status - CUDA_ERROR))
        return f"CUDA error {status - CUDA_ERROR}: {text}"
    return STATUS.get(status, "unknown")


def user_cache() -> Path:
    """OPSHIM_CACHE, or ~/.cache/opshim."""
    return Path(os.environ.get("OPSHIM_CACHE") or Path.home() / ".cache" / "opshim").absolute()


def shown(path: Path) -> str:
    """A path as people write it: relative to where they are, or to their home."""
    for base, prefix in ((Path.cwd(), ""), (Path.home(), "~/")):
        if path.is_relative_to(base):
            return prefix + str(path.relative_to(base))
    return str(path)


def examine(path: Path, identity: Identity) -> str | None:
    """Why the file is not a library of this identity, without loading it (loading a truncated file kills the process);
    None where it is. A precompiled library may come from another compiler; sources, flags and arch must be the same."""
    try:
        with open(path, "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        return ABSENT
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        return f"cannot be read: {error}"
    with data:
        problem = _elf_problem(data)
        if problem:
            return problem
        info = build_info(data)
    return "holds no build identity of opshim" if info is None else _difference(info, identity)


def _difference(info: dict, identity: Identity) -> str | None:
    for what, name in (("source", "other sources"), ("flags", "other compiler flags")):
        theirs, ours = str(info.get(what)), getattr(identity, what)
        if theirs != ours:
            return f"built from {name} ({theirs[:8]}, this tree is {ours[:8]})"
    return None


def record(library: Path) -> Path:
    """Where a build leaves the library's hash, as `sha256sum -c` reads it."""
    return library.with_name(f"{library.name}.sha256")


def is_as_built(library: Path) -> bool:
    """Whether the library's bytes are those that were built, as far as that is recorded. It reads them all: for `build`
    and `probe`, not for every start."""
    if not record(library).is_file():
        return True
    return record(library).read_text().startswith(f"{sha256(library.read_bytes()).hexdigest()} ")


def build_info(data) -> dict | None:
    """The identity that stands inside a library, given its bytes."""
    start = data.find(MARK + b"{")
    if start < 0:
        return None
    end = data.find(b"\0", start)
    try:
        return json.loads(data[start + len(MARK) : end])
    except ValueError:
        return None


def _elf_problem(data) -> str | None:
    """Words for a file that is no complete 64-bit ELF library of this machine's arch."""
    if len(data) < 64 or data[:4] != b"\x7fELF":
        return f"no ELF library ({len(data)} bytes)" if data[:4] != b"\x7fELF" else f"truncated ({len(data)} bytes)"
    machine = struct.unpack_from("<H", data, 18)[0]
    arch = _MACHINES.get(machine, f"ELF machine {machine}")
    if data[4] != 2 or arch != platform.machine():
        return f"built for {arch}{'' if data[4] == 2 else ' (32 bit)'}, this machine is {platform.machine()}"
    segments, sections = struct.unpack_from("<QQ", data, 32)
    size, count, section_size, section_count = struct.unpack_from("<HHHH", data, 54)
    needed = sections + section_size * section_count
    for start in range(segments, segments + size * count, size):
        if start + size <= len(data):
            offset, _, _, length = struct.unpack_from("<QQQQ", data, start + 8)
            needed = max(needed, offset + length)
    return f"truncated ({len(data)} of {needed} bytes)" if needed > len(data) else None


def load(path: Path, identity: Identity) -> Loaded | str:
    """Loads an examined file; the dynamic linker's own words where it refuses."""
    try:
        handle = _dlopen(path)
        embedded = ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(handle, "opshim_build_info")))
    except (OSError, ValueError) as error:  # ValueError: no such symbol
        return f"does not load: {error}"
    info = build_info(embedded + b"\0") or {}
    if _difference(info, identity):
        return "was replaced after this process had loaded its older version; the new one counts after a restart"
    return Loaded(path, info, handle)


def _dlopen(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        if "GOMP_" not in str(error):
            raise
    ctypes.CDLL("libgomp.so.1", mode=ctypes.RTLD_GLOBAL)  # this torch keeps its OpenMP runtime to itself
    return ctypes.CDLL(str(path))
