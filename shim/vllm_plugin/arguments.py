"""What vLLM itself makes of the arguments of `serve`, and of the tokenizer: its own parser and loader are asked.

`python -m shim.vllm_plugin.arguments MODEL OPTIONS...` ends with 0, or with 1 and a last line of what is wrong, as
"options: ..." or "tokenizer: ...". vLLM's imports take it ten seconds, so that what has passed is written down.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from glob import escape, glob
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

from shim.errors import OpshimError
from shim.loading import user_cache
from shim.vllm_plugin.model_class import Check, installed


def unfold(given: Sequence[str]) -> list[str]:
    """vLLM's options with what stands in the file of --config in its place: before the others, which win."""
    given = [part for text in given for part in (text.split("=", 1) if text.startswith("--config=") else [text])]
    if "--config" not in given:
        return given
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    pull = getattr(FlexibleArgumentParser(), "_pull_args_from_config", None)
    if pull is None:
        raise OpshimError("--config: this vLLM reads such a file in a way that is not known here; give the options one by one")
    logging.getLogger("vllm.utils.argparse_utils").disabled = True  # it would tell the same error a second time
    file = next(iter(given[given.index("--config") + 1 :]), "")
    try:
        _, _, *unfolded = pull(["serve", "MODEL", *given])
    except AttributeError:  # of what is no mapping
        raise OpshimError(f"--config {file}: expected a line 'option: value' for each option") from None
    except Exception as error:  # noqa: BLE001
        raise OpshimError(f"{f'--config {file}'.strip()}: {_gist(error)}") from None
    if "--config" in unfolded:
        raise OpshimError(f"--config {file}: it names another such file, which vLLM would read unseen")
    return unfolded


class Verdict(Check):
    """On a model's path and vLLM's options."""

    def __init__(self, path: str, given: Sequence[str]):
        arguments = [path, *given]
        environment = {"VLLM_LOGGING_LEVEL": "ERROR"}
        if os.path.isdir(path):
            environment["HF_HUB_OFFLINE"] = os.environ.get("HF_HUB_OFFLINE", "1")  # as serve.vllm_command does
        known = "\0".join([installed(), *arguments, *map(str, _files(arguments))])
        note = user_cache() / "arguments" / sha256(known.encode(errors="surrogateescape")).hexdigest()[:16]
        super().__init__(note, ["-m", __name__, *arguments], environment)


def _files(arguments: Sequence[str]) -> Iterator[tuple]:
    """Each file that is named, or lies in a folder that is: its size and age."""
    for name in (text.rpartition("=")[2] for text in arguments):
        for file in sorted(glob(f"{escape(name)}/*")) if os.path.isdir(name) else [name]:
            if os.path.isfile(file):
                yield file, os.path.getsize(file), os.path.getmtime(file)


def problem(arguments: Sequence[str]) -> str | None:
    """What vLLM would refuse, in one line; None where it would go on."""
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.tokenizers import cached_tokenizer_from_config
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs | {"allow_abbrev": False})  # as launch.py does

        def error(self, message: str):
            raise OpshimError(message)

    parser, (command,) = Parser(prog="vllm"), cmd_init()
    command.subparser_init(parser.add_subparsers())
    try:
        args = parser.parse_args(["serve", *arguments])
        command.validate(args)
    except Exception as error:  # noqa: BLE001
        return f"options: {_gist(error)}"

    own = args.tokenizer is None
    asked = SimpleNamespace(  # the fields of a ModelConfig that a tokenizer depends on
        skip_tokenizer_init=args.skip_tokenizer_init,
        tokenizer=args.model_tag if own else args.tokenizer,
        tokenizer_mode=args.tokenizer_mode.lower(),
        tokenizer_revision=args.tokenizer_revision or args.revision,
        runner_type="pooling" if args.runner == "pooling" else "generate",
        trust_remote_code=args.trust_remote_code,
    )
    try:
        tokenizer = cached_tokenizer_from_config(asked)
    except Exception as error:  # noqa: BLE001
        return f"tokenizer: {_culprit(asked.tokenizer)}: {_gist(error)}"
    if tokenizer is not None and not tokenizer.encode("a", add_special_tokens=False):  # made by transformers of no file
        return f"tokenizer: {asked.tokenizer}: its files are missing, or know no words"
    return None


def _culprit(name: str) -> Path | str:
    """The first file that is not JSON, else the folder or the name."""
    for file in sorted(Path(name).glob("*.json")):
        try:
            json.loads(file.read_bytes())
        except (OSError, ValueError):
            return file
    return name


def _gist(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, OpshimError) else f"{type(error).__name__}: {text}"


if __name__ == "__main__":
    found = problem(sys.argv[1:])
    if found is not None:
        print(found, flush=True)
        os._exit(1)  # so that nobody has a later word
