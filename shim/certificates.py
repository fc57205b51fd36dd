"""Certificates, as the chain reads them: what the suite found out about a build on a device.

    <folder>/<device fingerprint>/<op>.<provider>.<build identity>.json

A file is of one build, so that what another build of the same provider passes or fails leaves it alone. Folders, the
first that knows this build decides: OPSHIM_CERTIFICATES, or else `certificates` in the user cache; then
`certificates` of this tree. `conformance/certificates.py` writes the files, into the first. Schema 1:

    schema, op, provider, verdict ("pass": a full pass; "fail"), device (shim.device), build, reference, level, suite,
    seed, date, cases {passed, failed, skipped}, report (SHA-256 of the report that it stands on)

A build is identified by what the code was made from: of a native library its sources, flags, compiler and arch; of a
Python provider the file of its function, and BUILD of its module, where it has one (say, the version of a library that
it calls). `reference` identifies the file that defines the op: a proof holds for the definition that it was made with.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shim import device as devices
from shim.errors import OpshimError
from shim.loading import Identity, user_cache

if TYPE_CHECKING:
    from shim.op import Op

SCHEMA = 1
OWN = Path(__file__).resolve().parents[1] / "certificates"


class Certificate(NamedTuple):
    """What is known of one build on one device, in words; `valid` where it is a proof, `failed` where it is of the
    opposite."""

    words: str = ""
    valid: bool = False
    failed: bool = False


NOT_ASKED = Certificate()  # of what needs none: the reference, and what cannot serve anyway


def folders() -> list[Path]:
    """Where certificates are looked for, in order; the first is where they are written."""
    given = os.environ.get("OPSHIM_CERTIFICATES")
    return list(dict.fromkeys([Path(given).absolute() if given else user_cache() / "certificates", OWN]))


def path(folder: Path, fingerprint: str, op: str, provider: str, build: str) -> Path:
    return folder / fingerprint / _file(op, provider, build)


def native_build(identity: Mapping) -> dict[str, str]:
    """The build of a native library, from the identity that stands inside it or that it would be built with."""
    parts = {name: identity.get(name) for name in ("source", "flags", "compiler", "arch")}
    return {"identity": Identity(**parts).key, **parts}


def python_build(function: Callable) -> dict[str, str]:
    """The build of a Python function; empty where it has no file (then nothing can be proven of it)."""
    function = inspect.unwrap(function)
    file = Path(getattr(getattr(function, "__code__", None), "co_filename", ""))
    if not file.is_file():
        return {}
    version = str(getattr(function, "__globals__", {}).get("BUILD", ""))
    digest = sha256(file.read_bytes() + version.encode()).hexdigest()[:16]
    return {"identity": digest, "file": file.name} | ({"version": version} if version else {})


def find(op: Op, provider: str, device: str, build: Mapping[str, str]) -> Certificate:
    """What is known of this build of the op's provider on that device type. Never raises."""
    try:
        fingerprint = devices.describe(device).fingerprint
        return _find(op, provider, fingerprint, build.get("identity"), python_build(op.reference).get("identity"))
    except (OSError, OpshimError) as error:
        return Certificate(f"not certified: {error}")


def _find(op: Op, provider: str, fingerprint: str, build: str | None, reference: str | None) -> Certificate:
    any_build = _file(op.name, provider, "*")
    problems = []
    for record in (_read(file) for folder in folders() for file in sorted((folder / fingerprint).glob(any_build))):
        if isinstance(record, str):
            problems.append(record)
        elif record is None or record["provider"] != provider:  # as a file of provider "p.q" looks like one of "p"
            continue
        elif (record["build"]["identity"], record["reference"]) == (build, reference):
            return _told(record)
        elif record["verdict"] == "pass":
            other = "build" if record["build"]["identity"] != build else "version of the reference"
            problems.append(f"certificate is for another {other}")
    if not problems:
        others = {at.parent.name for folder in folders() for at in folder.glob(f"*/{any_build}")} - {fingerprint}
        problems += [f"certificate is for another device ({', '.join(sorted(others))})"] if others else []
    return Certificate("; ".join(dict.fromkeys(problems)) or "not certified")


def findings(device: str) -> list[tuple[Path, str]]:
    """What there is for that device type in each folder, in words."""
    try:
        fingerprint = devices.describe(device).fingerprint
    except OpshimError as error:
        return [(folder, str(error)) for folder in folders()]
    return [(folder, _counted(folder / fingerprint) if folder.is_dir() else "not there") for folder in folders()]


def _counted(folder: Path) -> str:
    records = [_read(file) for file in folder.glob("*.json")]
    passed = sum(isinstance(record, dict) and record["verdict"] == "pass" for record in records)
    others = f", {len(records) - passed} of failures" if len(records) > passed else ""
    return f"{passed or 'none'} for {folder.name}{others}"


def _file(op: str, provider: str, build: str) -> str:
    return f"{op}.{provider.replace(':', '-').replace('/', '-')}.{build}.json"


def _read(file: Path) -> dict | str | None:
    """The record in a file, None where there is no file, or why it is not to be read."""
    try:
        record = json.loads(file.read_text())
        if record["schema"] != SCHEMA:
            return f"unreadable certificate: {file.name} is of schema {record['schema']}, this is {SCHEMA}"
        for name in ("provider", "verdict", "reference", "level", "date", "cases"):
            record[name]
        record["build"]["identity"], record["cases"]["failed"], sum(record["cases"].values())
        return record
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        return f"unreadable certificate: {file}: {error}"
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        return f"unreadable certificate: {file} is of another shape ({type(error).__name__}: {error})"


def _told(record: dict) -> Certificate:
    when = f"{str(record['date'])[:10]} ({record['level']})"
    if record["verdict"] == "pass":
        return Certificate(f"certified {when}", True)
    failed = record["cases"]["failed"]
    return Certificate(
        f"not certified: {failed} of {sum(record['cases'].values())} cases failed {when}", failed=failed > 0
    )
