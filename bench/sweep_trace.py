"""Host synchronisations and GPU time per stage, from a torch profiler trace of steady decode.

SGLang records its profiler spans ``draft`` and ``draft_extend`` around the drafter, so a trace says which kernels belong to it.
A round begins where a ``draft`` span begins. Without speculation there are no spans; the trace then only counts.
"""

from __future__ import annotations

import asyncio
import bisect
import gzip
import json
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, Iterable, Optional

#: Runtime calls in which the host waits for the GPU.
BLOCKING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaCtxSynchronize",
            "cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize")  # fmt: skip
RUNTIME = ("cuda_runtime", "cuda_driver")
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")

#: Forwards that are profiled. Python stacks cost much more, to record and to write.
STEPS, STEPS_WITH_STACK = 24, 8


def profile(requests: Any, engine: Any, job: dict[str, Any], concurrency: int) -> dict[str, Any]:
    """Profile decode rounds at a concurrency: for GPU time, and at batches again with Python stacks for the waits."""
    result: dict[str, Any] = {"clock": "torch profiler"}
    for with_stack in (False, True) if concurrency > 1 else (False,):
        folder = Path(tempfile.mkdtemp(prefix="trace-", dir=job["scratch"]))
        events = wait_for(_record(requests, engine, job, concurrency, folder, with_stack))
        if with_stack:
            result["waits"] = waits(events)
        else:
            result["gpu"] = gpu_time(events)
            result["waits_without_stacks"] = {k: v for k, v in waits(events).items() if k != "stacks"}
    return result


def _record(requests: Any, engine: Any, job: dict[str, Any], concurrency: int, folder: Path, with_stack: bool) -> Path:
    """Start the profiler while a batch is being decoded, let it stop after some forwards, return the trace's path."""

    async def record() -> None:
        from sglang.srt.managers.io_struct import ProfileReq

        sampling = {"temperature": 0, "max_new_tokens": job["profile_tokens"], "ignore_eos": True}
        tasks = [
            asyncio.ensure_future(engine.async_generate(input_ids=prompt, sampling_params=sampling))
            for prompt in requests.prompts(concurrency)
        ]
        await asyncio.sleep(job["profile_delay"])  # past the prefill
        await engine.tokenizer_manager.start_profile(
            ProfileReq(
                output_dir=str(folder), num_steps=STEPS_WITH_STACK if with_stack else STEPS, activities=["CPU", "GPU"],
                with_stack=with_stack, record_shapes=False, profile_id=str(time.time()),
            )
        )  # fmt: skip
        await asyncio.gather(*tasks)

    engine.loop.run_until_complete(record())
    return folder


def wait_for(folder: Path, timeout: float = 90) -> list[dict[str, Any]]:
    """The events of the trace that the scheduler writes into ``folder``, once it is complete.

    Raises:
        TimeoutError: There is none, or it never got complete.
    """
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        traces = sorted(folder.rglob("*.json*"))
        if traces:
            try:
                return load(traces[0])
            except (EOFError, ValueError, OSError):
                pass  # still being written
        time.sleep(0.5)
    raise TimeoutError("the profiler wrote no trace")


def load(trace: Path) -> list[dict[str, Any]]:
    """Events of a chrome trace, gzipped or not."""
    text = gzip.decompress(trace.read_bytes()) if trace.suffix == ".gz" else trace.read_bytes()
    return [event for event in json.loads(text)["traceEvents"] if event.get("ph") == "X"]


def _spans(events: Iterable[dict[str, Any]], name: str) -> list[tuple[float, float, Any]]:
    """(begin, end, thread) of a profiler span, in order of time."""
    return sorted(
        (float(e["ts"]), float(e["ts"]) + float(e["dur"]), e["tid"])
        for e in events
        if e.get("cat") == "user_annotation" and e["name"] == name
    )


def rounds(events: list[dict[str, Any]]) -> list[tuple[float, float, Any]]:
    """(begin, end, thread) of complete decode rounds, by the begins of successive ``draft`` spans."""
    spans = _spans(events, "draft")
    return [(a[0], b[0], a[2]) for a, b in zip(spans, spans[1:])]


