"""vLLM with opshim and without, in turns: how long it takes to start, and what it answers in a second.

    python -m conformance.perf.end_to_end --json OUT.json                            on a GPU: layers of real size
    python -m conformance.perf.end_to_end --model models/opshim-tiny --requests 4 --tokens-in 64 --tokens-out 16

Without a model, one of eight layers of Qwen3.5-35B-A3B's sizes is made up (dummy weights; with so few, the host takes
longer for a step of one request than the GPU, which --layers 24 changes). Each of the two is an engine of its own with
empty compile caches, unless --caches names a folder that an earlier run has filled. They start one after the other, the
second while the first is idle in memory, and then measure round by round (shim, stock, stock, shim, ...): a host whose
speed changes within minutes changes it for both, and what counts is the ratio of a round. The first round of each meets
what is compiled late. An idle engine takes next to no time from the other: its processes block, workers that are
processes of their own (on CPUs) a second after their last step, which is why each round begins with a rest.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import count, cycle, islice
from pathlib import Path
from select import select
from statistics import median

import click

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "models" / "opshim-tiny"
CACHES = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
SIDES = {
    "shim": {"OPSHIM_POLICY": "strict", "VLLM_USE_FLASHINFER_SAMPLER": os.environ.get("VLLM_USE_FLASHINFER_SAMPLER", "0")},
    "stock": {"VLLM_PLUGINS": ""},
}
ENGINE = [sys.executable, "-m", "conformance.perf.end_to_end", "measure"]
REST = 1.5  # seconds before each round: vLLM's SpinCondition spins for one
SHARE = 0.4  # of the GPU's memory, for each engine
PATIENCE = 30.0  # seconds that an engine has for its end
LATE = "JIT compilation during inference"  # what vLLM says of a kernel that is compiled after the start
REAL = {
    "vocab_size": 151936, "hidden_size": 2048, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_experts": 256, "num_experts_per_tok": 8,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "intermediate_size": 512,
    "max_position_embeddings": 4096,
}  # fmt: skip


def made_up(folder: Path, layers: int) -> Path:
    """A model without weights: the bundled one's architecture at real sizes, its pattern of layers over and over."""
    config = json.loads((TINY / "config.json").read_text())
    config |= REAL | {"num_hidden_layers": layers, "layer_types": list(islice(cycle(config["layer_types"]), layers))}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def measure(model: str, requests: int, tokens_in: int, tokens_out: int) -> None:
    """In the process that is measured, which began at OPSHIM_BEGAN: an answer once it is ready and one to each line.

    Answers are lines of JSON on the stdout that it began with; what vLLM prints there joins stderr.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams

    dummy = not list(Path(model).glob("*.safetensors"))
    llm = LLM(
        model=model,
        load_format="dummy" if dummy else "auto",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=2 * (tokens_in + tokens_out),
        max_num_seqs=requests,
        gpu_memory_utilization=SHARE,
        additional_config={"gdn_prefill_backend": "triton"},  # of vLLM's own, the one that nvcc need not compile first
    )
    ready = {"ready_s": time.time() - float(os.environ["OPSHIM_BEGAN"])}
    fresh = count()  # no prompt comes twice: some versions of vLLM would find it in the prefix cache

    def seconds(several: int, out: int) -> float:
        prompts = [[(7 * k + 13 * i) % 1000 + 3 for i in range(tokens_in)] for k in islice(fresh, several)]
        greedy = SamplingParams(max_tokens=out, temperature=0, ignore_eos=True, detokenize=False)
        begun = time.perf_counter()
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False)
        return time.perf_counter() - begun

    print(json.dumps(ready), file=answers, flush=True)
    for _ in sys.stdin:
        figures = {
            "tokens_per_s": requests * tokens_out / seconds(requests, tokens_out),
            "tokens_per_s_of_one": tokens_out / seconds(1, tokens_out),
            "first_token_ms": 1e3 * seconds(1, 1),
        }
        print(json.dumps(figures), file=answers, flush=True)


class Side:
    """An engine with opshim or without, in a session of its own. Should this process be killed, it ends by EOF."""

    def __init__(self, name: str, given: list[str], caches: Path, log: Path, timeout: float):
        self.name, self.log, self.timeout = name, log, timeout
        environment = {key: value for key, value in os.environ.items() if not key.startswith("OPSHIM_P")}
        environment |= {cache: str(caches / cache.lower()) for cache in CACHES} | SIDES[name]
        environment |= {"OPSHIM_BEGAN": str(time.time()), "VLLM_NO_USAGE_STATS": "1"}
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # without a GPU: GiB
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
        with log.open("w") as words:
            how = {"cwd": ROOT, "env": environment, "stderr": words, "start_new_session": True}
            self.child = subprocess.Popen([*ENGINE, *given], **pipes, **how)

    def end(self) -> None:
        """With time for what vLLM has in shared memory to be removed."""
        self.child.stdin.close()
        with suppress(ProcessLookupError):  # once nobody is left of the session
            try:
                os.killpg(self.child.pid, signal.SIGTERM)
                until = time.monotonic() + PATIENCE
                while time.monotonic() < until:
                    self.child.poll()
                    os.killpg(self.child.pid, 0)
                    time.sleep(0.1)
            finally:
                os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()

    def answer(self) -> dict:
        """The next one, or what was wrong with the end of the log."""
        why, until = f"had no answer within {self.timeout:.0f} s", time.monotonic() + self.timeout
        while time.monotonic() < until:
            heard, _, _ = select([self.child.stdout], [], [], 1.0)
            if heard and (line := self.child.stdout.readline()):
                return json.loads(line)
            if heard or self.child.poll() is not None:  # the latter as a process that it leaves may hold the pipe
                with suppress(subprocess.TimeoutExpired):
                    why = f"ended with code {self.child.wait(PATIENCE)}"
                break
        raise click.ClickException(f"{self.name} {why}; {self.log}:\n{self.log.read_text()[-3000:]}")

    def round(self) -> dict:
        with suppress(BrokenPipeError):  # then there is no answer
            self.child.stdin.write(b"round\n")
        return self.answer()


def turns(rounds: int) -> Iterator[str]:
    """Whose turn it is: who was first in a round is second in the next."""
    for one in range(rounds):
        yield from list(SIDES)[:: -1 if one % 2 else 1]


def compare(given: list[str], rounds: int, timeout: float, caches: Path, logs: Path) -> dict[str, dict]:
    """What both sides find, and how often vLLM said LATE meanwhile: in LOGS/NAME.log. Of each, CACHES/NAME."""
    sides, found = {}, {}
    with ExitStack() as ending:
        for name in SIDES:
            sides[name] = Side(name, given, caches / name, logs / f"{name}.log", timeout)
            ending.callback(sides[name].end)
            found[name] = sides[name].answer()
            print(f"{name}: {json.dumps(found[name])}", file=sys.stderr, flush=True)
        for name in turns(rounds):
            time.sleep(REST)
            figures = sides[name].round()
            print(f"{name}: {json.dumps(figures)}", file=sys.stderr, flush=True)
            for key, value in figures.items():
                found[name].setdefault(key, []).append(value)
    return {name: one | {"compiled_late": sides[name].log.read_text().count(LATE)} for name, one in found.items()}


def table(found: dict[str, dict]) -> str:
    """Of each figure the median and, as hosts only ever make it worse, the best; and shim over stock by rounds."""
    words = {
        "ready_s": ("ready, s after the process began", min, "{:.1f}"),
        "compiled_late": ("kernels compiled after that", min, "{:.0f}"),
        "tokens_per_s": ("output tokens/s, all requests at once", max, "{:.0f}"),
        "tokens_per_s_of_one": ("output tokens/s, one request", max, "{:.0f}"),
        "first_token_ms": ("time to first token, ms", min, "{:.1f}"),
    }
    lines = ["| median (best) of the rounds | shim | stock | shim/stock in a round: median (range) |"]
    lines += ["|---|---:|---:|---:|"]
    for key, (what, best, shape) in words.items():
        shim, stock = (value if isinstance(value := found[name][key], list) else [value] for name in SIDES)
        ratios = [one / other for one, other in zip(shim, stock, strict=True) if other]
        cells = [_cell(shape, values, best(values)) for values in (shim, stock)]
        cells += [_cell("{:.2f}", ratios, min(ratios), max(ratios)) if ratios else ""]
        lines.append(f"| {what} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(shape: str, values: list[float], *beside: float) -> str:
    more = f" ({' to '.join(map(shape.format, beside))})" if len(values) > 1 else ""
    return shape.format(median(values)) + more


@click.command()
@click.option("--model", type=click.Path(exists=True, file_okay=False), help="Default: made up, of real size.")
@click.option("--layers", type=click.IntRange(4), help="Of the model that is made up.  [default: 8]")
@click.option("--requests", default=64, show_default=True, help="At once.")
@click.option("--tokens-in", default=1024, show_default=True)
@click.option("--tokens-out", default=128, show_default=True)
@click.option("--times", default=6, show_default=True, type=click.IntRange(1), help="Rounds of each side.")
@click.option("--timeout", default=900.0, show_default=True, help="Seconds for a side's start and for each round.")
@click.option("--caches", type=click.Path(file_okay=False, path_type=Path), help="Compile caches stay in this folder.")
@click.option("--keep-logs", type=click.Path(file_okay=False, path_type=Path), help="vLLM's logs stay in this folder.")
@click.option("--json", "out", type=click.Path(dir_okay=False, path_type=Path), help="Write all measurements here.")
def main(model, layers, requests, tokens_in, tokens_out, times, timeout, caches, keep_logs, out) -> None:
    if model and layers:
        raise click.UsageError("--layers is of the model that is made up, not of --model")
    layers = layers or 8
    with tempfile.TemporaryDirectory(prefix="opshim-end-to-end-", ignore_cleanup_errors=True) as name:
        folder, logs = Path(name), keep_logs or Path(name)
        logs.mkdir(parents=True, exist_ok=True)
        caches = caches or folder / "caches"
        state = "filled" if all((caches / side).exists() for side in SIDES) else "empty"
        given = [model or str(made_up(folder, layers)), *map(str, (requests, tokens_in, tokens_out))]
        found = compare(given, times, timeout, caches.resolve(), logs)
    print(table(found))
    if out:
        import torch

        from conformance.perf.bench import about  # only now, as torch would hold memory of the GPU meanwhile

        device = "cuda" if torch.cuda.is_available() else "cpu"
        sizes = {"requests": requests, "tokens_in": tokens_in, "tokens_out": tokens_out}
        sizes["model"] = model or REAL | {"num_hidden_layers": layers}
        told = about(device) | {"caches": state, "sizes": sizes, **found}
        out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        path, *sizes = sys.argv[2:]
        measure(path, *map(int, sizes))
    else:
        signal.signal(signal.SIGTERM, lambda which, _: sys.exit(128 + which))  # not without ending both sides
        main()
