"""Make the tiny pair from nothing: text, tokenizer, target, head, prompts and report.

    python examples/tiny_pair/train.py --out DIR

Took 21 minutes on two busy CPU cores (less on free ones); downloads nothing. DIR receives ``target/``, ``head/``,
``prompts.json`` and ``training_report.json``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads are ruinous where the cores are shared

import pair_head
import pair_target
import safetensors
import tokenizers
import torch
import transformers
from make_text import TextMaker
from pair_eval import evaluate
from pair_head import K_TRAIN, load_head, train_head
from pair_prompts import held_out_prompts
from pair_target import Windows, continue_text, load_target, save_target, train_target
from pair_tokenizer import MASK_ID, build_tokenizer, save_tokenizer


class Clock:
    """Seconds between marks, by name."""

    def __init__(self) -> None:
        self.last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def mark(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name], self.last = round(now - self.last, 1), now


def own_stream(target: transformers.LlamaForCausalLM, windows: Windows, seed: int, texts: int,
               length: int = 512) -> torch.Tensor:
    """The target's own continuations of training text, half greedy and half sampled, as one stream.

    Served text is the target's, and greedy text visits states that random text seldom does.
    """
    generator = torch.Generator().manual_seed(seed)
    out = []
    for temperature in (0.0, 0.7):
        prompts = windows.batch(texts // 2, 32)
        out.append(continue_text(target, prompts, length - 32, temperature, generator))
    return torch.cat(out).flatten()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1, help="of weights and batches")
    parser.add_argument("--text-seed", type=int, default=0)
    parser.add_argument("--documents", type=int, default=30_000)
    parser.add_argument("--target-steps", type=int, default=1200)
    parser.add_argument("--head-steps", type=int, default=1200)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--reuse-target", action="store_true", help="keep DIR/target and train only the head")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    out, seed, clock = arguments.out, arguments.seed, Clock()
    if (out / "head").exists():
        parser.error(f"{out / 'head'} exists: move it away, it is not overwritten")
    out.mkdir(parents=True, exist_ok=True)

    maker = TextMaker(arguments.text_seed)
    documents = [maker.document() for _ in range(arguments.documents)]
    tokenizer = build_tokenizer(documents[:4000])
    encoded = tokenizer(documents, add_special_tokens=False)["input_ids"]
    windows = Windows(torch.tensor([i for ids in encoded for i in ids]), seed)
    prompts, unseen = held_out_prompts(tokenizer, "".join(documents))
    (out / "prompts.json").write_text(json.dumps(prompts, indent=1, ensure_ascii=False) + "\n")
    clock.mark("text_and_tokenizer")

    earlier: dict[str, Any] = {}
    if arguments.reuse_target:
        path = out / "training_report.json"
        earlier = json.loads(path.read_text()) if path.exists() else {}
    else:
        save_target(train_target(windows, arguments.target_steps, seed), out / "target")
        save_tokenizer(tokenizer, out / "target")
    target = load_target(out / "target")
    clock.mark("target")
    if earlier:  # the time it took when it was trained
        clock.seconds["target"] = earlier["seconds"]["target"]
    own = Windows(own_stream(target, windows, seed, texts=192), seed)
    clock.mark("own_continuations")
    train_head(out / "target", out / "head", [own, windows], arguments.head_steps, seed)
    head, lm_head = load_head(out / "head", target)
    clock.mark("head")

    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in prompts]
    assert not any(MASK_ID in prompt for prompt in ids)
    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__,
                     "transformers": transformers.__version__, "tokenizers": tokenizers.__version__,
                     "safetensors": safetensors.__version__},
        "seed": seed, "text_seed": arguments.text_seed, "threads": arguments.threads, "k_train": K_TRAIN,
        "target_steps": earlier.get("target_steps", arguments.target_steps), "head_steps": arguments.head_steps,
        "training_tokens_of_text": len(windows.stream),
        "tokens_per_step": {"target": pair_target.TOKENS_PER_STEP, "head": pair_head.TOKENS_PER_STEP},
        "parameters": {"target": sum(p.numel() for p in target.parameters()),
                       "head": sum(p.numel() for p in head.parameters()) + lm_head.numel()},
        "bytes": {name: (out / name / "model.safetensors").stat().st_size for name in ("target", "head")},
    }
    report["evaluation"] = evaluate(target, head, lm_head, ids[-unseen:], tokenizer.convert_tokens_to_ids("."))
    clock.mark("evaluation")
    report["seconds"] = clock.seconds | {"all": round(sum(clock.seconds.values()), 1)}
    (out / "training_report.json").write_text(json.dumps(report, indent=2) + "\n")
    for k, result in report["evaluation"]["walk"].items():
        print(k, result)
    for name, result in report["evaluation"]["ablations_K=5"].items():
        print(name, result)
    print(report["evaluation"]["target_text"], report["seconds"])


if __name__ == "__main__":
    main()
