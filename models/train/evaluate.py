"""What a saved model reached: loss, certainty, and how far its log-probabilities move with the dtype.

    python -m models.train.evaluate models/opshim-tiny
"""

import json
import sys
from dataclasses import fields
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from . import data
from .model import Config, Model

HELDOUT = Path(__file__).parent / "heldout.txt"
SEPARATOR = "\n=====\n"


def load(folder: Path) -> Model:
    """A model from the checkpoint, in float32."""
    settings = json.loads((folder / "config.json").read_text())
    model = Model(Config(**{field.name: settings[field.name] for field in fields(Config)}))
    tensors = load_file(folder / "model.safetensors")
    state = {}
    for name, weight in model.state_dict().items():
        stem, _, kind = name.rpartition(".")
        if kind == "gate_up_proj":
            pairs = [[tensors[f"{stem}.{e}.{part}_proj.weight"] for part in ("gate", "up")] for e in range(len(weight))]
            state[name] = torch.stack([torch.cat(pair) for pair in pairs])
        elif kind == "down_proj":
            state[name] = torch.stack([tensors[f"{stem}.{e}.down_proj.weight"] for e in range(len(weight))])
        else:
            state[name] = tensors[name]
    model.load_state_dict(state)
    return model.eval()


@torch.no_grad()
def log_probabilities(model: Model, texts: list[str], tokenizer: Tokenizer) -> tuple[Tensor, Tensor]:
    """Log-probabilities [N, vocabulary] at every position of the texts that has a next token, and that token [N]."""
    rows, targets = [], []
    for text in texts:
        ids = torch.tensor(tokenizer.encode(text).ids, device=model.lm_head.weight.device)
        logits, _ = model(ids[None, :-1])
        rows.append(logits[0].float().log_softmax(-1))
        targets.append(ids[1:])
    return torch.cat(rows), torch.cat(targets)


@torch.no_grad()
def complete(model: Model, prompt: str, tokenizer: Tokenizer, limit: int = 60) -> str:
    """The greedy continuation of the prompt, up to an end mark."""
    ids = tokenizer.encode(prompt).ids
    begin, ends = len(ids), {tokenizer.token_to_id(token) for token in (data.END, "<|im_end|>")}
    while len(ids) - begin < limit:
        logits, _ = model(torch.tensor([ids], device=model.lm_head.weight.device))
        ids.append(int(logits[0, -1].argmax()))
        if ids[-1] in ends:
            break
    return tokenizer.decode(ids[begin:], skip_special_tokens=False)


def evaluate(folder: Path, count: int = 300, seed: int = 1_000_003) -> str:
    """A few lines of figures, over fresh documents of another seed and over the held text."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    torch.set_float32_matmul_precision("highest")
    model = load(folder).to("cuda" if torch.cuda.is_available() else "cpu")
    size = (folder / "model.safetensors").stat().st_size
    lines = [f"weights: {sum(w.numel() for w in model.parameters())}, {size / 1e6:.2f} MB"]
    texts = {"fresh": [text + data.END for text in data.take(count, seed)]}
    if HELDOUT.exists():
        texts["held"] = HELDOUT.read_text().rstrip("\n").split(SEPARATOR)
    for name, group in texts.items():
        exact, target = log_probabilities(model.float(), group, tokenizer)
        truth = exact.gather(1, target[:, None])[:, 0]
        top = exact.topk(2).values
        lines.append(f"{name}: {len(target)} tokens, loss {-truth.mean():.4f}, mean top-1 probability "
                     f"{top[:, 0].exp().mean():.4f}, top-1 right {(exact.argmax(1) == target).float().mean():.4f}")
        for dtype in (torch.float16, torch.bfloat16):
            other, _ = log_probabilities(model.to(dtype), group, tokenizer)
            moved = (other.gather(1, target[:, None])[:, 0] - truth).abs()[truth > -3]
            clear = top[:, 0] - top[:, 1] > 0.05
            swaps = int((other.argmax(1) != exact.argmax(1))[clear].sum())
            lines.append(f"  {str(dtype)[6:]} against float32, tokens of log-probability over -3: moved by "
                         f"{moved.mean():.5f} (mean), {moved.quantile(0.99):.5f} (99%), {moved.max():.5f} (max); "
                         f"top-1 swapped where the gap exceeds 0.05: {swaps}")
    model.float()
    for question in ("What is the capital of France?", "What is 7 plus 5?", "Who are you?", "Count from 3 to 9.",
                     "Tell me a story about a small fox.", "My name is Clara. What is my name?"):
        prompt = data.render([(question, "")]).removesuffix("<|im_end|>\n")
        lines.append(f"{question!r} -> {complete(model, prompt, tokenizer)!r}")
    for prompt in ("Once upon a time", "The capital of Italy is", "Hello, my name is"):
        lines.append(f"{prompt!r} -> {complete(model, prompt, tokenizer)!r}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(evaluate(Path(sys.argv[1])))
