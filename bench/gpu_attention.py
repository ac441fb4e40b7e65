"""Attention of drafter windows on a GPU: SGLang's extend kernel against ours, and which launch is the fastest.

    python bench/gpu_attention.py --out bench/results/gpu-attention.json

For every cell (batch size, K, prefix): numerics of both kernels against the float32 reference, and GPU times from
captured graphs, as :func:`gpu_kernels.gpu_microseconds` takes them. Successive calls of a graph read other cache slots,
more than the L2 cache holds, as the layers of a drafter do. Then launches are swept: tiles first, splits with the best
tile second; what does not fit into ``--budget-seconds`` is left out and named. Exit status 1 if our kernel is wrong
anywhere or, as planned, slower than SGLang's.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

import torch  # noqa: E402
from environment import environment, write_report  # noqa: E402

from sgl_peagle.kernels import window_attention_triton  # noqa: E402
from sgl_peagle.kernels.window_attention import Launch, plan_launch, window_attention_reference  # noqa: E402

HEADS, KV_HEADS, HEAD_DIM, DTYPE = 32, 8, 128, torch.bfloat16
#: K and V bytes that the calls of one graph read together at least: twice an H200's L2.
COLD_BYTES = 100 << 20
TOLERANCE = 2e-2
#: (block_n, num_warps, num_stages)
TILES = (
    (64, 4, 2), (64, 4, 3), (32, 4, 2), (32, 4, 3), (32, 4, 4), (64, 4, 4), (128, 8, 2), (64, 8, 3), (128, 4, 3),
    (64, 4, 1), (32, 2, 3),
)  # fmt: skip
SPLITS = (1, 2, 4, 8, 16, 32)
CHUNKS = (1, 256)  # smallest split in tokens, where not the tile


@dataclass(frozen=True)
class Cell:
    """One measurement: ``bs`` windows of 2k rows behind ``prefix`` cached tokens (``uneven``: one behind 16 times as
    many)."""

    bs: int
    k: int
    prefix: int
    uneven: bool = False

    @property
    def lengths(self) -> list[int]:
        return [self.prefix * (16 if self.uneven and i == 0 else 1) for i in range(self.bs)]

    @property
    def name(self) -> str:
        return f"bs {self.bs} K {self.k} prefix {self.prefix}" + (" uneven" if self.uneven else "")


CELLS = [Cell(bs, k, prefix) for prefix in (400, 2000, 8000) for bs in (1, 8, 64) for k in (3, 7)]
CELLS += [Cell(8, 7, 400, uneven=True), Cell(64, 7, 400, uneven=True)]


class Batch:
    """Tensors of a cell: one set of window rows, and several sets of prefix slots in one cache."""

    def __init__(self, cell: Cell) -> None:
        self.cell, self.width = cell, 2 * cell.k
        rows, tokens = cell.bs * self.width, sum(cell.lengths)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", dtype=DTYPE)

        self.q = normal(rows, HEADS, HEAD_DIM)
        self.k, self.v = normal(rows, KV_HEADS, HEAD_DIM), normal(rows, KV_HEADS, HEAD_DIM)
        self.kv_bytes = 2 * tokens * KV_HEADS * HEAD_DIM * DTYPE.itemsize
        sets = min(64, -(-COLD_BYTES // self.kv_bytes))
        slots = sets * tokens + 1
        self.k_buffer, self.v_buffer = normal(slots, KV_HEADS, HEAD_DIM), normal(slots, KV_HEADS, HEAD_DIM)
        # Shuffled: a served cache is fragmented, and runs of neighbours would flatter both kernels.
        self.indices = (torch.randperm(slots - 1, device="cuda") + 1).view(sets, tokens)
        self.indptr = torch.tensor([0, *cell.lengths], device="cuda").cumsum(0).to(torch.int32)
        self.rows_indptr = torch.arange(0, rows + 1, self.width, device="cuda")
        self.out = torch.empty_like(self.q)

    def ours(self, chosen: int, launch: Launch) -> None:
        window_attention_triton.window_attention(
            self.q, self.k, self.v, self.k_buffer, self.v_buffer, self.indptr, self.indices[chosen], self.out,
            width=self.width, scaling=HEAD_DIM**-0.5, launch=launch,
        )  # fmt: skip

    def stock(self, chosen: int) -> None:
        from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

        extend_attention_fwd(
            self.q, self.k, self.v, self.out, self.k_buffer, self.v_buffer, self.rows_indptr, self.indptr,
            self.indices[chosen], None, True, None, self.width, 1.0, 1.0, HEAD_DIM**-0.5, logit_cap=0.0,
            extend_seq_lens_cpu=[self.width] * self.cell.bs,
        )  # fmt: skip

    def reference(self, chosen: int) -> torch.Tensor:
        return window_attention_reference(
            self.q, self.k, self.v, self.k_buffer, self.v_buffer, self.indptr, self.indices[chosen],
            torch.empty_like(self.q, dtype=torch.float32), width=self.width, scaling=HEAD_DIM**-0.5,
        )  # fmt: skip

    def error(self, call: Callable[..., None], want: torch.Tensor, *arguments: Any) -> float:
        """Largest difference from ``want``, relative to 1 + its size; inf if a row was not written."""
        self.out.fill_(float("nan"))
        call(0, *arguments)
        error = float(((self.out.float() - want).abs() / (1 + want.abs())).max())
        return error if error == error else float("inf")

    def microseconds(self, call: Callable[..., None], *arguments: Any) -> float:
        """Median GPU time of a call, its slots not in the L2 cache."""
        sets = self.indices.shape[0]
        call(0, *arguments)  # compiles
        torch.cuda.synchronize()
        start = time.perf_counter()
        call(0, *arguments)
        torch.cuda.synchronize()
        # Two milliseconds a replay are enough, and every set takes part.
        calls = max(sets, min(64, int(2e-3 / (time.perf_counter() - start))))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(calls):
                call(i % sets, *arguments)
        times = []
        for _ in range(7):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1000 / calls)
        return round(statistics.median(times[2:]), 2)


def planned(cell: Cell) -> Launch:
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    return plan_launch(cell.bs, 2 * cell.k, HEADS, KV_HEADS, HEAD_DIM, DTYPE.itemsize, multiprocessors)


def launches(plan: Launch) -> Iterator[Launch]:
    """Tiles with the planned splits."""
    for block_n, num_warps, num_stages in TILES:
        if (num_warps == 8 and plan.block_m < 64) or (num_warps == 2 and plan.block_m > 32):
            continue  # more warps than rows for them, or more accumulators than registers
        yield dataclasses.replace(
            plan, block_n=block_n, min_chunk=block_n, num_warps=num_warps, num_stages=num_stages
        )  # fmt: skip


def split_launches(tile: Launch) -> Iterator[Launch]:
    """Splits with the tile of ``tile``."""
    for splits in SPLITS:
        for chunk in CHUNKS if splits > 1 else CHUNKS[:1]:
            yield dataclasses.replace(tile, splits=splits, min_chunk=max(tile.block_n, chunk))


def short(launch: Launch) -> str:
    return (
        f"n{launch.block_n} w{launch.num_warps} s{launch.num_stages} "
        f"splits {launch.splits} chunk {launch.min_chunk} m{launch.block_m}x{launch.m_blocks}"
    )  # fmt: skip


def compare(cell: Cell) -> dict[str, Any]:
    """Numerics and times of both kernels as planned."""
    batch, plan = Batch(cell), planned(cell)
    want = batch.reference(0)
    result: dict[str, Any] = {
        "cell": cell.name, **dataclasses.asdict(cell),
        "planned": short(plan), "kv_bytes": batch.kv_bytes,
        "error": batch.error(batch.ours, want, plan), "stock_error": batch.error(batch.stock, want),
        "stock_us": batch.microseconds(batch.stock), "us": batch.microseconds(batch.ours, plan),
    }  # fmt: skip
    result["speedup"] = round(result["stock_us"] / result["us"], 2)
    result["kv_gb_per_s"] = round(batch.kv_bytes / result["us"] / 1e3)
    return result


def sweep(cell: Cell, deadline: float) -> dict[str, Any]:
    """Times of other launches; those past ``deadline`` are counted as left out."""
    batch, plan = Batch(cell), planned(cell)
    times: dict[Launch, float] = {}
    left_out, failed = 0, {}

    def measure(found: Iterator[Launch]) -> None:
        nonlocal left_out
        for launch in found:
            if launch in times:
                continue
            if time.perf_counter() > deadline:
                left_out += 1
                continue
            try:
                times[launch] = batch.microseconds(batch.ours, launch)
            except Exception as error:  # too much shared memory, say: the others still count
                failed[short(launch)] = f"{type(error).__name__}: {error}"[:200]

    measure(launches(plan))
    tiles = {short(launch): us for launch, us in times.items()}
    measure(split_launches(min(times, key=times.__getitem__, default=plan)))
    ranked = sorted(times.items(), key=lambda item: item[1])
    best_first = {short(launch): us for launch, us in ranked}
    return {"sweep": best_first, "tiles": tiles, "left_out": left_out, "failed": failed}


def table(cells: list[dict[str, Any]]) -> str:
    lines = [f"{'cell':32} {'stock us':>9} {'ours us':>9} {'x':>6} {'GB/s':>6} {'error':>8} {'stock':>8}  sweep's best"]
    for c in cells:
        best = next(iter(c.get("sweep", {}).items()), ("", ""))
        lines.append(
            f"{c['cell']:32} {c['stock_us']:9} {c['us']:9} {c['speedup']:6} {c['kv_gb_per_s']:6} {c['error']:8.1e} "
            f"{c['stock_error']:8.1e}  {best[1]} {best[0]}"
        )
    return "\n".join(lines)


def tile_table(cells: list[dict[str, Any]]) -> str:
    """Every tile with the planned splits: the geometric mean of its times relative to each cell's best tile."""
    ratios: dict[str, list[float]] = {}
    for times in filter(None, (c.get("tiles") for c in cells)):
        for name, us in times.items():
            tile = f"{name.split(' splits')[0]} m{name.rsplit(' m', 1)[1]}"
            ratios.setdefault(tile, []).append(us / min(times.values()))
    means = sorted((statistics.geometric_mean(found), len(found), tile) for tile, found in ratios.items())
    return "\n".join(f"{tile:24} {mean:6.3f} x the best, {count} cells" for mean, count, tile in means)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget-seconds", type=float, default=48, help="for everything; sweeps end then")
    options = parser.parse_args()
    start = time.perf_counter()
    torch.manual_seed(0)
    cells = []
    for cell in CELLS:
        cells.append(compare(cell))
        print(json.dumps(cells[-1]), flush=True)
    print(f"compared after {time.perf_counter() - start:.1f} s", flush=True)
    gc.freeze()  # every capture collects garbage, which takes longer than the measurement with SGLang imported
    # Short prefixes first: they are what the drafter mostly sees, and every tile is compiled there.
    for cell, result in zip(CELLS, cells):
        result.update(sweep(cell, start + options.budget_seconds))
        print(f"{cell.name}: {json.dumps(result['sweep'])}", flush=True)
        print(f"  left out: {result['left_out']}, failed: {result['failed']}", flush=True)
    print(table(cells), tile_table(cells), sep="\n\n", flush=True)

    wrong = [c["cell"] for c in cells if c["error"] > TOLERANCE]
    slower = [c["cell"] for c in cells if c["speedup"] < 1]
    for name, found in (("equals the reference", wrong), ("faster than SGLang's kernel", slower)):
        print(f"{'FAIL' if found else 'PASS'} {name} {found or ''}", flush=True)
    report = {
        "environment": environment(), "heads": [HEADS, KV_HEADS, HEAD_DIM], "seconds": time.perf_counter() - start,
        "wrong": wrong, "slower": slower, "cells": cells,
    }  # fmt: skip
    write_report(options.out, report)
    sys.exit(bool(wrong or slower))


if __name__ == "__main__":
    main()
