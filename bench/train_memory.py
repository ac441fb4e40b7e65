"""Peak memory and time of a training step against the number of segments of the sequence partition.

    python bench/train_memory.py --out bench/results/train-memory.json

One document of N tokens, supervised throughout, with the rows of K = 8, r = 0.7, floor 0.2, through a head of
SmolLM2-135M's shape (random weights and hidden states: neither changes memory or time), loss over the full vocabulary, bfloat16.
S = 1 is the step without partition; both ways to cut are measured. Beside each peak stands the formula for the rows of the largest segment,
n * (1 + (c - 1) / S) with c the rows per position that were drawn, and how far the gradient is from that of S = 1. Writes a plot next to
the JSON file. Runs that do not fit into the time budget or the memory are recorded as such.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, Callable, Optional

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from environment import environment, write_report  # noqa: E402

from sgl_peagle.train.attention import BLOCK, Flex, Planner, sdpa_plan  # noqa: E402
from sgl_peagle.train.batches import Batch, Document, training_batch  # noqa: E402
from sgl_peagle.train.device import prepare  # noqa: E402
from sgl_peagle.train.model import Head, Shape  # noqa: E402
from sgl_peagle.train.partition import LossSettings, loss_and_backward, owners, segments_of  # noqa: E402
from sgl_peagle.train.rows import Cod  # noqa: E402
from sgl_peagle.train.target import States  # noqa: E402

COD = Cod(8, 0.7, 0.2)
SEGMENTS = (1, 2, 4, 8, 16)
REPEATS = 3
ROPE = {"rope_type": "default", "rope_theta": 100000.0}
SMOLLM2 = dict(hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3, head_dim=64, vocab_size=49152)
TOY = dict(hidden_size=48, intermediate_size=64, num_heads=6, num_kv_heads=2, head_dim=8, vocab_size=211)
MASK = 16


def make_head(sizes: dict[str, int], layers: int, positions: int, device: torch.device, dtype: torch.dtype) -> Head:
    shape = Shape(layers, 3, **sizes, rms_norm_eps=1e-5, max_position_embeddings=positions, rope_parameters=ROPE)
    random = torch.Generator().manual_seed(0)
    embedding = torch.randn(shape.vocab_size, shape.hidden_size, generator=random) * 0.1
    head = Head(shape, embedding.to(dtype), mask_token_id=MASK, positions=positions + COD.depths, dtype=dtype)
    aux = torch.randn(64, 3 * shape.hidden_size, generator=random)
    head.start(aux, torch.ones(shape.hidden_size), random)
    return head.to(device)


def make_batch(n: int, vocab_size: int) -> Batch:
    tokens = np.random.default_rng(0).integers(MASK + 1, vocab_size, n + 1)
    return training_batch([Document(0, tokens, np.ones(n, dtype=bool))], 0, 0, COD)


def measure(
    head: Head, batch: Batch, states: States, planner: Planner, loss: LossSettings, segments: int, way: str,
    out_of_time: Callable[[], bool],
) -> dict[str, Any]:  # fmt: skip
    """Peak bytes above what is there before the step (None on a CPU), and the median time of a step.

    At least two steps are run: the first one compiles, and counts for nothing.
    """
    device = states.aux.device
    times: list[float] = []
    peak: Optional[int] = None
    for _ in range(REPEATS + 1):
        if len(times) > 1 and out_of_time():
            break
        head.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        begin = time.perf_counter()
        loss_and_backward(head, batch, states, planner, loss, segments, way)
        if device.type == "cuda":
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
        times.append(time.perf_counter() - begin)
    return {
        "step_ms": round(1000 * float(np.median(times[1:])), 2), "first_step_ms": round(1000 * times[0], 2),
        "steps": len(times) - 1, "peak_bytes": peak,
    }  # fmt: skip


def largest(batch: Batch, segments: int, way: str) -> int:
    """Rows whose activations exist at once, at most."""
    if way == "recompute" or segments == 1:
        return max(len(kept) for kept, _ in segments_of(batch, segments))
    owner = owners(batch, segments)[batch.context :]
    return batch.context + int(np.bincount(owner).max())


def gradient(head: Head) -> Tensor:
    return torch.cat([p.grad.float().flatten() for p in head.parameters() if p.grad is not None])


def failure(error: Exception) -> str:
    """Kind and first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def sweep(
    head: Head, n: int, planner: Planner, way: str, chunk: int, device: torch.device, out_of_time: Callable[[], bool]
) -> list[dict[str, Any]]:
    random = torch.Generator().manual_seed(1)
    width = head.shape.hidden_size
    batch = make_batch(n, head.shape.vocab_size)
    aux, last = (
        torch.randn(n + 1, size, generator=random).to(device, head.dtype) for size in (3 * width, width)
    )  # fmt: skip
    loss = LossSettings(head.target_embedding, "kl", chunk)
    c = len(batch.rows) / n
    cells: list[dict[str, Any]] = []
    whole: Optional[Tensor] = None
    for segments in SEGMENTS:
        cell: dict[str, Any] = {
            "n": n, "segments": segments, "rows_per_position": round(c, 3), "rows": len(batch.rows),
            "largest_segment": largest(batch, segments, way),
            "formula_rows": round(n * (1 + (c - 1) / segments)),
        }  # fmt: skip
        if out_of_time():
            cell["failed"] = "not run: out of time"
        else:
            try:
                cell |= measure(head, batch, States(aux, last), planner, loss, segments, way, out_of_time)
                found = gradient(head)
                whole = found if segments == 1 else whole
                if whole is not None:
                    cell["gradient_difference"] = float(f"{float((found - whole).norm() / whole.norm()):.2e}")
            except Exception as error:  # no memory, or whatever a compiler can raise: the other cells go on
                cell["failed"] = failure(error)
            head.zero_grad(set_to_none=True)
            if device.type == "cuda":
                torch.cuda.empty_cache()  # what a failed step left behind is not the next one's
        cells.append(cell)
        print(json.dumps(cell), flush=True)
    return cells


