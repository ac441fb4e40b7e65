"""A short look at PEAGLE on a CUDA GPU: are the drafts right there, and where may mask rows write their KV?

Serves the tiny trained pair with several drafter backends, records every round, and compares it with the oracle
(plain torch, float32, aux hidden states from transformers). Answers three questions:

* is the window's own K/V read from the dense tensors (padding-slot masks give the same drafts as private slots)?
* do masks behind the prompt work at prefill?
* which backends draft right at all?

    python bench/gpu_look.py --out bench/results/gpu-look.json
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "bench")]

from environment import environment, write_report  # noqa: E402

NEW_TOKENS = 96
K = 5

#: name -> (environment, engine arguments). bfloat16 only: SGLang's CUDA RMSNorm has no float32.
RUNS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "bf16 target fa3, no speculation": ({}, {"peagle": False}),
    "bf16 target fa3, drafter triton": ({}, {}),
    "bf16 target fa3, drafter fa3": ({}, {"speculative_draft_attention_backend": "fa3"}),
    "bf16 target fa3, drafter fa3, to the context end": (
        {},
        {"speculative_draft_attention_backend": "fa3", "context_length": 128, "to_the_end": True},
    ),
    "bf16 target fa3, drafter triton, private mask slots": ({"SGL_PEAGLE_WINDOW": "cache"}, {}),
}


def serve(engine: Any, to_the_end: bool) -> tuple[list[list[int]], list[str], list[float]]:
    import pair

    prompts = [list(p) for p in pair.prompts(16)]
    sampling = {"temperature": 0, "max_new_tokens": None if to_the_end else NEW_TOKENS, "ignore_eos": True}
    outputs = []
    for batch in (prompts[:1], prompts[1:4], prompts[4:]):
        outputs += engine.generate(input_ids=batch, sampling_params=sampling)
    meta = [o["meta_info"] for o in outputs]
    lengths = [(m["completion_tokens"] - 1) / m["spec_verify_ct"] for m in meta if m.get("spec_verify_ct")]
    return [o["output_ids"] for o in outputs], [m["id"] for m in meta], lengths


def run(name: str, record: Path) -> dict[str, Any]:
    import harness
    import pair

    env, kwargs = RUNS[name]
    kwargs = {"attention_backend": "fa3"} | kwargs
    to_the_end = kwargs.pop("to_the_end", False)
    if kwargs.pop("peagle", True):
        kwargs |= {
            "speculative_algorithm": "PEAGLE",
            "speculative_draft_model_path": str(pair.HEAD),
            "speculative_num_steps": K,
        }
    start = time.perf_counter()
    common = {"device": "cuda", "dtype": "bfloat16", "disable_prefill_cuda_graph": True, "mem_fraction_static": 0.3}
    outputs, ids, lengths = harness.with_engine(
        lambda engine: serve(engine, to_the_end), env=env | {"SGL_PEAGLE_RECORD": str(record)}, timeout=240, model_path=str(pair.TARGET),
        **common | kwargs,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    return {"outputs": outputs, "ids": ids, "acceptance_length": lengths, "seconds": seconds}


def judge(result: dict[str, Any], record: Path) -> dict[str, Any]:
    """Agreement with the oracle, by draft position, at prefill and in decode rounds."""
    import pair
    import torch

    prompts = pair.prompts(16)
    texts = {i: p + tuple(o) for i, p, o in zip(result["ids"], prompts, result["outputs"])}
    table: dict[str, list[list[int]]] = {}
    for entry in pair.read_rounds(record):
        text = texts.get(entry["rid"])
        if text is None or entry["kind"] == "chunk" or entry["tokens"] > len(text):
            continue
        tokens = text[: entry["tokens"]]
        aux = pair.aux_hidden(text)[: len(tokens) - 1]
        truth = pair.oracle().drafts(torch.tensor(tokens), aux, K).ids
        kind = entry["kind"] + (" fallback" if entry["fallback"] else "")
        compared = 1 if entry["fallback"] else K  # the rest of a fallback is filler
        table.setdefault(kind, []).append([int(a == b) for a, b in zip(truth[:compared], entry["drafts"])])
    return {
        kind: {"rounds": len(rows), "agreement": [round(sum(c) / len(rows), 4) for c in zip(*rows)]}
        for kind, rows in table.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", help="run only the configurations whose name contains this")
    parser.add_argument("--budget", type=float, default=540, help="start no further run after so many seconds")
    options = parser.parse_args()
    import harness

    begin = time.perf_counter()
    harness.import_sglang()
    results: dict[str, Any] = {}
    for name in RUNS:
        if options.only and options.only not in name:
            continue
        if time.perf_counter() - begin > options.budget:
            results[name] = {"failed": "not run: out of time"}
            continue
        record = Path(tempfile.mkdtemp())
        try:
            try:
                results[name] = run(name, record)
            except harness.EngineFailed as error:
                if "re-initialize CUDA" not in str(error):
                    raise
                harness.START_METHOD = "spawn"
                results[name] = run(name, record)
        except harness.EngineFailed as error:
            print(f"{name}: FAILED\n{str(error)[-3000:]}", flush=True)
            results[name] = {"failed": str(error).strip().splitlines()[-1][:500]}
            continue
        results[name]["oracle"] = judge(results[name], record)
        lengths = results[name]["acceptance_length"]
        mean = sum(lengths) / len(lengths) if lengths else None
        results[name]["acceptance_length"] = mean
        print(f"{name}: {results[name]['seconds']:.0f} s, AL {mean}, {results[name]['oracle']}", flush=True)
    summary = {}
    for name, result in results.items():
        baseline = results.get(f"{name.split(',')[0].split(' with')[0]}, no speculation", {})
        entry = {key: value for key, value in result.items() if key not in ("outputs", "ids")}
        if "outputs" in baseline and "outputs" in result:
            same = [a == b for a, b in zip(baseline["outputs"], result["outputs"])]
            entry["outputs_identical_to_no_speculation"] = f"{sum(same)} of {len(same)}"
        summary[name] = entry
    report = {"environment": environment(), "k": K, "new_tokens": NEW_TOKENS, "runs": summary}
    write_report(options.out, report)


if __name__ == "__main__":
    main()