def waits(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Blocking runtime calls per round in the scheduler's thread, in all and inside the drafter's spans, with stacks.

    Without speculation (no spans), counts over the whole trace.
    """
    all_rounds = rounds(events)
    calls = [e for e in events if e.get("cat") in RUNTIME and e["name"] in BLOCKING]
    blocking_copies = _blocking_copies(events)
    drafter = _spans(events, "draft") + _spans(events, "draft_extend")
    thread = all_rounds[0][2] if all_rounds else None
    if all_rounds:
        begin, end = all_rounds[0][0], all_rounds[-1][1]
        calls = [e for e in calls if e["tid"] == thread and begin <= float(e["ts"]) < end]
        blocking_copies = [e for e in blocking_copies if e["tid"] == thread and begin <= float(e["ts"]) < end]
    count = len(all_rounds)
    inside = [e for e in calls if any(a <= float(e["ts"]) < b for a, b, tid in drafter if tid == e["tid"])]
    return {
        "rounds": count,
        "calls": dict(Counter(e["name"] for e in calls)),
        "calls_per_round": round(len(calls) / count, 3) if count else None,
        "copies_to_pageable_memory": len(blocking_copies),
        "inside_drafter_calls": dict(Counter(e["name"] for e in inside)),
        "waited_ms_per_round": round(sum(float(e["dur"]) for e in calls) / 1e3 / count, 4) if count else None,
        "scalar_reads_inside_drafter": _scalar_reads(events, drafter, all_rounds),
        "stacks": _stacks(events, calls),
    }


def _scalar_reads(events: list[dict[str, Any]], drafter: list[tuple[float, float, Any]], all_rounds: list[Any]) -> int:
    """``.item()`` and its like within the drafter's spans of complete rounds, whatever device they read from."""
    if not all_rounds:
        return 0
    begin, end = all_rounds[0][0], all_rounds[-1][1]
    reads = [e for e in events if e.get("cat") == "cpu_op" and e["name"] == "aten::_local_scalar_dense"]
    return sum(begin <= float(e["ts"]) < end and any(a <= float(e["ts"]) < b for a, b, _ in drafter) for e in reads)


def _blocking_copies(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Asynchronous copies from device to pageable host memory, for which the host waits all the same."""
    pageable = {
        e["args"].get("correlation")
        for e in events
        if e.get("cat") == "gpu_memcpy" and "DtoH" in e["name"].replace(" ", "") and "Pageable" in e["name"]
    }
    return [e for e in events if e.get("cat") in RUNTIME and e.get("args", {}).get("correlation") in pageable]


def _stacks(events: list[dict[str, Any]], calls: list[dict[str, Any]], depth: int = 6) -> list[dict[str, Any]]:
    """Python frames around the calls, innermost first, most frequent stack first; empty without recorded stacks."""
    frames: dict[Any, list[tuple[float, float, str]]] = {}
    for e in events:
        if e.get("cat") == "python_function":
            frames.setdefault(e["tid"], []).append((float(e["ts"]), float(e["ts"]) + float(e["dur"]), e["name"]))
    for rows in frames.values():
        rows.sort()
    found: Counter[tuple[str, ...]] = Counter()
    for call in calls:
        at = float(call["ts"])
        rows = frames.get(call["tid"], [])
        around = [row for row in rows[: bisect.bisect_right(rows, (at, float("inf"), ""))] if row[1] >= at]
        names = [_short(name) for _begin, _end, name in sorted(around, reverse=True)]
        chosen = tuple(n for n in names if "sglang/" in n or "sgl_peagle/" in n or "torch/cuda" in n)[:depth]
        if chosen:
            found[(call["name"], *chosen)] += 1
    return [{"call": stack[0], "frames": list(stack[1:]), "times": n} for stack, n in found.most_common(8)]


def _short(name: str) -> str:
    """A frame without the folders in front of the package."""
    for package in ("sglang/srt", "sgl_peagle/", "torch/cuda"):
        if package in name:
            return name[name.index(package) :]
    return name


def _busy(intervals: list[tuple[float, float]]) -> float:
    """Length of the union."""
    total, reach = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reach))
        reach = max(reach, end)
    return total


def gpu_time(events: list[dict[str, Any]]) -> Optional[dict[str, Any]]:
    """Milliseconds per round in which the GPU works for the drafter and for everything else; None without spans.

    A kernel belongs to the span in which it was launched (a graph's kernels: in which the graph was), and to the round of
    that launch. ``drafter_span`` runs from the first kernel to the last of each of the drafter's spans, gaps included.
    """
    all_rounds = rounds(events)
    if not all_rounds:
        return None
    launches = {
        e["args"]["correlation"]: float(e["ts"])
        for e in events
        if e.get("cat") in RUNTIME and "correlation" in e.get("args", {})
    }
    drafter = sorted(_spans(events, "draft") + _spans(events, "draft_extend"))
    begins = [span[0] for span in drafter]
    starts = [r[0] for r in all_rounds]
    inside: list[dict[int, list[tuple[float, float]]]] = [{} for _ in all_rounds]
    outside: list[list[tuple[float, float]]] = [[] for _ in all_rounds]
    for e in events:
        at = launches.get(e.get("args", {}).get("correlation")) if e.get("cat") in KERNELS else None
        if at is None or not starts[0] <= at < all_rounds[-1][1]:
            continue
        number = bisect.bisect_right(starts, at) - 1
        span = bisect.bisect_right(begins, at) - 1
        interval = (float(e["ts"]), float(e["ts"]) + float(e["dur"]))
        if span >= 0 and at < drafter[span][1]:
            inside[number].setdefault(span, []).append(interval)
        else:
            outside[number].append(interval)
    if not any(inside):
        return None
    count = len(all_rounds)
    kernels = sum(len(rows) for spans in inside for rows in spans.values())

    def extent(rows: list[tuple[float, float]]) -> float:
        return max(end for _, end in rows) - min(begin for begin, _ in rows)

    def median(values: Iterable[float]) -> float:
        ordered = sorted(values)
        return round(ordered[len(ordered) // 2] / 1e3, 4)

    return {
        "rounds": count,
        "round": median(end - begin for begin, end, _ in all_rounds),
        "drafter_busy": median(_busy([i for rows in spans.values() for i in rows]) for spans in inside),
        "drafter_span": median(sum(extent(rows) for rows in spans.values()) for spans in inside),
        "other_busy": median(_busy(rows) for rows in outside),
        "drafter_kernels_per_round": round(kernels / count, 1),
    }
