"""Three chat prompts, answered by a real SGLang engine on CPU without and with PEAGLE; prints a comparison.

Target: SmolLM2-135M-Instruct (dequantised 4-bit weights). Head: ``examples/heads/smollm2-135m-peagle`` when the
repository holds it, else a deterministic untrained one, whose drafts never hit: then only the mechanics show, not
a speed-up.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("PYTHONWARNINGS", "ignore")  # SGLang's subprocesses import modules that warn about missing GPUs
os.environ.setdefault("TORCH_LOGS", "-all")

HERE = Path(__file__).parent
CACHE = HERE.parent / ".cache"
TRAINED_HEAD = HERE / "heads" / "smollm2-135m-peagle"
MASK_TOKEN_ID = 16  # <empty_output>, a special token that never occurs in text

PROMPTS = (
    "Write a Python function that checks whether a number is prime.",
    "List three reasons why the sky looks blue.",
    "Janet has 3 apples and buys 4 bags of 6 apples each. How many apples does she have?",
)
NEW_TOKENS = 64


@dataclass
class Run:
    """What one engine did with one prompt."""

    token_ids: list[int]
    seconds: float
    acceptance_length: float

    @property
    def tokens_per_second(self) -> float:
        return len(self.token_ids) / self.seconds


def answer(engine: Any, tokenizer: Any, prompt: str) -> Run:
    """Stream one answer to the terminal."""
    chat = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS}
    print(f"\n> {prompt}", flush=True)
    start, shown, meta, token_ids = time.perf_counter(), 0, {}, []
    for chunk in engine.generate(input_ids=ids, sampling_params=sampling, stream=True):
        print(chunk["text"][shown:], end="", flush=True)
        shown, meta, token_ids = len(chunk["text"]), chunk["meta_info"], chunk["output_ids"]
    print(flush=True)
    rounds = meta.get("spec_verify_ct") or 0
    # The prefill produces the first token; the rounds produce the others.
    length = (meta["completion_tokens"] - 1) / rounds if rounds else 1.0
    return Run(list(token_ids), time.perf_counter() - start, length)


def run_engine(title: str, tokenizer: Any, **kwargs: Any) -> list[Run]:
    import sglang

    print(f"\n== {title}: starting the engine", flush=True)
    start = time.perf_counter()
    engine = sglang.Engine(
        device="cpu",
        dtype="float32",
        context_length=2048,
        max_total_tokens=4096,
        max_running_requests=4,
        disable_cuda_graph=True,
        skip_server_warmup=True,
        log_level="error",
        **kwargs,
    )
    try:
        print(f"   ready after {time.perf_counter() - start:.0f} s", flush=True)
        answer_quietly(engine)
        return [answer(engine, tokenizer, prompt) for prompt in PROMPTS]
    finally:
        engine.shutdown()


def answer_quietly(engine: Any) -> None:
    """The first request pays for lazy initialisation; it is not measured."""
    engine.generate(input_ids=[1, 2, 3], sampling_params={"temperature": 0, "max_new_tokens": 8})


def main() -> None:
    import smollm2
    import untrained_head
    from transformers import AutoTokenizer

    begin = time.perf_counter()
    CACHE.mkdir(exist_ok=True)
    target = smollm2.prepare(CACHE / "smollm2-135m-instruct")
    trained = (TRAINED_HEAD / "config.json").is_file()
    if trained:
        head = TRAINED_HEAD
    else:
        head = untrained_head.write(target, CACHE / "untrained-head", mask_token_id=MASK_TOKEN_ID)
        print("-- no trained head in this checkout: using an UNTRAINED one, expect acceptance length 1 and no speed-up")
    tokenizer = AutoTokenizer.from_pretrained(target)
    plain = run_engine("no speculation", tokenizer, model_path=str(target))
    peagle = run_engine(
        "PEAGLE",
        tokenizer,
        model_path=str(target),
        speculative_algorithm="PEAGLE",
        speculative_draft_model_path=str(head),
    )

    label = "trained head" if trained else "UNTRAINED head"
    print(f"\nSmolLM2-135M-Instruct (dequantised 4-bit weights), float32, CPU, batch 1, greedy; {label}\n")
    print(f"{'prompt':<44} {'plain tok/s':>11} {'PEAGLE tok/s':>12} {'AL':>5} {'identical':>9}")
    for prompt, a, b in zip(PROMPTS, plain, peagle):
        same = "yes" if a.token_ids == b.token_ids else "NO"
        shown = prompt if len(prompt) <= 43 else prompt[:42] + "…"
        print(
            f"{shown:<44} {a.tokens_per_second:>11.1f} {b.tokens_per_second:>12.1f} {b.acceptance_length:>5.2f} {same:>9}"
        )
    print("\nAL = acceptance length: tokens gained per round, the bonus token included (1.00: no draft was right)")
    print(f"total {time.perf_counter() - begin:.0f} s")
    if any(a.token_ids != b.token_ids for a, b in zip(plain, peagle)):
        sys.exit("outputs differ: this is a bug")


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    main()
