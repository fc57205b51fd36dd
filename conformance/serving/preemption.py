"""Answers under preemption: `python -m conformance.serving.preemption BLOCKS OUT`.

Several requests at once in a cache of so few blocks that some are thrown out on their way, their state with them, and
computed anew; then each on its own. The result is JSON: how often that happened, and the tokens of both.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from conformance.serving.engines import MODEL

PROMPTS = ["Once upon a time", "The capital of Italy is", "Hello, my name is", "def ", "Monday, Tuesday,", "One, two,"]
TOKENS = 264  # more than a block of the cache, of 256 tokens here


def answers(blocks: int) -> dict:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(MODEL),
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        num_gpu_blocks_override=blocks,
        enable_prefix_caching=True,
        disable_log_stats=False,
    )
    greedy = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)

    def asked(*prompts):
        return [list(output.outputs[0].token_ids) for output in llm.generate(list(prompts), greedy, use_tqdm=False)]

    together = asked(*PROMPTS)
    preempted = [one.value for one in llm.get_metrics() if one.name == "vllm:num_preemptions"]
    return {"preempted": sum(preempted), "together": together, "alone": [asked(prompt)[0] for prompt in PROMPTS]}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(answers(int(sys.argv[1]))))
