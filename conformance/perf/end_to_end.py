"""vLLM with opshim and without, one after the other: how long it takes to start, and what it answers in a second.

    python -m conformance.perf.end_to_end --json OUT.json                            on a GPU: layers of real size
    python -m conformance.perf.end_to_end --model models/opshim-tiny --requests 4 --tokens-in 64 --tokens-out 16

Without a model, one of eight layers of Qwen3.5-35B-A3B's sizes is made up (dummy weights). Each of the two is a process
of its own with empty compile caches. Every request is measured several times, as the first ones meet what is compiled
late, and hosts are noisy.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "models" / "opshim-tiny"
CACHES = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
SIDES = {
    "shim": {"OPSHIM_POLICY": "strict", "VLLM_USE_FLASHINFER_SAMPLER": os.environ.get("VLLM_USE_FLASHINFER_SAMPLER", "0")},
    "stock": {"VLLM_PLUGINS": ""},
}
LATE = "JIT compilation during inference"  # what vLLM says of a kernel that is compiled after the start
REAL = {
    "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_experts": 256, "num_experts_per_tok": 8,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "intermediate_size": 512,
    "max_position_embeddings": 4096,
}  # fmt: skip


def made_up(folder: Path) -> Path:
    """A model without weights: the bundled one's architecture at real sizes, its pattern of layers twice."""
    config = json.loads((TINY / "config.json").read_text())
    config |= REAL | {"layer_types": 2 * config["layer_types"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def measure(model: str, requests: int, tokens_in: int, tokens_out: int, times: int) -> dict:
    """In the process that is measured, which began at OPSHIM_BEGAN."""
    from vllm import LLM, SamplingParams

    dummy = not list(Path(model).glob("*.safetensors"))
    llm = LLM(
        model=model,
        load_format="dummy" if dummy else "auto",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=2 * (tokens_in + tokens_out),
        max_num_seqs=requests,
        additional_config={"gdn_prefill_backend": "triton"},  # of vLLM's own, the one that nvcc need not compile first
    )
    ready = time.time() - float(os.environ["OPSHIM_BEGAN"])

    def seconds(count: int, out: int) -> float:
        prompts = [[(7 * k + 13 * i) % 1000 + 3 for i in range(tokens_in)] for k in range(count)]
        greedy = SamplingParams(max_tokens=out, temperature=0, ignore_eos=True, detokenize=False)
        begun = time.perf_counter()
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False)
        return time.perf_counter() - begun

    return {
        "ready_s": ready,
        "tokens_per_s": [requests * tokens_out / seconds(requests, tokens_out) for _ in range(times)],
        "tokens_per_s_of_one": [tokens_out / seconds(1, tokens_out) for _ in range(times)],
        "first_token_ms": [1e3 * seconds(1, 1) for _ in range(times)],
    }


def side(name: str, given: list[str], folder: Path, timeout: float) -> dict:
    """What measure() finds with opshim or without, and what vLLM said meanwhile: in FOLDER/NAME.log."""
    caches = {cache: str(folder / name / cache.lower()) for cache in CACHES}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("OPSHIM_P")}
    environment |= caches | SIDES[name] | {"OPSHIM_BEGAN": str(time.time()), "VLLM_NO_USAGE_STATS": "1"}
    out, log = folder / f"{name}.json", folder / f"{name}.log"
    with log.open("w") as words:
        command = [sys.executable, "-m", "conformance.perf.end_to_end", "measure", str(out), *given]
        how = {"stdout": words, "stderr": subprocess.STDOUT, "timeout": timeout}
        done = subprocess.run(command, check=False, cwd=ROOT, env=environment, **how)
    if done.returncode:
        raise click.ClickException(f"{name} ended with code {done.returncode}; {log}:\n{log.read_text()[-3000:]}")
    return json.loads(out.read_text()) | {"compiled_late": log.read_text().count(LATE)}


def table(found: dict[str, dict]) -> str:
    """Of each figure the best, as hosts only ever make it worse, and shim over stock."""
    words = {
        "ready_s": ("ready, s after the process began", min, "{:.1f}"),
        "compiled_late": ("kernels compiled after that", min, "{:.0f}"),
        "tokens_per_s": ("output tokens/s, all requests at once", max, "{:.0f}"),
        "tokens_per_s_of_one": ("output tokens/s, one request", max, "{:.0f}"),
        "first_token_ms": ("time to first token, ms", min, "{:.1f}"),
    }
    lines = ["| best of each | shim | stock | ratio |", "|---|---:|---:|---:|"]
    for key, (what, best, shape) in words.items():
        shim, stock = (best(value) if isinstance(value := found[name][key], list) else value for name in SIDES)
        lines.append(f"| {what} | {shape.format(shim)} | {shape.format(stock)} | {f'{shim / stock:.2f}' if stock else ''} |")
    return "\n".join(lines)


@click.command()
@click.option("--model", type=click.Path(exists=True, file_okay=False), help="Default: made up, of real size.")
@click.option("--requests", default=64, show_default=True, help="At once.")
@click.option("--tokens-in", default=1024, show_default=True)
@click.option("--tokens-out", default=128, show_default=True)
@click.option("--times", default=4, show_default=True, help="Measurements of each kind.")
@click.option("--timeout", default=900.0, show_default=True, help="Seconds for each side.")
@click.option("--json", "out", type=click.Path(dir_okay=False, path_type=Path), help="Write all measurements here.")
def main(model, requests, tokens_in, tokens_out, times, timeout, out) -> None:
    with tempfile.TemporaryDirectory(prefix="opshim-end-to-end-") as name:
        folder = Path(name)
        given = [model or str(made_up(folder)), *map(str, (requests, tokens_in, tokens_out, times))]
        found = {}
        for one in SIDES:
            found[one] = side(one, given, folder, timeout)
            print(f"{one}: {json.dumps(found[one])}", file=sys.stderr, flush=True)
    print(table(found))
    if out:
        sizes = {"requests": requests, "tokens_in": tokens_in, "tokens_out": tokens_out, "model": model or REAL}
        out.write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), "sizes": sizes, **found}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        result, path, *sizes = sys.argv[2:]
        Path(result).write_text(json.dumps(measure(path, *map(int, sizes))))
    else:
        main()
