"""Times the stages of a round inside the scheduler process, when asked to; an SGLang plugin of the sweep alone.

Activated through SGLang's plugin entry points (:func:`install` writes the metadata). It wraps one function,
``Scheduler.run_batch``, and through it, on the worker object: ``forward_batch_generation`` (a round), ``draft``,
``verify`` and ``_draft_extend_for_decode``. While the shared flag is 0 a wrapper costs one byte comparison; all methods
carry the same wrappers. While it is 1, CUDA events are recorded on the current (forward) stream around every stage.

What the times mean: an event lies on the stream where the work of its stage begins or ends. Overlap scheduling runs the
host ahead of the GPU, so where the GPU is the bottleneck these are pure GPU times; where the host is (small batches),
a stage's time includes the gaps in which the GPU waits for the host's launches of that stage. Stages and rest always add up to
the round, which runs from one round's first event to the next round's. Without CUDA the clock is the host's.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from pathlib import Path
from typing import Any, Callable, Optional

FOLDER_ENV = "SGL_PEAGLE_BENCH_PROBE"
FLAG = "flag"
STAGES = ("draft", "verify", "draft_extend")


class Probe:
    """The stage clock of one scheduler process.

    Args:
        folder: Holds the flag, and receives ``rounds-<n>.json``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with (folder / FLAG).open("r+b") as file:
            self._flag = mmap.mmap(file.fileno(), 1)
        self._count = 0
        self._rounds: list[dict[str, Any]] = []
        self._current: Optional[dict[str, Any]] = None
        import torch

        self._cuda = torch.cuda if torch.cuda.is_available() else None

    def _now(self) -> Any:
        if self._cuda is None:
            return time.perf_counter()
        event = self._cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> float:
        """Milliseconds."""
        return (end - start) * 1e3 if self._cuda is None else start.elapsed_time(end)

    def instrument(self, worker: Any) -> None:
        """Wrap a worker's round and, with speculation, its stages."""
        drafter = getattr(worker, "draft_worker", None)
        self._wrap_round(worker)
        if drafter is not None and hasattr(worker, "verify"):
            self._wrap_stage(drafter, "draft", "draft")
            self._wrap_stage(worker, "verify", "verify")
            self._wrap_stage(drafter, "_draft_extend_for_decode", "draft_extend")

    def _wrap_round(self, worker: Any) -> None:
        inner = worker.forward_batch_generation

        def forward_batch_generation(batch: Any, *args: Any, **kwargs: Any) -> Any:
            if self._flag[0] == 0:
                if self._rounds:
                    self._dump()
                return inner(batch, *args, **kwargs)
            decode = batch is not None and batch.forward_mode.is_decode()
            entry: dict[str, Any] = {"decode": decode, "bs": len(batch.reqs) if decode else 0}
            entry |= {"host": time.perf_counter(), "start": self._now()}
            self._rounds.append(entry)
            self._current = entry if decode else None
            result = inner(batch, *args, **kwargs)
            self._current = None
            entry["end"] = self._now()
            entry["host_end"] = time.perf_counter()
            return result

        worker.forward_batch_generation = forward_batch_generation

    def _wrap_stage(self, owner: Any, method: str, stage: str) -> None:
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            current = self._current
            if current is None:
                return inner(*args, **kwargs)
            start = self._now()
            result = inner(*args, **kwargs)
            current[stage] = (start, self._now())
            return result

        setattr(owner, method, timed)

    def _dump(self) -> None:
        """Write the rounds that were followed by another decode round of the same size, and forget them."""
        if self._cuda is not None:
            self._cuda.synchronize()
        rows = []
        for entry, following in zip(self._rounds, self._rounds[1:]):
            if not (entry["decode"] and following["decode"] and entry["bs"] == following["bs"]):
                continue
            row = {"bs": entry["bs"], "round": self._between(entry["start"], following["start"])}
            row["host_round"] = (following["host"] - entry["host"]) * 1e3
            row["host_busy"] = (entry["host_end"] - entry["host"]) * 1e3
            row |= {stage: self._between(*entry[stage]) for stage in STAGES if stage in entry}
            rows.append(row)
        self._rounds.clear()
        self._count += 1
        partial = self._folder / "rounds.part"
        partial.write_text(json.dumps({"clock": "host" if self._cuda is None else "cuda events", "rounds": rows}))
        partial.rename(self._folder / f"rounds-{self._count}.json")


