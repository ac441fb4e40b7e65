"""The process of one engine: starts it, measures its cells, writes one JSON line per result.

    python bench/sweep_engine.py JOB.json      (bench/sweep.py does this)

Lines in ``JOB.jsonl``: ``{"engine": ...}`` once it is ready, ``{"begin": concurrency}`` and ``{"cell": ...}`` per
concurrency, ``{"host_sync": ...}``, ``{"done": true}``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Callable, Optional

sys.path[:0] = [str(Path(__file__).resolve().parent)]

import sweep_probe  # noqa: E402
from sweep_process import append_line  # noqa: E402
from sweep_turns import TimeIsOver, Turns  # noqa: E402

#: Around every piece of work: waits for the engine's turn where several run at once.
Turn = Callable[[], contextlib.AbstractContextManager[None]]

#: What SGLang and the plugin log behind a capture.
CAPTURE = re.compile(r"Capture (.+?) end\..*?mem usage=(-?[\d.]+) GB")


class Requests:
    """Prompts and sampling of a job, sent with a fixed number of requests in flight."""

    def __init__(self, engine: Any, job: dict[str, Any]) -> None:
        import random

        self._engine, self._job = engine, job
        self._random = random.Random(job["seed"])
        self._texts: list[list[int]] = job.get("prompts") or []
        self._next = 0

    def prompts(self, count: int) -> list[list[int]]:
        """The next prompts: real ones in turn, or fresh random ids (so that no prefix is cached)."""
        if self._texts:
            chosen = [self._texts[(self._next + i) % len(self._texts)] for i in range(count)]
            self._next += count
            return chosen
        low, high = 10, self._job["vocab_size"] - 64
        return [[self._random.randrange(low, high) for _ in range(self._job["input_tokens"])] for _ in range(count)]

    def rewind(self) -> None:
        """Every timed batch has the same real prompts, none of them in the prefix cache. Random ones are always fresh."""
        if not self._texts:
            return
        self._next = 0
        deadline = time.monotonic() + 20
        while not self._engine.flush_cache().success:  # refused while the last request is being wound up
            if time.monotonic() > deadline:
                raise TimeoutError("the engine never became idle")
            time.sleep(0.02)

    def run(self, prompts: list[list[int]], concurrency: int, tokens: int) -> tuple[float, list[dict[str, Any]]]:
        """Seconds for all prompts with ``concurrency`` of them in flight, and every request's meta_info."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": not self._texts}
        engine = self._engine

        async def one(prompt: list[int], gate: asyncio.Semaphore) -> dict[str, Any]:
            async with gate:
                return (await engine.async_generate(input_ids=prompt, sampling_params=sampling))["meta_info"]

        async def every() -> list[dict[str, Any]]:
            gate = asyncio.Semaphore(concurrency)
            return list(await asyncio.gather(*(one(prompt, gate) for prompt in prompts)))

        start = time.perf_counter()
        metas = engine.loop.run_until_complete(every())
        return time.perf_counter() - start, metas


def tokens_of(metas: list[dict[str, Any]]) -> int:
    """Output tokens of the requests."""
    return sum(meta["completion_tokens"] for meta in metas)


def rounds_of(meta: dict[str, Any]) -> int:
    """Decode rounds of a request: its verify passes, or one per token behind the first."""
    return meta.get("spec_verify_ct") or meta["completion_tokens"] - 1


def acceptance_length(metas: list[dict[str, Any]]) -> float:
    """Tokens gained per decode round (the prefill's token apart), over all requests."""
    rounds = sum(rounds_of(meta) for meta in metas)
    return (tokens_of(metas) - len(metas)) / rounds if rounds else 0.0


