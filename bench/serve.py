"""The sweep as users see it: real servers, measured by SGLang's own benchmark client (``sglang.benchmark.serving``).

    python bench/serve.py --target T --peagle HEAD --eagle3 HEAD --k 7 3 --concurrency 1 8 64 --prompts FILE.jsonl --out FILE.json

One server per (method, K): no speculation, EAGLE-3, P-EAGLE. Prompts are JSONL rows as ``train data`` reads them (the first turn is
sent, in the target's chat template), or without ``--prompts`` random ids. The client's result is kept whole in
every cell; acceptance length is the server's average since the client flushed its cache, up to its last statistics (it makes them
every 40 rounds; null if the client ends before). The client needs the package ``datasets``.
Finished cells of --out are kept, so the same command goes on; a server that fails is recorded, and the others go on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Iterator, NamedTuple, Optional

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "bench")]

from environment import environment, head_hashes, refuse_other_settings, write_report  # noqa: E402
from server_process import ServerFailed, free_port, serving  # noqa: E402

from sgl_peagle.errors import PEagleError  # noqa: E402
from sgl_peagle.train.prompts import read_prompts  # noqa: E402

ON_CPU = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
CPU_FLAGS = ["--device", "cpu", "--dtype", "float32", "--disable-cuda-graph", "--max-total-tokens", "16384"]
GPU_FLAGS = ["--dtype", "bfloat16", "--max-running-requests", "64"]


class ClientFailed(RuntimeError):
    """The client ended early; the message ends with what it printed."""


class Setup(NamedTuple):
    """One server: ``none``, ``eagle3`` or ``peagle``."""

    method: str
    head: Optional[Path]
    k: int

    def flags(self) -> list[str]:
        if self.head is None:
            return []
        flags = ["--speculative-draft-model-path", str(self.head), "--speculative-num-draft-tokens", str(self.k + 1)]
        if self.method == "peagle":
            return ["--speculative-algorithm", "PEAGLE", *flags]
        return [
            "--speculative-algorithm", "EAGLE3", "--speculative-num-steps", str(self.k), "--speculative-eagle-topk", "1", *flags
        ]  # fmt: skip


@contextlib.contextmanager
def server(setup: Setup, options: argparse.Namespace, log: Path) -> Iterator[str]:
    """The URL of a running server."""
    port = free_port()
    command = [
        sys.executable, "-m", "sglang.launch_server", "--model-path", str(options.target), "--port", str(port),
        "--log-level", "warning", *(CPU_FLAGS if options.cpu else GPU_FLAGS), *setup.flags(), *options.server_arg,
    ]  # fmt: skip
    with serving(command, port, log, ON_CPU if options.cpu else {}, options.start_timeout) as url:
        yield url


def measure(url: str, concurrency: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One run of the client; what it reports."""
    count = max(options.prompts_per_cell, 2 * concurrency)
    out = folder / f"client-{concurrency}.jsonl"
    data = ["--dataset-name", "random-ids", "--random-input-len", str(options.input_tokens), "--random-range-ratio", "1",
            "--random-output-len", str(options.output_tokens)]  # fmt: skip
    if options.texts:
        texts = options.texts[:count]
        rows = folder / "prompts.jsonl"
        rows.write_text("".join(
            json.dumps({"conversations": [{"content": text}, {"content": "."}]}) + "\n" for text in texts
        ))  # fmt: skip
        count = len(texts)
        data = ["--dataset-name", "custom", "--dataset-path", str(rows), "--apply-chat-template", "--disable-ignore-eos",
                "--sharegpt-output-len", str(options.output_tokens)]  # fmt: skip
    command = [
        sys.executable, "-m", "sglang.benchmark.serving", "--backend", "sglang", "--base-url", url, "--model", str(options.target),
        "--num-prompts", str(count), "--max-concurrency", str(concurrency), "--seed", "1", "--flush-cache", "--disable-tqdm",
        "--output-file", str(out), "--temperature", "0", *data,
    ]  # fmt: skip
    env = os.environ | (ON_CPU if options.cpu else {})
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=options.cell_timeout)
    if done.returncode or not out.exists():
        raise ClientFailed(f"the client ended with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")
    result = json.loads(out.read_text().splitlines()[-1])
    lists = [name for name, value in result.items() if isinstance(value, (list, dict))]
    return {
        name: str(value) if value == float("inf") else value  # a rate without limit is no JSON
        for name, value in result.items() if name not in lists and str(folder) not in str(value)
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", type=Path, required=True)
    add("--target-name", help="what to call the target in the results; default: its folder's name")
    add("--peagle", type=Path, metavar="HEAD")
    add("--eagle3", type=Path, metavar="HEAD")
    add("--no-baseline", action="store_true", help="leave out the server without speculation")
    add("--k", type=int, nargs="+", default=[7, 3])
    add("--concurrency", type=int, nargs="+", default=[1, 8, 64])
    add("--prompts", type=Path, help="JSONL; without it, random ids")
    add("--prompts-per-cell", type=int, default=16, help="at least; two per concurrent request, as far as --prompts reaches")
    add("--input-tokens", type=int, default=256, help="of random ids")
    add("--output-tokens", type=int, default=256)
    add("--server-arg", action="append", default=[], metavar="ARG", help="one more argument of the server (repeatable)")
    add("--start-timeout", type=float, default=300)
    add("--cell-timeout", type=float, default=300)
    add("--out", type=Path, required=True)
    options = parser.parse_args()
    options.cpu = not Path("/dev/nvidia0").exists()
    try:
        options.texts = [prompt.turns[0] for prompt in read_prompts(options.prompts)] if options.prompts else []
        heads = [(method, head) for method, head in (("peagle", options.peagle), ("eagle3", options.eagle3)) if head]
        hashes = head_hashes((method, head) for method, head in heads if head.is_dir())
        report: dict[str, Any] = {
            "environment": environment(), "client": "sglang.benchmark.serving", "heads_sha256": {}, "failed": {}, "cells": []
        }  # fmt: skip
        if options.out.exists():
            report = json.loads(options.out.read_text())
            refuse_other_settings(options.out, report, {"heads_sha256": hashes})
    except PEagleError as error:
        sys.exit(str(error))
    report["heads_sha256"] |= hashes
    name = options.target_name or options.target.name
    setups = [] if options.no_baseline else [Setup("none", None, 0)]
    setups += [Setup(method, head, k) for k in options.k for method, head in heads]
    asked = {"input_tokens": None if options.prompts else options.input_tokens, "output_tokens": options.output_tokens,
             "prompts": options.prompts.stem if options.prompts else "random ids"}  # fmt: skip

    def key(cell: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(cell[n] for n in ("model", "method", "k", "concurrency", "prompts", "input_tokens", "output_tokens"))

    for setup in setups:
        stamps = [{"model": name, "method": setup.method, "k": setup.k, "concurrency": c, **asked} for c in options.concurrency]
        there = {key(cell) for cell in report["cells"]}
        todo = [stamp for stamp in stamps if key(stamp) not in there]
        label = f"{setup.method} K={setup.k}"
        if not todo:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            folder, begin = Path(scratch), time.perf_counter()
            try:
                with server(setup, options, folder / "server.log") as url:
                    start = round(time.perf_counter() - begin, 1)
                    print(f"{label}: answers after {start} s", flush=True)
                    for stamp in todo:
                        result = measure(url, stamp["concurrency"], options, folder)
                        cell = stamp | {
                            "output_tokens_per_s": result["output_throughput"], "start_s": start,
                            "acceptance_length": result.get("accept_length") if setup.k else 1.0, "client": result,
                        }  # fmt: skip
                        report["cells"].append(cell)
                        write_report(options.out, report)
                        print(
                            f"{label} c={stamp['concurrency']}: {cell['output_tokens_per_s']:.1f} tokens/s, "
                            f"TTFT {result['mean_ttft_ms']:.0f} ms, TPOT {result['mean_tpot_ms']:.2f} ms, AL {cell['acceptance_length']}",
                            flush=True,
                        )
                report["failed"].pop(label, None)
            except (ServerFailed, ClientFailed, subprocess.TimeoutExpired) as error:
                print(f"{label}: FAILED\n{error}", flush=True)
                report["failed"][label] = str(error).strip().splitlines()[-1][:300]
    write_report(options.out, report)
    sys.exit(3 if report["failed"] else 0)


if __name__ == "__main__":
    main()
