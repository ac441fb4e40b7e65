"""The drafter's CUDA graph against its eager path and the oracle, on real engines on a GPU.

    python bench/gpu_graphs.py --out bench/results/gpu-graphs.json

Serves the tiny trained pair twice, with the drafter's graphs and without (SGLANG_DISABLE_DRAFT_EXTEND_CUDA_GRAPH=1),
target graphs on both times, with graphs captured for 1, 2, 4 and 8 requests: batches of 1, 3 (padded to 4), 7 (padded
to 8), 8 and 9 (no graph). Every round is recorded; drafts of the two runs are compared with each other and with the
oracle. bfloat16 only: SGLang's CUDA RMSNorm has no float32. Exit status 1 if anything fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "bench")]

K, NEW_TOKENS = 5, 64
CAPTURED = [1, 2, 4, 8]
BATCHES = (1, 3, 7, 8, 9)
RUNS: dict[str, dict[str, str]] = {"graph": {}, "eager": {"SGLANG_DISABLE_DRAFT_EXTEND_CUDA_GRAPH": "1"}}

#: Share of draft tokens that must agree; bfloat16 leaves ties that batch shapes break differently.
AGREEMENT = 0.99


def serve(engine: Any) -> dict[str, Any]:
    """Every batch once; the prompts differ from batch to batch, so nothing but the code paths repeats."""
    import pair

    chosen = [list(p) for p in pair.prompts(sum(BATCHES))]
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    outputs, begin = [], 0
    for size in BATCHES:
        outputs += engine.generate(input_ids=chosen[begin : begin + size], sampling_params=sampling)
        begin += size
    metas = [o["meta_info"] for o in outputs]
    info = engine.get_server_info()
    return {
        "outputs": [o["output_ids"] for o in outputs],
        "ids": [m["id"] for m in metas],
        "acceptance_length": sum(m["completion_tokens"] - 1 for m in metas) / sum(m["spec_verify_ct"] for m in metas),
        "memory": (info.get("internal_states") or [{}])[0].get("memory_usage"),
    }


def run(name: str, backend: str, overlap: bool) -> dict[str, Any]:
    import harness
    import pair

    record, start = Path(tempfile.mkdtemp()), time.perf_counter()
    result = harness.with_engine(
        serve, env=RUNS[name] | {"SGL_PEAGLE_RECORD": str(record)}, timeout=280,
        model_path=str(pair.TARGET), device="cuda", dtype="bfloat16", mem_fraction_static=0.9,
        attention_backend=backend, max_running_requests=12, disable_cuda_graph=False, disable_prefill_cuda_graph=True,
        cuda_graph_bs_decode=CAPTURED, disable_overlap_schedule=not overlap, speculative_algorithm="PEAGLE",
        speculative_draft_model_path=str(pair.HEAD), speculative_num_steps=K,
    )  # fmt: skip
    return result | {"seconds": time.perf_counter() - start, "rounds": pair.read_rounds(record)}


def by_state(result: dict[str, Any]) -> dict[tuple[int, tuple[int, ...]], list[int]]:
    """(prompt, committed output) -> drafts of that round, for every round whose text is known."""
    import pair

    prompts = pair.prompts(sum(BATCHES))
    place = {rid: i for i, rid in enumerate(result["ids"])}
    states = {}
    for entry in result["rounds"]:
        i = place.get(entry["rid"])
        if i is None or entry["kind"] != "decode":
            continue
        length = entry["tokens"] - len(prompts[i])
        if length <= len(result["outputs"][i]):
            states[i, tuple(result["outputs"][i][:length])] = entry["drafts"]
    return states


def against_oracle(result: dict[str, Any]) -> dict[str, Any]:
    """Agreement of decode rounds with the oracle: over all draft tokens, and by batch size of the round."""
    import pair
    import torch

    texts = {i: p + tuple(o) for i, p, o in zip(result["ids"], pair.prompts(sum(BATCHES)), result["outputs"])}
    equal: dict[int, list[int]] = {}
    for entry in result["rounds"]:
        text = texts.get(entry["rid"])
        if text is None or entry["kind"] != "decode" or entry["tokens"] > len(text):
            continue
        tokens = text[: entry["tokens"]]
        truth = pair.oracle().drafts(torch.tensor(tokens), pair.aux_hidden(text)[: len(tokens) - 1], K).ids
        equal.setdefault(entry["batch"], []).extend(int(a == b) for a, b in zip(truth, entry["drafts"]))
    every = [x for values in equal.values() for x in values]
    return {
        "draft_tokens": len(every),
        "agreement": sum(every) / max(1, len(every)),
        "by_batch": {bs: [len(values) // K, round(sum(values) / len(values), 4)] for bs, values in sorted(equal.items())},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--attention-backend", default="fa3", help="the target's; the drafter runs on triton")
    parser.add_argument("--no-overlap", action="store_true", help="without the overlap scheduler")
    options = parser.parse_args()
    import harness

    harness.START_METHOD = "spawn"  # a fork does not survive an initialised CUDA
    harness.import_sglang()
    from environment import environment, write_report

    verdicts: dict[str, bool] = {}

    def judge(name: str, passed: bool, detail: str) -> None:
        verdicts[name] = passed
        print(f"{'PASS' if passed else 'FAIL'} {name}: {detail}", flush=True)

    results: dict[str, dict[str, Any]] = {}
    for name in RUNS:
        try:
            results[name] = run(name, options.attention_backend, not options.no_overlap)
        except harness.EngineFailed as error:
            print(str(error)[-6000:], flush=True)
            judge(f"{name} engine", False, str(error).strip().splitlines()[-1][:300])
            continue
        result = results[name]
        judge(f"{name} engine", True, f"{result['seconds']:.0f} s, AL {result['acceptance_length']:.3f}, {result['memory']}")
        oracle = result["oracle"] = against_oracle(result)
        judge(f"{name} = oracle", oracle["agreement"] >= AGREEMENT, json.dumps(oracle))
        decodes = [e for e in result["rounds"] if e["kind"] == "decode"]
        replayed = sorted({e["batch"] for e in decodes if e["graph"]})
        eager = sorted({e["batch"] for e in decodes if not e["graph"]})
        expected = name == "graph"
        judge(
            f"{name} took the right path",
            (max(replayed, default=0) == 8 and min(eager, default=9) > 8 and {1, 3, 7} <= set(replayed))
            if expected
            else not replayed,
            f"replayed at batches {replayed}, eager at {eager}",
        )

    if len(results) == len(RUNS):
        graph, eager = (by_state(results[name]) for name in ("graph", "eager"))
        shared = graph.keys() & eager.keys()
        same = sum(a == b for key in shared for a, b in zip(graph[key], eager[key]))
        judge(
            "graph drafts = eager drafts", bool(shared) and same >= AGREEMENT * K * len(shared),
            f"{same} of {K * len(shared)} draft tokens at {len(shared)} shared states "
            f"({len(graph)} graph, {len(eager)} eager)",
        )  # fmt: skip
        lengths = [results[name]["acceptance_length"] for name in RUNS]
        judge("AL graph = AL eager within 2 %", abs(lengths[0] / lengths[1] - 1) <= 0.02, f"{lengths}")
        outputs = [a == b for a, b in zip(results["graph"]["outputs"], results["eager"]["outputs"])]
        print(f"outputs identical: {sum(outputs)} of {len(outputs)}", flush=True)
    report = {
        "environment": environment(), "k": K, "new_tokens": NEW_TOKENS, "target_backend": options.attention_backend,
        "overlap": not options.no_overlap, "verdicts": verdicts,
        "runs": {
            name: {key: value for key, value in result.items() if key not in ("outputs", "ids", "rounds")}
            for name, result in results.items()
        },
    }  # fmt: skip
    write_report(options.out, report)
    sys.exit(not all(verdicts.values()))


if __name__ == "__main__":
    main()
