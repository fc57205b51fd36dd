"""Trains opshim-tiny and writes the whole model folder: `python -m models.train.train --out models/opshim-tiny`."""

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from . import data
from . import tokenizer as tokens
from .evaluate import evaluate
from .model import Config, Model


def stream(tokenizer, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """`count` documents as one row of ids, and where each begins."""
    rows, batch = [], 10_000
    documents = data.documents(seed)
    for start in range(0, count, batch):
        texts = [next(documents) + data.END for _ in range(min(batch, count - start))]
        rows += [np.array(row.ids, dtype=np.int32) for row in tokenizer.encode_batch_fast(texts)]
    starts = np.cumsum([0] + [len(row) for row in rows[:-1]])
    return torch.from_numpy(np.concatenate(rows)), torch.from_numpy(starts)


def draw(ids: Tensor, starts: Tensor, rows: int, length: int) -> Tensor:
    """[rows, length + 1] ids; each row begins where a document begins."""
    usable = starts[: int((starts < ids.numel() - length - 1).sum())]
    begin = usable[torch.randint(len(usable), (rows,), device=ids.device)]
    return ids[begin[:, None] + torch.arange(length + 1, device=ids.device)].long()


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Warms up over 3%, then falls as a cosine to 1%."""
    warm = max(1, int(0.03 * steps))
    if step < warm:
        return peak * (step + 1) / warm
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm))))


def losses(model, batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cross entropy, the mean square of log Z (which keeps logits small: likely tokens near 0), unevenness."""
    logits, unevenness = model(batch[:, :-1])
    logits = logits.float()
    log_z = logits.logsumexp(-1)
    picked = logits.gather(-1, batch[:, 1:, None]).squeeze(-1)
    return (log_z - picked).mean(), log_z.square().mean(), unevenness


def optimizer_of(model: Model, device: str) -> torch.optim.Optimizer:
    matrices = [w for n, w in model.named_parameters() if w.dim() > 1 and "conv1d" not in n]
    others = [w for n, w in model.named_parameters() if w.dim() <= 1 or "conv1d" in n]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=device == "cuda")


def train(args: argparse.Namespace, config: Config, tokenizer, log) -> Model:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    ids, starts = (x.to(device) for x in stream(tokenizer, args.documents, args.seed))
    log(f"data: {len(starts)} documents, {ids.numel()} tokens")
    model = Model(config).to(device)
    model.set_noise(args.noise)
    log(f"model: {sum(w.numel() for w in model.parameters())} weights on {device}")
    step_losses = torch.compile(losses) if args.compile else losses
    optimizer = optimizer_of(model, device)
    begin = time.time()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.lr)
        length = args.length if step < 0.8 * args.steps else args.long
        batch = draw(ids, starts, max(1, args.tokens // length), length)
        with torch.autocast(device, dtype=torch.bfloat16):
            entropy, log_z, unevenness = step_losses(model, batch)
        (entropy + 0.01 * log_z + 0.01 * unevenness).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % args.every == 0 or step == args.steps - 1:
            log(f"step {step:5d}  {time.time() - begin:6.1f} s  length {length}  loss {entropy.item():.4f}  "
                f"logZ^2 {log_z.item():.4f}  unevenness {unevenness.item():.3f}")
    return model.cpu()


def save(model: Model, config: Config, tokenizer, folder: Path) -> None:
    ids = {token: tokenizer.token_to_id(token) for token in tokens.SPECIAL}
    special = {"eos_token_id": ids["<|im_end|>"], "pad_token_id": ids[data.END], "bos_token_id": None}
    (folder / "config.json").write_text(json.dumps(config.hugging_face() | special, indent=2) + "\n")
    generation = {"do_sample": False, "eos_token_id": [ids["<|im_end|>"], ids[data.END]], "pad_token_id": ids[data.END]}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tokens.save(tokenizer, folder, config.max_position_embeddings)
    save_file(model.checkpoint(), folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the model folder to write")
    parser.add_argument("--steps", type=int, default=1800)
    parser.add_argument("--tokens", type=int, default=65536, help="tokens in one step")
    parser.add_argument("--length", type=int, default=256, help="of the rows, in the first 80%% of the steps")
    parser.add_argument("--long", type=int, default=2048, help="of the rows, in the last 20%% of the steps")
    parser.add_argument("--documents", type=int, default=250_000)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--noise", type=float, default=0.02, help="see Model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=50, help="steps between two lines of the log")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with open(args.out / "train.log", "w") as file:
        def log(line: str) -> None:
            print(line, flush=True)
            print(line, file=file, flush=True)

        log(" ".join(f"--{name} {value}" for name, value in vars(args).items() if name != "out"))
        config = Config()
        tokenizer = tokens.train(config.vocab_size)
        model = train(args, config, tokenizer, log)
        save(model, config, tokenizer, args.out)
        log(evaluate(args.out))


if __name__ == "__main__":
    main()
