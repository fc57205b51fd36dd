"""What every command does first: all ops and providers registered, the policy checked and put in force."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import opshim  # noqa: F401 - registers every op and its native implementations
from shim import dispatch, plugins, table
from shim import policy as policies
from shim.device import DEVICES
from shim.errors import OpshimError, UnknownNameError
from shim.policy import Policy


def prepare(
    mode: str | None = None, choices: Iterable[str] = (), files: Iterable[str] = (), require_certified: bool = False
) -> Policy:
    """Loads provider files and installed providers, then puts the policy in force: arguments first, then the
    environment. What is wrong is raised as an OpshimError before anything runs."""
    policy = Policy.parse(mode, choices, require_certified=require_certified)
    for file in files:
        plugins.load_file(file)
    plugins.load_all()
    policy.validate()
    policies.set_policy(policy)
    return policy


def environment(policy: Policy, files: Iterable[str]) -> dict[str, str]:
    """The variables that make a child process prepare itself the same way; OpshimError for a file that they cannot
    name."""
    listed = [str(Path(file).resolve()) for file in files]
    for file in listed:
        if os.pathsep in file:
            why = f"no '{os.pathsep}' may be in its path, as OPSHIM_PROVIDER_FILES is split there"
            raise OpshimError(f"provider file {file}: {why}")
    inherited = os.environ.get("OPSHIM_PROVIDER_FILES")
    return policy.environment() | {"OPSHIM_PROVIDER_FILES": os.pathsep.join(listed + [inherited] * bool(inherited))}


def chain_table(
    policy: str | None = None,
    providers: Iterable[str] = (),
    provider_files: Iterable[str] = (),
    device: str = "cpu",
    as_json: bool = False,
) -> str:
    """The chains of all ops on a device, as a table or as JSON."""
    if device not in DEVICES:
        raise UnknownNameError("device", device, DEVICES)
    prepare(policy, providers, provider_files)
    chains = dispatch.resolve(device=device)
    return json.dumps(table.as_dict(chains), indent=2) if as_json else table.text(chains)
