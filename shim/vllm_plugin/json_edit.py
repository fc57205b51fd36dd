"""One member of a JSON text changed, and not a byte beside it: an image in a request is never encoded again, and what
JSON libraries disagree about (the digits of a number, a name given twice) stays as the client wrote it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")


def with_member(text: str, name: str, value: str) -> str:
    """The text of a JSON object in which a member has another value, itself a JSON text; added last where it was not.
    Of several members of that name, which only the last counts of, the last is changed."""
    spans = list(_members(text))
    for key, start, end in reversed(spans):
        if key == name:
            return text[:start] + value + text[end:]
    at = spans[-1][2] if spans else _after(text, 0) + 1
    return f"{text[:at]}{', ' if spans else ''}{json.dumps(name)}: {value}{text[at:]}"


def member(text: str, name: str) -> str | None:
    """The text of a member's value; None where the object has no such member."""
    found = [text[start:end] for key, start, end in _members(text) if key == name]
    return found[-1] if found else None


def _members(text: str) -> Iterator[tuple[str, int, int]]:
    """Name, start and end of the value of each member of a valid JSON object."""
    at = _after(text, _after(text, 0) + 1)
    while text[at] != "}":
        name, at = _DECODER.raw_decode(text, at)
        start = _after(text, _after(text, at) + 1)
        end = _DECODER.raw_decode(text, start)[1]
        yield name, start, end
        at = _after(text, end)
        at = _after(text, at + (text[at] == ","))


def _after(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()
