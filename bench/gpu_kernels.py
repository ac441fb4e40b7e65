"""The two Triton kernels on a GPU: equal to their references, and fast enough.

    python bench/gpu_kernels.py --out bench/results/gpu-kernels.json

(a) every kernel against its torch reference over random shapes; (b) the GPU time of both kernels at batch 64, K=7,
hidden 4096 (target: 10 us together), and the bandwidth of kernel 2 against ``Tensor.copy_`` of as many bytes on the
same GPU (target: 70 %). Times are the GPU's alone: launches are recorded in a CUDA graph, many in a row, so that
neither Python nor launch latency counts. Exit status 1 if anything fails.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Callable

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "bench")]

import torch  # noqa: E402
from environment import environment, write_report  # noqa: E402

BS, K, WIDTH = 64, 7, 4096
REPEATS, SAMPLES = 100, 15


def gpu_microseconds(call: Callable[[], Any]) -> float:
    """Median time of one call in a captured row of ``REPEATS`` (torch's caching keeps each call's buffers apart)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            call()
    times = []
    for _ in range(SAMPLES + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / REPEATS)
    return statistics.median(times[2:])


def window(bs: int, k: int) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Inputs of a decode round: every accept length from 1 to k+1 occurs."""
    device = "cuda"
    accepts = (torch.arange(bs, device=device) % (k + 1) + 1).to(torch.int32)
    lengths = torch.randint(100, 2000, (bs,), device=device)
    requests = torch.randperm(2 * bs, device=device)[:bs]
    table = torch.randint(1, 1 << 20, (2 * bs, 4096), device=device, dtype=torch.int32)
    predicted = torch.randint(0, 100_000, (bs * (k + 1),), device=device, dtype=torch.int32)
    return {"k": k, "mask_token_id": 1, "private_mask_slots": False}, [predicted, accepts, lengths, requests, table]


def measure(bs: int, k: int, width: int, dtype: torch.dtype) -> dict[str, Any]:
    """GPU times of both kernels and of a copy, and what they mean in bytes per second."""
    from sgl_peagle.kernels import expand_triton, hidden_triton

    options, inputs = window(bs, k)
    rows = expand_triton.expand_decode(*inputs, **options)
    projected = torch.randn(bs * (k + 1), width, device="cuda").to(dtype)
    shared = torch.randn(width, device="cuda").to(dtype)

    def expansion() -> None:
        expand_triton.expand_decode(*inputs, **options)

    def placement() -> None:
        hidden_triton.window_hidden(projected, rows.hidden_rows, shared)

    def both() -> None:
        expansion()
        placement()

    # A row that is gathered is read and written, a mask row only written (h_shared stays in cache). The copy of the
    # comparison moves as many bytes: it reads and writes half of them each.
    row_bytes = width * projected.element_size()
    gathered = int((rows.hidden_rows >= 0).sum())
    moved = (gathered + rows.hidden_rows.shape[0]) * row_bytes
    source = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = {
        "expand_us": gpu_microseconds(expansion),
        "hidden_us": gpu_microseconds(placement),
        "both_us": gpu_microseconds(both),
        "copy_us": gpu_microseconds(lambda: target.copy_(source)),
    }
    variants = {
        f"{block} elements, {warps} warps": round(
            gpu_microseconds(
                lambda b=block, w=warps: hidden_triton.window_hidden(
                    projected, rows.hidden_rows, shared, block=b, num_warps=w
                )
            ),
            3,
        )
        for block, warps in ((1024, 4), (2048, 4), (2048, 8), (4096, 4), (4096, 8))
    }
    return {
        "bs": bs, "k": k, "hidden": width, "dtype": str(dtype).removeprefix("torch."), "bytes_moved": moved,
        **{name: round(value, 3) for name, value in times.items()},
        "hidden_gb_per_s": round(moved / times["hidden_us"] / 1e3, 1),
        "copy_gb_per_s": round(moved / times["copy_us"] / 1e3, 1),
        "share_of_copy": round(times["copy_us"] / times["hidden_us"], 3),
        "hidden_variants_us": variants,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=2, help="random batches per shape")
    options = parser.parse_args()
    verdicts: dict[str, bool] = {}

    def judge(name: str, passed: bool, detail: str) -> None:
        verdicts[name] = passed
        print(f"{'PASS' if passed else 'FAIL'} {name}: {detail}", flush=True)

    import kernel_cases

    start = time.perf_counter()
    for name, check in (
        ("kernels equal references", lambda: kernel_cases.check_all("cuda", options.seeds)),
        ("no synchronisation", kernel_cases.check_no_synchronisation),
    ):
        try:
            judge(name, True, f"{check() or ''} cases, {time.perf_counter() - start:.0f} s")
        except Exception as error:  # a broken kernel must not hide the other results
            judge(name, False, f"{type(error).__name__}: {error}")

    cells = []
    for bs, width in ((1, WIDTH), (BS, WIDTH), (BS, 2880), (512, WIDTH)):
        cells.append(measure(bs, K, width, torch.bfloat16))
        print(json.dumps(cells[-1]), flush=True)
    goal = cells[1]
    judge("both kernels <= 10 us", goal["both_us"] <= 10, f"{goal['both_us']} us at bs {BS}, K {K}, hidden {WIDTH}")
    judge(
        "kernel 2 >= 70 % of copy bandwidth", goal["share_of_copy"] >= 0.7,
        f"{goal['hidden_gb_per_s']} of {goal['copy_gb_per_s']} GB/s at bs {BS}",
    )  # fmt: skip
    large = cells[3]
    judge(
        "kernel 2 >= 70 % of copy bandwidth beyond the cache", large["share_of_copy"] >= 0.7,
        f"{large['hidden_gb_per_s']} of {large['copy_gb_per_s']} GB/s at bs 512",
    )  # fmt: skip
    report = {"environment": environment(), "verdicts": verdicts, "cells": cells}
    write_report(options.out, report)
    sys.exit(not all(verdicts.values()))


if __name__ == "__main__":
    main()
