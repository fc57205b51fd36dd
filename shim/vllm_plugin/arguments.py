"""What vLLM itself makes of the arguments of `serve`: its own parser, its loader of the tokenizer, its checks of a
server and what it configures its engine with are asked, in this order. No model is loaded.

`python -m shim.vllm_plugin.arguments MODEL OPTIONS...` ends with 0, or with 1 and a last line of what is wrong, as
"options: ...", "tokenizer: ..." or "engine: ...". vLLM's imports take it ten seconds, so that what has passed is
written down.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from glob import escape, glob
from hashlib import sha256
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

from shim.errors import OpshimError
from shim.loading import user_cache
from shim.vllm_plugin import launch
from shim.vllm_plugin.model_class import Check, installed

DECISIVE = ("VLLM_", "OPSHIM_", "CUDA_", "HF_")  # variables that such begin with may change the verdict


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
    """On a model's path and options, in an environment: those that vLLM will be started with."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]):
        decisive = (f"{name}={environment[name]}" for name in sorted(environment) if name.startswith(DECISIVE))
        known = "\0".join([installed(), *arguments, *decisive, *map(str, _files(arguments))])
        note = user_cache() / "arguments" / sha256(known.encode(errors="surrogateescape")).hexdigest()[:16]
        super().__init__(note, ["-m", __name__, *arguments], {**environment, "VLLM_LOGGING_LEVEL": "ERROR"})


def _files(arguments: Sequence[str]) -> Iterator[tuple]:
    """Each file that is named, or lies in a folder that is: its size and age."""
    for name in (text.rpartition("=")[2] for text in arguments):
        for file in sorted(glob(f"{escape(name)}/*")) if os.path.isdir(name) else [name]:
            if os.path.isfile(file):
                yield file, os.path.getsize(file), os.path.getmtime(file)


def problem(arguments: Sequence[str], *more: Callable[[Namespace], str | None]) -> str | None:
    """What vLLM would refuse, in one line; None where it would go on. `more` is asked of what passes its parser."""
    from vllm.entrypoints.cli.serve import cmd_init
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
    return next(filter(None, (ask(args) for ask in (tokenizer, *more))), None)


def tokenizer(args: Namespace) -> str | None:
    from vllm.tokenizers import cached_tokenizer_from_config

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
        found = cached_tokenizer_from_config(asked)
    except Exception as error:  # noqa: BLE001
        return f"tokenizer: {_culprit(asked.tokenizer)}: {_gist(error)}"
    if found is not None and not found.encode("a", add_special_tokens=False):  # made by transformers of no file
        return f"tokenizer: {asked.tokenizer}: its files are missing, or know no words"
    return None


def engine(args: Namespace) -> str | None:
    """As vLLM's own `serve` goes on, up to the engine. It changes the process: hooks and variables are set."""
    from vllm import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import setup_server
    from vllm.usage.usage_lib import UsageContext

    # What another version has elsewhere, or takes otherwise, ends this process unanswered: nothing is refused for that.
    server = sys.modules[setup_server.__module__]
    asked = {"usage_context": UsageContext.OPENAI_API_SERVER, "headless": args.headless}
    signature(AsyncEngineArgs.create_engine_config).bind(None, **asked)
    check = server.validate_api_server_args
    plugins = (
        (server.ToolParserManager.import_tool_parser, args.tool_parser_plugin),
        (server.ReasoningParserManager.import_reasoning_parser, args.reasoning_parser_plugin),
    )
    args.model = args.model_tag
    try:
        for load, file in plugins:
            if file and len(file) > 3:  # vLLM's own rule
                load(file)
        check(args)
        AsyncEngineArgs.from_cli_args(args).create_engine_config(**asked)
    except Exception as error:  # noqa: BLE001
        return f"engine: {_gist(error)}"
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
    from pydantic import ValidationError  # vLLM's, which has been imported

    if isinstance(error, ValidationError):  # its own text is of values, and where to read more
        parts = [[*map(str, one["loc"]), one["msg"].removeprefix("Value error, ")] for one in error.errors()]
        return " ".join("; ".join(map(": ".join, parts)).split())
    text = " ".join(str(error).split())
    return text if isinstance(error, OpshimError) else f"{type(error).__name__}: {text}"


if __name__ == "__main__":
    launch.name_distribution()
    found = problem(sys.argv[1:], engine)
    if found is not None:
        print(found, flush=True)
        os._exit(1)  # so that nobody has a later word
