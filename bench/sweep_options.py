"""The sweep's command line: options, presets, prompts."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any, Optional

from sweep_plan import CONCURRENCIES, K_VALUES, METHODS

from sgl_peagle.errors import PEagleError

#: Engine arguments by preset. ``default``: SGLang's own settings apart from what is said here. ``blog``: those of the
#: published runs (fp8 KV cache, no prefix cache, no chunked prefill, 1024 requests, 100k context).
PRESETS: dict[str, dict[str, Any]] = {
    "default": {"max_running_requests": 64},
    "blog": {
        "max_running_requests": 1024, "kv_cache_dtype": "fp8_e4m3", "disable_radix_cache": True,
        "chunked_prefill_size": -1, "context_length": 100_000,
    },
}  # fmt: skip

#: On a CUDA GPU: 58 prefill shapes would be captured otherwise, and 64 is the largest concurrency.
GPU_ARGS: dict[str, Any] = {"disable_prefill_cuda_graph": True, "cuda_graph_max_bs_decode": 64, "dtype": "bfloat16"}
#: Of engines that run at once: no busy waiting between their turns, and on a GPU a KV pool that leaves room for the others.
TOGETHER_ARGS: dict[str, Any] = {"sleep_on_idle": True}
TOGETHER_GPU_ARGS: dict[str, Any] = {"max_total_tokens": 131_072}
CPU_ARGS: dict[str, Any] = {
    "device": "cpu", "attention_backend": "torch_native", "dtype": "float32", "disable_cuda_graph": True,
    "max_total_tokens": 8192,
}  # fmt: skip


def arguments(argv: Optional[list[str]] = None, description: Optional[str] = None) -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="JSON file of results")
    add("--continue", dest="resume", action="store_true", help="keep the finished cells of --out, measure the others")
    add("--merge", type=Path, nargs="+", metavar="JSON", help="merge result files into --out, measure nothing")
    add("--models", nargs="+", default=["llama-3.1-8b"], help="target shapes (see sweep_models.SHAPES)")
    add("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    add("--k", nargs="+", type=int, default=[3, 7, 1, 5, 10], help="drafts per round; 3 and 7 come first")
    add("--concurrency", nargs="+", type=int, default=list(CONCURRENCIES), help="1, 8 and 64 come first")
    add("--vocab", nargs="+", default=["32k"], choices=("32k", "full"), help="draft vocabularies")
    add("--preset", default="default", choices=sorted(PRESETS))
    add("--must-have", action="store_true", help="only K 3 and 7 at concurrency 1, 8 and 64")
    add("--input-tokens", type=int, default=256)
    add("--output-tokens", type=int, default=256)
    add("--repeats", type=int, default=3, help="waves per length behind ms_round; with real prompts, timed batches")
    add("--profile", nargs="*", type=int, default=[8, 1], metavar="C", help="concurrencies at which to profile speculation")
    add("--simulate-tokens", default="fixed", choices=("fixed", "real-draft-token"), help="SGLANG_SIMULATE_ACC_TOKEN_MODE")
    add("--target", type=Path, help="a real target (with --prompts): real acceptance")
    add("--head-peagle", type=Path, help="a real P-EAGLE head")
    add("--head-eagle3", type=Path, help="a real EAGLE-3 head")
    add("--prompts", type=Path, help="JSON list or JSONL of texts, or objects with prompt / question / turns")
    add("--prompts-per-cell", type=int, default=40, help="real prompts of a timed batch, at least (all if there are fewer)")
    add("--interleave", action="store_true", help="all engines of a real target at once, timed in turn, batch by batch")
    add("--device", default="auto", choices=("auto", "cuda", "cpu"))
    add("--gpu", help="index of the GPU (CUDA_VISIBLE_DEVICES)")
    add("--start", default="auto", choices=("auto", "fork", "spawn"), help="how engine processes start")
    add("--budget-seconds", type=float, help="start no engine that would probably end later than this")
    add("--engine-timeout", type=float, default=300, help="seconds for an engine's start")
    add("--cell-timeout", type=float, default=180, help="seconds without a result before an engine is given up")
    add("--engine-args", type=json.loads, default={}, metavar="JSON", help="more arguments for sglang.Engine")
    add("--workdir", type=Path, help="for model folders and logs (default: a temporary folder)")
    add("--commit", help="commit of this checkout, where it has no history")
    options = parser.parse_args(argv)
    _check(options)
    return options


def _check(options: argparse.Namespace) -> None:
    import sweep_models

    bad = [k for k in options.k if k not in K_VALUES]
    if bad:
        raise PEagleError(f"--k {bad[0]}", "acceptance and reports know K " + ", ".join(map(str, K_VALUES)), "choose those")
    if min(options.concurrency) < 1 or max(options.concurrency) > 64:
        raise PEagleError("--concurrency outside 1 ... 64", "graphs are captured up to 64 requests", "choose from 1 to 64")
    if options.interleave and options.target is None:
        raise PEagleError(
            "--interleave without --target", "it is for small targets, of which many engines fit one GPU", "leave it out"
        )
    if options.target is None:
        unknown = [m for m in options.models if m not in sweep_models.SHAPES]
        if unknown:
            raise PEagleError(
                f"--models {unknown[0]}", "no such shape is known", f"choose from {', '.join(sweep_models.SHAPES)}"
            )
        if options.head_peagle or options.head_eagle3 or options.prompts:
            raise PEagleError("real heads or prompts without --target", "heads belong to one target", "pass --target DIR")
        return
    if options.prompts is None:
        raise PEagleError("--target without --prompts", "real acceptance needs real prompts", "pass --prompts FILE")
    for method, head in (("peagle", options.head_peagle), ("eagle3", options.head_eagle3)):
        if method in options.methods and head is None:
            raise PEagleError(
                f"method {method} without --head-{method}", "its drafts come from a head", "pass it, or leave it out of --methods"
            )
    if options.resume and options.merge:
        raise PEagleError("--merge with --continue", "one measures and the other does not", "run them one after the other")


def on_cuda(device: str) -> bool:
    """Whether to measure on a GPU; asks the file system, since asking torch would initialise CUDA."""
    return device == "cuda" or (device == "auto" and any(map(os.path.exists, ("/dev/nvidiactl", "/dev/nvidia0"))))


def read_prompts(path: Path, target: Path) -> list[list[int]]:
    """Token ids of the texts in a file, each in the target's chat template."""
    from transformers import AutoTokenizer

    text = path.read_text()
    rows = json.loads(text) if text.lstrip().startswith("[") else [json.loads(x) for x in text.splitlines() if x.strip()]
    tokenizer = AutoTokenizer.from_pretrained(target)

    def content(row: Any) -> str:
        if isinstance(row, str):
            return row
        for key in ("prompt", "question", "turns", "text"):
            if key in row:
                return row[key][0] if isinstance(row[key], list) else row[key]
        raise PEagleError(f"{path}: a row without prompt, question, turns or text", "it holds no text to send", "rename the key")

    ids = []
    for row in rows:
        messages = [{"role": "user", "content": content(row)}]
        ids.append(list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)))
    return ids