def plot(report: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (memory, duration) = pyplot.subplots(1, 2, figsize=(10, 4))
    for name in sorted({(cell["attention"], cell["partition"], cell["n"]) for cell in report["cells"]}):
        cells = [c for c in report["cells"] if (c["attention"], c["partition"], c["n"]) == name and "step_ms" in c]
        if not cells:
            continue
        x = [c["segments"] for c in cells]
        label = f"{name[0]}, {name[1]}, N = {name[2]}"
        duration.plot(x, [c["step_ms"] for c in cells], "o-", label=label)
        if cells[0]["peak_bytes"] is None:
            continue
        (line,) = memory.plot(x, [c["peak_bytes"] / 2**30 for c in cells], "o-", label=label)
        # The formula, scaled to the step without partition.
        first = cells[0]["peak_bytes"] / cells[0]["formula_rows"] / 2**30
        memory.plot(x, [c["formula_rows"] * first for c in cells], "--", color=line.get_color(), linewidth=1)
    for axes, words in ((memory, "peak memory of a step, GiB"), (duration, "ms per step")):
        axes.set(xlabel="segments S", ylabel=words, xscale="log", ylim=(0, None))
        axes.set_xticks(SEGMENTS, [str(s) for s in SEGMENTS])
        axes.legend(fontsize=7)
    memory.set_title("dashed: rows of the largest segment, n(1 + (c-1)/S), scaled to S = 1", fontsize=8)
    figure.suptitle(f"Sequence partition, K = 8, {report['layers']} layers, {report['environment']['gpu']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def write(report: dict[str, Any], path: Path, begin: float) -> None:
    report["seconds"] = round(time.perf_counter() - begin, 1)
    write_report(path, report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--chunk", type=int, default=512, help="rows whose logits exist at once (small: they are not the subject)")
    parser.add_argument("--budget", type=float, default=240, help="start no further cell after so many seconds")
    parser.add_argument("--toy", action="store_true", help="a rehearsal in small, also on a CPU (without memory)")
    options = parser.parse_args()
    if options.layers < 1 or options.chunk < 1 or not options.budget > 0:
        parser.error("--layers, --chunk and --budget must be positive")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    on_gpu = torch.cuda.is_available()
    device, dtype = torch.device("cuda" if on_gpu else "cpu"), torch.bfloat16 if on_gpu else torch.float32
    prepare(device)
    sizes, lengths = (TOY, (64, 128)) if options.toy else (SMOLLM2, (8192, 2048))
    variants: list[tuple[str, str, Planner]] = [("sdpa", "recompute", sdpa_plan), ("sdpa", "cached", sdpa_plan)]
    if on_gpu:
        flex = Flex(BLOCK, BLOCK, dynamic=True)
        variants = [("flex", "recompute", flex), ("flex", "cached", flex), variants[0]]
    report: dict[str, Any] = {
        "environment": environment(), "layers": options.layers, "chunk": options.chunk, "depths": COD.depths,
        "cod_ratio": COD.ratio, "cod_floor": COD.floor, "cells": [],
    }  # fmt: skip
    head = make_head(sizes, options.layers, max(lengths), device, dtype)
    late = lambda: time.perf_counter() - begin > options.budget  # noqa: E731
    for attention, way, planner in variants:
        for n in lengths:
            try:
                cells = sweep(head, n, planner, way, options.chunk, device, late)
            except Exception as error:  # before its first step: no memory for the states
                cells = [{"n": n, "segments": 0, "failed": failure(error)}]
                print(json.dumps(cells[0]), flush=True)
            report["cells"] += [{"attention": attention, "partition": way, **cell} for cell in cells]
            write(report, options.out, begin)  # what is measured stays, whatever happens next
    try:
        plot(report, options.out.with_suffix(".png"))
    except Exception as error:  # the numbers are there; matplotlib may not be
        print(f"no plot: {failure(error)}")
    if not any("step_ms" in cell for cell in report["cells"]):
        sys.exit("nothing could be measured: see 'failed' of the cells")


if __name__ == "__main__":
    main()
