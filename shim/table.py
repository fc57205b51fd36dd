"""The chain table: which implementation serves each op, and why not the others; for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shim import certificates
from shim.loading import NativeLibrary, shown

if TYPE_CHECKING:
    from shim.dispatch import Chain


UNASKED = "serves only by explicit choice"  # the reason of a candidate that nobody chose


def text(chains: Sequence[Chain]) -> str:
    """A headline per op and a line per candidate; then those that have no line, as nobody chose them, and the search
    paths of libraries and certificates."""
    told = {chain: [one for one in chain.candidates if one.reason != UNASKED] for chain in chains}
    unasked = dict.fromkeys(one.label for chain in chains for one in chain.candidates if one.reason == UNASKED)
    rows = [(one.label, one.state) for candidates in told.values() for one in candidates]
    label, state = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
    lines = []
    for chain in chains:
        lines.append(f"{chain.op.name}   {chain.device}")
        for one in told[chain]:
            lines.append(f"  {one.label:{label}}  {one.state:{state}}  {one.told}".rstrip())
    if unasked:
        lines.append(f"not listed above, as each {UNASKED} (--provider OP=PROVIDER): {', '.join(unasked)}")
    places = {library.spec.filename: library.findings() for library in _libraries(chains)}
    for device in dict.fromkeys(chain.device for chain in chains):
        places[f"certificates ({device})"] = certificates.findings(device)
    for what, findings in places.items():
        findings = [(shown(path), words) for path, words in findings]
        width = max(len(path) for path, _ in findings)
        lines.append(f"search path of {what}")
        lines += [f"  {path:{width}}  {words}" for path, words in findings]
    return "\n".join(lines)


def as_dict(chains: Sequence[Chain]) -> dict:
    """The same, ready for JSON."""
    return {
        "policy": chains[0].policy.mode if chains else None,
        "ops": [
            {
                "op": chain.op.name,
                "device": chain.device,
                "selected": chain.selected and chain.selected.label,
                "candidates": [one.as_dict() for one in chain.candidates],
            }
            for chain in chains
        ],
        "libraries": [
            {
                "library": library.spec.filename,
                "places": [{"path": str(path), "finding": words} for path, words in library.findings()],
            }
            for library in _libraries(chains)
        ],
    }


def _libraries(chains: Sequence[Chain]) -> list[NativeLibrary]:
    return list({id(library): library for chain in chains for library in chain.libraries()}.values())