def slope(requests: Requests, concurrency: int, long: int, short: int, repeats: int) -> dict[str, Any]:
    """Milliseconds per decode round from waves of two lengths: what prefill and ends cost falls out of the difference.

    Every wave is ``concurrency`` requests at once. The median over the repeats is taken for each length.
    """
    points: dict[int, list[tuple[float, int]]] = {long: [], short: []}
    for _ in range(repeats):
        for tokens in (short, long):
            seconds, metas = requests.run(requests.prompts(concurrency), concurrency, tokens)
            points[tokens].append((seconds, max(rounds_of(meta) for meta in metas)))
    pairs = [
        (b[0] - a[0]) * 1e3 / (b[1] - a[1]) for a, b in zip(points[short], points[long]) if b[1] > a[1]
    ]  # fmt: skip
    return {"ms": statistics.median(pairs), "all": [round(p, 4) for p in pairs]}


def measure(
    requests: Requests, switch: sweep_probe.Switch, job: dict[str, Any], concurrency: int,
    timed: Callable[[int], None] = lambda batches: None, turn: Turn = contextlib.nullcontext,
) -> dict[str, Any]:  # fmt: skip
    """One cell: warm-up, timed batch, slope, and the split in a pass of its own.

    With real prompts the batch is timed ``repeats`` times and the one of median throughput is the cell's: a small target
    is bound by the host, and there single batches differ by tens of percent. ``timed`` is told how many are done. With a
    ``turn``, other engines' batches come between.
    """
    count, long, short = job["prompts_for"][str(concurrency)], job["output_tokens"], job["short_tokens"]
    with turn():
        requests.run(requests.prompts(concurrency), concurrency, short)
    real = bool(job.get("prompts"))
    batches = []
    for _ in range(job["repeats"] if real else 1):
        requests.rewind()
        with turn():
            batches.append(requests.run(requests.prompts(count), concurrency, long))
        timed(len(batches))
    seconds, metas = sorted(batches, key=lambda batch: tokens_of(batch[1]) / batch[0])[(len(batches) - 1) // 2]
    cell: dict[str, Any] = {
        "output_tokens_per_s_all": [round(tokens_of(done) / took, 2) for took, done in batches],
        "prompts": count, "seconds": seconds, "output_tokens_per_s": tokens_of(metas) / seconds,
        "acceptance_length": acceptance_length(metas), "output_tokens_total": tokens_of(metas),
        "rounds_total": sum(rounds_of(meta) for meta in metas),
    }  # fmt: skip
    simulated = job["simulated_acceptance_length"]
    if simulated and cell["acceptance_length"] < 1 + (simulated - 1) / 2:
        raise RuntimeError(f"acceptance {cell['acceptance_length']:.2f}, though {simulated} was to be simulated")
    if not real:
        found = slope(requests, concurrency, long, short, job["repeats"])
        cell |= {"ms_round": found["ms"], "ms_round_repeats": found["all"], "ms_round_source": "timed waves"}
    with turn():
        cell |= split(requests, switch, job, concurrency)
    if real:
        cell |= {"ms_round": cell["ms_round_split_pass"], "ms_round_source": "split pass"}
    return cell


def split(requests: Requests, switch: sweep_probe.Switch, job: dict[str, Any], concurrency: int) -> dict[str, Any]:
    """draft, verify, rest in ms per round; several names are None where the pass gave no rounds."""
    count = max(concurrency, 2 if concurrency == 1 else 0)
    switch.on()
    _seconds, _metas = requests.run(requests.prompts(count), concurrency, job["output_tokens"])
    switch.off()
    requests.run(requests.prompts(1), 1, 4)  # the scheduler writes its rounds at its next batch
    found = switch.rounds()
    mean = sweep_probe.summary(found["rounds"], concurrency)
    if mean is None:
        return dict.fromkeys(("ms_draft", "ms_verify", "ms_rest", "ms_round_split_pass"))
    return {
        "ms_draft": mean["draft"], "ms_verify": mean["verify"], "ms_rest": mean["rest"],
        "ms_round_split_pass": mean["round"], "ms_round_host": mean["host_round"], "ms_host_busy": mean["host_busy"],
        "split_rounds": int(mean["rounds"]), "split_clock": found["clock"],
    }  # fmt: skip


def capture_memory(log: Optional[str]) -> dict[str, float]:
    """Graph memory in GB by the lines that SGLang and the plugin log when they capture."""
    found: dict[str, float] = {}
    text = Path(log).read_text(errors="replace") if log and Path(log).exists() else ""
    for name, gigabytes in CAPTURE.findall(text):
        found[name.strip()] = round(found.get(name.strip(), 0.0) + float(gigabytes), 3)
    return found


def over(job: dict[str, Any]) -> bool:
    """Whether the time that the whole sweep was given is over."""
    return job["deadline"] is not None and time.time() > job["deadline"]


def turns_of(job: dict[str, Any], out: Path) -> Optional[Turns]:
    """The engine's turns, where several run at once; the sweep is told when one begins and ends."""
    if not job["turns"]:
        return None
    place = job["turns"]
    tell: Callable[[bool], None] = lambda begins: append_line(out, {"turn": begins})
    return Turns(Path(place["folder"]), place["place"], place["count"], job["deadline"], tell)


def main(job_file: Path) -> None:
    """Run a job."""
    job = json.loads(job_file.read_text())
    out = job_file.with_suffix(".jsonl")
    import sglang

    begin = time.perf_counter()
    engine = sglang.Engine(**job["engine_args"])
    start = time.perf_counter() - begin
    states = engine.get_server_info().get("internal_states") or [{}]
    args = engine.tokenizer_manager.server_args
    kept = ("attention_backend", "speculative_draft_attention_backend", "kv_cache_dtype", "page_size", "moe_runner_backend",
            "max_running_requests", "chunked_prefill_size", "mem_fraction_static", "disable_overlap_schedule",
            "cuda_graph_max_bs_decode", "context_length", "disable_radix_cache")  # fmt: skip
    info = engine.get_server_info()
    append_line(out, {"engine": {
        "start_s": start, "memory_usage": states[0].get("memory_usage"), "capture_gb": capture_memory(job.get("log")),
        "resolved": {name: info.get(name, getattr(args, name, None)) for name in kept},
    }})  # fmt: skip
    requests, switch = Requests(engine, job), sweep_probe.Switch(Path(job["probe"]))
    turns = turns_of(job, out)
    turn: Turn = turns.mine if turns else contextlib.nullcontext
    begin = time.perf_counter()
    requests.run(requests.prompts(1), 1, job["short_tokens"])  # the first generation compiles kernels
    append_line(out, {"first_generation_s": time.perf_counter() - begin})
    if turns:
        turns.ready()
    for concurrency in job["concurrencies"]:
        if over(job):
            append_line(out, {"skipped": f"concurrency {concurrency}"})
            continue
        append_line(out, {"begin": concurrency})
        try:
            # Every timed batch is a sign of life to the process that waits for lines.
            found = measure(requests, switch, job, concurrency, lambda batches: append_line(out, {"batch": batches}), turn)
            append_line(out, {"cell": {"concurrency": concurrency, **found}})
        except TimeIsOver:
            append_line(out, {"skipped": f"concurrency {concurrency}"})
        except Exception as error:  # this cell is lost; whether the engine still serves shows at the next one
            traceback.print_exc()
            append_line(out, {"cell": {"concurrency": concurrency, "error": f"{type(error).__name__}: {error}"[:400]}})
    for concurrency in job["profile"]:
        if over(job):
            append_line(out, {"skipped": f"profile at {concurrency}"})
            continue
        append_line(out, {"begin": f"profile {concurrency}"})
        try:
            from sweep_trace import profile

            with turn():
                found = profile(requests, engine, job, concurrency)
            append_line(out, {"host_sync": {"concurrency": concurrency, **found}})
        except TimeIsOver:
            append_line(out, {"skipped": f"profile at {concurrency}"})
        except Exception as error:
            traceback.print_exc()
            append_line(out, {"host_sync": {"concurrency": concurrency, "error": f"{type(error).__name__}: {error}"[:400]}})
    if turns:
        turns.leave()
    append_line(out, {"done": True})
    engine.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