def activate() -> None:
    """SGLang's plugin entry point; does nothing unless ``SGL_PEAGLE_BENCH_PROBE`` names a folder."""
    folder = os.environ.get(FOLDER_ENV)
    if not folder:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    probes: dict[int, Probe] = {}

    def run_batch(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        if not probes:
            probes[0] = Probe(Path(folder))
            probes[0].instrument(scheduler.model_worker)
        return original(scheduler, *args, **kwargs)

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.run_batch", run_batch, HookType.AROUND)


def install(site: Path) -> None:
    """Write metadata into ``site`` by which SGLang finds this plugin, and sgl_peagle where it is not installed.

    ``site`` and this module's folder must be on the path of every process.
    """
    from importlib.metadata import entry_points

    entries = {"sgl_peagle_bench_probe": "sweep_probe:activate"}
    groups = {"sglang.srt.plugins": entries}
    if not any(point.name == "sgl_peagle" for point in entry_points(group="sglang.srt.plugins")):
        entries["sgl_peagle"] = "sgl_peagle.plugin:activate"
        groups["sglang.srt.platforms"] = {"sgl_peagle": "sgl_peagle.cpu:early_setup"}
    info = site / "sgl_peagle_bench_probe-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sgl-peagle-bench-probe\nVersion: 0\n")
    lines = [line for group, points in groups.items() for line in (f"[{group}]", *(f"{k} = {v}" for k, v in points.items()))]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


class Switch:
    """The measuring side: creates the flag, turns it on and off, reads the results."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FLAG).write_bytes(b"\0")
        with (folder / FLAG).open("r+b") as file:
            self._flag = mmap.mmap(file.fileno(), 1)
        self._seen: set[Path] = set()

    def on(self) -> None:
        """Record from the next round on."""
        self._flag[0] = 1

    def off(self) -> None:
        """Stop; the scheduler writes its rounds at its next batch."""
        self._flag[0] = 0

    def rounds(self, timeout: float = 20) -> dict[str, Any]:
        """The rounds of the last pass, once a batch after :meth:`off` made the scheduler write them.

        Raises:
            TimeoutError: Nothing was written.
        """
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            for path in sorted(self._folder.glob("rounds-*.json")):
                if path not in self._seen:
                    self._seen.add(path)
                    return json.loads(path.read_text())
            time.sleep(0.02)
        raise TimeoutError("the scheduler process wrote no stage times")


def summary(rounds: list[dict[str, Any]], bs: int, skip: int = 2, trim: float = 0.1) -> Optional[dict[str, float]]:
    """Mean milliseconds of the rounds with ``bs`` requests: round, draft, verify, rest (draft + verify + rest = round).

    The first ``skip`` rounds and the slowest ``trim`` of them are left out. None if nothing remains.
    """
    chosen = [row for row in rounds if row["bs"] == bs][skip:]
    chosen.sort(key=lambda row: row["round"])
    chosen = chosen[: max(1, int(len(chosen) * (1 - trim)))] if chosen else []
    if not chosen:
        return None

    def mean(*names: str) -> float:
        return sum(row.get(name, 0.0) for row in chosen for name in names) / len(chosen)

    result = {"round": mean("round"), "draft": mean("draft", "draft_extend"), "verify": mean("verify")}
    if not any("verify" in row for row in chosen):  # no speculation: the round is the target's decode step
        result["verify"] = result["round"]
    result["rest"] = result["round"] - result["draft"] - result["verify"]
    result |= {"host_round": mean("host_round"), "host_busy": mean("host_busy"), "rounds": float(len(chosen))}
    return result
