"""vLLM's own options as they were given to `serve`, read as vLLM reads them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from shim.errors import OpshimError

TENSOR, PIPELINE = ("--tensor-parallel-size", "-tp"), ("--pipeline-parallel-size", "-pp")
DATA = ("--data-parallel-size", "-dp")
SECRETS = ("--api-key", "--hf-token")


class Options:
    """vLLM's own options as given: "--name value", "--name=value" or "--name", with "_" or "-"."""

    def __init__(self, given: Sequence[str]):
        self.given = list(given)

    def get(self, *names: str) -> str | None:
        """The value of an option under any of its names, the last where there are several; "" for one without a value,
        None where it was not given. "--x.y" is the field y of --x, whether x was given as JSON or field by field."""
        taken_back = [name.replace("--no-", "--") if "--no-" in name else name.replace("--", "--no-") for name in names]
        for name, value in reversed(list(self._folded())):
            if name in names:
                return value
            if name in taken_back:
                return None
        for option, field in (name.split(".") for name in names if "." in name):
            value = self.fields(option).get(field)
            if value is not None:
                return value if isinstance(value, str) else json.dumps(value)
        return None

    def fields(self, *names: str) -> dict:
        """Of an option whose value is a JSON object; none where it was not given, or is no such thing."""
        found = _parsed(self.get(*names) or "")
        return found if isinstance(found, dict) else {}

    def whole(self, default: int, *names: str) -> int:
        """The value of an option that is a whole number; OpshimError for one that is none."""
        given = self.get(*names)
        if given is None:
            return default
        if not re.fullmatch(r"[1-9]\d*", given):
            raise OpshimError(f"{names[0]} must be a whole number from 1 on, got {given or 'nothing'!r}")
        return int(given)

    def __contains__(self, name: str) -> bool:
        return self.get(name) is not None

    @property
    def generates(self) -> bool:
        """Whether vLLM is to answer with tokens, not with vectors."""
        return self.get("--runner") != "pooling" and self.get("--convert") in (None, "auto", "none")

    @property
    def dummy(self) -> bool:
        """Whether vLLM is to make weights up, instead of loading them."""
        return self.get("--load-format") == "dummy"

    def remove(self, name: str) -> None:
        """An option that is followed by its value, if it was given."""
        if name in self.given:
            at = self.given.index(name)
            del self.given[at : at + 2]

    def _folded(self) -> Iterator[tuple[str, str]]:
        """Names and values. What was given field by field ("--x.y.z 1") is one JSON at the end, as vLLM folds it."""
        objects: dict[str, dict] = {}
        for at, text in enumerate(self.given):
            if not re.match(r"-\D", text):
                continue
            name, equals, value = text.partition("=")
            if not equals:
                follows = next(iter(self.given[at + 1 : at + 2]), "-")
                value = follows if re.match(r"[^-]|-\d", follows) else ""
            name, *path = name.split(".")
            if path:
                _put(objects.setdefault(name.replace("_", "-"), {}), path, value)
                continue
            if re.match(r"-[^-]", text):
                yield text[:2], text[2:]  # "-qawq"
            yield name.replace("_", "-"), value
        yield from ((name, json.dumps(fields)) for name, fields in objects.items())


def without_secrets(arguments: Sequence[str]) -> Iterator[str]:
    """The same with *** for keys and tokens, which a log is not to hold."""
    secret = False
    for text in arguments:
        name, equals, _ = text.partition("=")
        if re.match(r"-\D", text):
            secret = name.replace("_", "-") in SECRETS
            yield f"{name}=***" if secret and equals else text
        else:
            yield "***" if secret else text


def _put(fields: dict, path: Sequence[str], value: str) -> None:
    *outer, last = path
    for name in outer:
        inner = fields.get(name)
        fields[name] = fields = inner if isinstance(inner, dict) else {}
    if last.endswith("+"):  # of a list
        fields[last[:-1]] = value.split(",")
    else:
        fields[last] = _parsed(value)


def _parsed(text: str):
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
