"""What a model makes of some texts in one process: `python -m conformance.serving.score MODEL DTYPE OUT`.

Policy and plugin come from the environment, so the same program runs native, reference and stock vLLM. The result is
JSON: per text the tokens with their log-probabilities (teacher-forced), per prompt the greedy tokens, and the calls that
each implementation answered.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [text.strip() for text in (ROOT / "models/train/heldout.txt").read_text().split("\n=====\n")[:6]]
PROMPTS = ["Once upon a time", "The capital of Italy is", "Hello, my name is", "def "]
TOP = 5


def score(model: str, dtype: str) -> dict:
    from vllm import LLM, SamplingParams

    llm = LLM(model=model, dtype=dtype, enforce_eager=True, max_model_len=1024, disable_log_stats=True)
    forced = llm.generate(TEXTS, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=TOP), use_tqdm=False)
    greedy = llm.generate(PROMPTS, SamplingParams(max_tokens=48, temperature=0), use_tqdm=False)
    texts = [
        positions(
            output.prompt_token_ids, [at and {t: p.logprob for t, p in at.items()} for at in output.prompt_logprobs]
        )
        for output in forced
    ]
    return {"texts": texts, "greedy": [list(output.outputs[0].token_ids) for output in greedy], "calls": _calls()}


def positions(tokens: list[int], logprobs: list[dict | None]) -> list[dict]:
    """One entry per token after the first: the token, and the log-probabilities known there (its own and the top)."""
    return [
        {"token": token, "logprobs": {int(name): value for name, value in known.items()}}
        for token, known in zip(tokens, logprobs)
        if known
    ]


def _calls() -> list:
    if "shim.health" not in sys.modules:
        return []
    return [list(row[:6]) for row in sys.modules["shim.health"].summary()]


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: python -m conformance.serving.score MODEL DTYPE OUT.json")
    model, dtype, out = sys.argv[1:]
    Path(out).write_text(json.dumps(score(model, dtype)))
