"""Throughput, acceptance and the parts of a round: no speculation, EAGLE-3 and P-EAGLE over K and concurrency.

    python bench/sweep.py --out sweep.json                          # dummy weights, simulated acceptance
    python bench/sweep.py --out real.json --target DIR --head-peagle DIR --head-eagle3 DIR --prompts FILE
    python bench/sweep.py --merge a.json b.json --out sweep.json
    python bench/report.py sweep.json --out report/                 # tables, plots, targets

One engine per (method, K, draft vocabulary), all concurrencies in it. The file is written after every cell; ``--continue``
keeps its finished cells. See bench/README.md.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Callable, Optional

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parent
sys.path[:0] = [str(ROOT), str(BENCH)]

from environment import environment, head_hashes, refuse_other_settings, write_report  # noqa: E402
from sweep_options import CPU_ARGS, GPU_ARGS, PRESETS, TOGETHER_ARGS, TOGETHER_GPU_ARGS, arguments, on_cuda, read_prompts  # noqa: E402
from sweep_plan import EngineSpec, cell_key, engines, merged, ordered_concurrencies, prompts_for  # noqa: E402

from sgl_peagle.errors import PEagleError  # noqa: E402

class Sweep:
    """All engines of one run, and its result file.

    Args:
        options: The command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.cuda = on_cuda(options.device)
        self.begin = time.monotonic()
        self.deadline = time.time() + options.budget_seconds if options.budget_seconds else None
        self.workdir = options.workdir or Path(tempfile.mkdtemp(prefix="sgl-peagle-sweep-"))
        self.workdir.mkdir(parents=True, exist_ok=True)
        self.run: Optional[Callable[[Path], None]] = None
        self.engine_seconds: list[float] = []
        self.cell_seconds: list[float] = []
        self.forked_well = False
        self.starts: dict[str, int] = {}
        self._prompts: Optional[list[list[int]]] = None
        self._bar: Any = None
        self._lock = threading.RLock()  # engines that run at once are followed by a thread each

    # -- set-up -------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Environment, plugin metadata, and SGLang in this process if engines are to be forked."""
        options = self.options
        if options.gpu is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = options.gpu
        # Whether there is a GPU is asked of NVML: the CUDA runtime's answer would spoil every fork.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        if not self.cuda:
            os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        if options.commit:
            os.environ["SGL_PEAGLE_COMMIT"] = options.commit
        import sweep_probe

        site = self.workdir / "site"
        sweep_probe.install(site)
        paths = [str(ROOT), str(BENCH), str(site)]
        sys.path[:0] = [str(site)]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths + [p for p in [os.environ.get("PYTHONPATH", "")] if p])
        self.environment = environment(options.gpu) | {"start_method": "spawn"}
        self.report = self._load()
        self.write()

    def _import_for_forks(self) -> None:
        """Import SGLang here and see whether forks can work; ``run`` stays None if they cannot."""
        import sweep_cuda
        import sweep_engine
        import sweep_process

        began = time.monotonic()
        initialised: Callable[[], Optional[str]] = lambda: None
        if self.cuda:
            try:
                initialised = sweep_cuda.answer_for_torch(sweep_cuda.device_properties())
            except Exception as error:
                self.note(f"engines will be spawned: {error}")
                return
        sweep_process.import_sglang()
        self.note(f"imported SGLang in {time.monotonic() - began:.0f} s")
        if initialised() is not None:
            self.note(f"importing initialised CUDA, so engines will be spawned; it happened at\n{initialised()}")
        elif self.cuda and not sweep_cuda.fork_can_use_cuda():
            self.note("a fork cannot use the GPU, so engines will be spawned")
        else:
            self.run = sweep_engine.main
            self.environment["start_method"] = "fork"

    def _load(self) -> dict[str, Any]:
        names = ("models", "methods", "k", "concurrency", "vocab", "preset", "input_tokens", "output_tokens", "repeats",
                 "simulate_tokens", "engine_args", "interleave")  # fmt: skip
        settings = {name: getattr(self.options, name) for name in names} | self._real_settings()
        fresh = {"environment": self.environment, "environments": [self.environment], "settings": [settings], "engines": [],
                 "host_sync": [], "cells": []}  # fmt: skip
        if not self.options.out.exists():
            return fresh
        if not self.options.resume:
            raise PEagleError(
                f"{self.options.out} exists", "its results would be overwritten", "pass --continue to add to it, or another --out"
            )
        old = json.loads(self.options.out.read_text())
        compared = ("heads_sha256", "prompts_sha256", "prompts_per_cell", "repeats", "engine_args", "output_tokens", "interleave")
        now = {name: settings[name] for name in compared if name in settings}
        if old["cells"] and self.options.target is not None:
            refuse_other_settings(self.options.out, {"interleave": False} | old["settings"][-1], now)
        old["environments"].append(self.environment)
        old["settings"].append(settings)
        return old

    def _real_settings(self) -> dict[str, Any]:
        """What was measured with real heads, by name and hash (nothing, with dummy weights)."""
        options = self.options
        if options.target is None:
            return {}
        from sgl_peagle.train.regenerate import file_hash

        heads = [("peagle", options.head_peagle), ("eagle3", options.head_eagle3)]
        return {
            "models": [options.target.name], "vocab": ["head"], "input_tokens": "real prompts",
            "prompts_per_cell": options.prompts_per_cell, "prompts": options.prompts.name, "prompts_sha256": file_hash(options.prompts),
            "heads_sha256": head_hashes((method, head) for method, head in heads if head is not None),
        }  # fmt: skip

    def write(self) -> None:
        """The results so far."""
        with self._lock:
            write_report(self.options.out, self.report)

    def note(self, text: str) -> None:
        """A line above the progress bar."""
        line = f"[{time.monotonic() - self.begin:6.1f} s] {text}"
        with self._lock:
            if self._bar is not None:
                self._bar.write(line, file=sys.stdout)
            else:
                print(line)
            sys.stdout.flush()

    # -- engines ------------------------------------------------------------------------------------------

    def specs(self) -> list[EngineSpec]:
        """The engines of this run in order."""
        options = self.options
        ks = [k for k in options.k if not options.must_have or k in (3, 7)]
        if options.target is not None:
            return engines(options.target.name, options.methods, ks, ["head"], options.preset, simulate=False)
        return [
            spec
            for model in options.models
            for spec in engines(model, options.methods, ks, options.vocab, options.preset, simulate=True)
        ]

    def base(self, spec: EngineSpec, concurrency: int) -> dict[str, Any]:
        """What identifies and describes a cell before it is measured."""
        import sweep_models

        shape = None if self.options.target else sweep_models.SHAPES[spec.model]
        real = self.options.target is not None
        vocab = sweep_models.draft_vocab_size(shape, spec.vocab) if shape and spec.k else None
        return {
            "model": spec.model, "preset": spec.preset, "method": spec.method, "k": spec.k, "concurrency": concurrency,
            "draft_vocab_name": spec.vocab, "draft_vocab": vocab,
            "input_tokens": "real prompts" if real else self.options.input_tokens,
            "output_tokens": self.options.output_tokens,
            "simulated_acceptance": spec.acceptance is not None,
            "simulated_acceptance_length": spec.acceptance.length if spec.acceptance else None,
            "acceptance_source": spec.acceptance.source if spec.acceptance else "measured" if spec.k else "no speculation",
            "dummy_weights": not real,
            "head_bytes": sweep_models.head_bytes(shape, spec.method, spec.vocab) if shape and spec.k else None,
            "environment_index": len(self.report["environments"]) - 1,
        }  # fmt: skip

    def missing(self, spec: EngineSpec) -> list[int]:
        """Concurrencies that are not measured yet."""
        done = {cell_key(cell) for cell in self.report["cells"] if "error" not in cell}
        wanted = ordered_concurrencies(self.options.concurrency)
        if self.options.must_have:
            wanted = [c for c in wanted if c in (1, 8, 64)]
        return [c for c in wanted if cell_key(self.base(spec, c)) not in done]

    def missing_profiles(self, spec: EngineSpec) -> list[int]:
        """Concurrencies at which this engine has not been profiled yet."""
        entries = self.report["host_sync"]
        fields = ("model", "method", "k", "vocab", "preset")
        same = [e for e in entries if "error" not in e and all(e[name] == getattr(spec, name) for name in fields)]
        done = {entry["concurrency"] for entry in same}
        return [c for c in self.options.profile if spec.k and c not in done]

    def job(
        self, spec: EngineSpec, concurrencies: list[int], name: str, turns: Optional[dict[str, Any]] = None
    ) -> tuple[Path, dict[str, str]]:
        """Write model folders and the job of an engine; returns the job file and the engine's environment.

        Args:
            turns: Folder, place and count for :class:`sweep_turns.Turns`, where engines run at once.
        """
        import sweep_models
        from sweep_probe import FOLDER_ENV

        options = self.options
        args = (GPU_ARGS if self.cuda else CPU_ARGS) | PRESETS[spec.preset]
        args |= {"skip_server_warmup": True, "random_seed": 0, "log_level": "info"}
        env: dict[str, str] = {FOLDER_ENV: str(self.workdir / f"{name}-probe")}
        prompts, vocab_size = None, 0
        if options.target is not None:
            if self._prompts is None:
                self._prompts = read_prompts(options.prompts, options.target)
            prompts = self._prompts
            args |= {"model_path": str(options.target)}
            head = {"peagle": options.head_peagle, "eagle3": options.head_eagle3}.get(spec.method)
        else:
            shape = sweep_models.SHAPES[spec.model]
            vocab_size = shape.target["vocab_size"]
            target = sweep_models.write_target(shape, self.workdir / spec.model)
            args |= {"model_path": str(target), "load_format": "dummy", "skip_tokenizer_init": True} | shape.engine
            env |= shape.env
            head = None
            if spec.k:
                folder = self.workdir / f"{spec.model}-{spec.method}-{spec.vocab}"
                head = sweep_models.write_head(shape, spec.method, spec.vocab, folder)
                args["speculative_draft_load_format"] = "auto"  # the target's would be inherited
        if spec.k:
            args |= {
                "speculative_algorithm": spec.method.upper(), "speculative_draft_model_path": str(head),
                "speculative_num_steps": spec.k, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": spec.k + 1,
            }  # fmt: skip
        if spec.acceptance is not None:
            env |= {
                "SGLANG_SIMULATE_ACC_LEN": str(spec.acceptance.length), "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
                "SGLANG_SIMULATE_ACC_TOKEN_MODE": options.simulate_tokens,
            }  # fmt: skip
        if turns:
            args |= TOGETHER_ARGS | (TOGETHER_GPU_ARGS if self.cuda else {})
        args |= options.engine_args
        least = min(options.prompts_per_cell, len(prompts)) if prompts else 0
        probe = self.workdir / f"{name}-probe"
        probe.mkdir(exist_ok=True)
        (probe / "flag").write_bytes(b"\0")
        job = {
            "engine_args": args, "probe": str(probe), "scratch": str(self.workdir), "log": str(self.workdir / f"{name}.log"),
            "concurrencies": concurrencies, "prompts_for": {str(c): max(least, prompts_for(c)) for c in concurrencies},
            "profile": self.missing_profiles(spec), "deadline": self.deadline,
            "profile_delay": 0.5 if self.cuda else 0.3, "profile_tokens": max(1024, options.output_tokens),
            "input_tokens": options.input_tokens, "output_tokens": options.output_tokens,
            "short_tokens": max(2, options.output_tokens // 4), "repeats": options.repeats, "vocab_size": vocab_size,
            "prompts": prompts, "seed": 1, "turns": turns,
            "simulated_acceptance_length": spec.acceptance.length if spec.acceptance else None,
        }  # fmt: skip
        path = self.workdir / f"{name}.json"
        path.write_text(json.dumps(job))
        path.with_suffix(".jsonl").unlink(missing_ok=True)
        return path, env

    def out_of_time(self, cells: int) -> bool:
        """Whether another engine with that many cells would probably end too late."""
        if self.options.budget_seconds is None:
            return False
        engine = max(self.engine_seconds, default=60.0)
        cell = sum(self.cell_seconds) / len(self.cell_seconds) if self.cell_seconds else 10.0
        return time.monotonic() - self.begin + engine + min(cells, 3) * cell > self.options.budget_seconds

    def measure(self, spec: EngineSpec, number: int) -> None:
        """One engine: start it, take in its results, record why it ended if it did."""
        from sweep_process import FORK_SIGNS, EngineProcess, explained, log_tail

        while True:
            todo = self.missing(spec)
            if self.out_of_time(len(todo)):
                self.note(f"{spec.name}: not started, the time is nearly over (--continue measures it another time)")
                return
            name = f"engine-{number}-{spec.method}-{spec.k}-{spec.vocab}" + ("" if self.run else "-spawn")
            self.note(f"{spec.name}: starting ({'fork' if self.run else 'spawn'}) for concurrencies {todo}")
            log = self.workdir / f"{name}.log"
            try:
                job, env = self.job(spec, todo, name)
            except Exception as error:
                self.fail(spec, todo, f"{type(error).__name__}: {error}"[:400])
                return
            process = EngineProcess(job, log, env, self.run)
            try:
                ready, failure = self.collect(spec, process, job, todo)
            finally:
                process.end()
                if self.cuda:
                    time.sleep(1.0)  # the driver returns the memory of killed processes a moment later
            if failure is None:
                self.forked_well |= self.run is not None
                return
            forked = self.run is not None and self.options.start == "auto" and not self.forked_well and not ready
            why = explained(failure, log)
            if forked and (self.cuda or any(sign in log_tail(log, 100_000) for sign in FORK_SIGNS)):
                self.note(f"{spec.name}: a forked engine did not start ({why}); engines are spawned from here on")
                self.run = None
                self.report["environments"][-1]["start_method"] = "spawn, after a fork failed"
                continue
            self.forked_well |= ready and self.run is not None
            print(log_tail(log, 3000), flush=True)
            self.fail(spec, self.missing(spec), why)
            return

    def fail(self, spec: EngineSpec, concurrencies: list[int], why: str) -> None:
        """Record cells that could not be measured."""
        self.note(f"{spec.name}: FAILED: {why}")
        for concurrency in concurrencies:
            self.add_cell(self.base(spec, concurrency) | {"error": why})
        with self._lock:
            self.report["engines"].append(asdict(spec) | {"error": why})
            self.write()

    def add_cell(self, cell: dict[str, Any]) -> None:
        """Add a cell in the place of an earlier one with the same key."""
        with self._lock:
            kept = [c for c in self.report["cells"] if cell_key(c) != cell_key(cell)]
            self.report["cells"] = kept + [cell]
            if self._bar is not None:
                self._bar.update(1)

    def measure_together(self, specs: list[tuple[int, EngineSpec]]) -> None:
        """All engines at once, each followed by a thread; they take turns, batch by batch."""
        from sweep_process import EngineProcess
        from sweep_turns import Turns

        folder = Path(tempfile.mkdtemp(prefix="turns-", dir=self.workdir))
        processes, threads = [], []
        try:
            for place, (number, spec) in enumerate(specs):  # all forks before the first thread
                todo, name = self.missing(spec), f"together-{number}-{spec.method}-{spec.k}"
                job, env = self.job(spec, todo, name, {"folder": str(folder), "place": place, "count": len(specs)})
                processes.append(EngineProcess(job, self.workdir / f"{name}.log", env, self.run))
                self.note(f"{spec.name}: starting, one of {len(specs)} at once, for concurrencies {todo}")
                arguments_ = (spec, Turns(folder, place, len(specs)), processes[-1], job, todo, len(specs))
                threads.append(threading.Thread(target=self.follow, args=arguments_, daemon=True))
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            for process in processes:
                process.end()

    def follow(self, spec: EngineSpec, turns: Any, process: Any, job: Path, todo: list[int], together: int) -> None:
        """Take in the lines of one of several engines, and take it out of the round when it ends."""
        from sweep_process import explained

        try:
            _ready, failure = self.collect(spec, process, job, todo, together)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        process.end()
        turns.leave()
        if failure is not None:
            self.fail(spec, self.missing(spec), explained(failure, job.with_suffix(".log")))

    def collect(
        self, spec: EngineSpec, process: Any, job: Path, todo: list[int], together: int = 1
    ) -> tuple[bool, Optional[str]]:
        """Take in an engine's lines until it is done; returns whether it got ready, and what went wrong or None.

        Args:
            together: Engines that run at once: starts take longer, and between its turns an engine has no time limit.
        """
        from sweep_process import read_lines

        entry: dict[str, Any] = {}
        lines_file, offset, ready, done, working = job.with_suffix(".jsonl"), 0, False, False, True
        began = last = time.monotonic()
        mark = began
        while not done:
            status = process.poll()
            lines, offset = read_lines(lines_file, offset)
            for line in lines:
                last = time.monotonic()
                if "engine" in line:
                    ready = True
                    self.engine_seconds.append(last - began)
                    key = f"{spec.model} {spec.method}"
                    self.starts[key] = self.starts.get(key, 0) + 1
                    entry = asdict(spec) | line["engine"] | {"start_of_method": self.starts[key]}
                    entry |= {"start_method": "fork" if self.run else "spawn", "wall_s": last - began}
                    entry |= {"environment_index": len(self.report["environments"]) - 1, "together": together}
                    with self._lock:
                        self.report["engines"].append(entry)
                    self.note(f"{spec.name}: ready in {entry['start_s']:.1f} s, {entry['memory_usage']}")
                elif "begin" in line:
                    mark = last
                elif "cell" in line:
                    cell = self.base(spec, line["cell"]["concurrency"]) | line["cell"]
                    self.cell_seconds.append(last - mark)
                    self.add_cell(cell)
                    self.note(f"{spec.name} c={cell['concurrency']}: {_brief(cell)}")
                elif "turn" in line:
                    working = line["turn"]
                elif "host_sync" in line:
                    with self._lock:
                        self.report["host_sync"].append(asdict(spec) | line["host_sync"])
                    self.note(f"{spec.name} profile: {json.dumps(line['host_sync'])[:600]}")
                elif "skipped" in line:
                    self.note(f"{spec.name}: the time is over, left out: {line['skipped']}")
                elif "first_generation_s" in line:
                    with self._lock:
                        entry |= line
                    working = together == 1
                done |= "done" in line
            if lines:
                self.write()
            elif status is not None and not done:
                return ready, f"ended with status {status}"
            limit = self.options.cell_timeout if ready else self.options.engine_timeout * (1 if together == 1 else 2)
            if working and time.monotonic() - last > limit:
                return ready, f"no result for {limit:.0f} s " + ("while measuring" if ready else "while starting")
            if not lines:
                time.sleep(0.1)
        return ready, None

    def all(self) -> int:
        """Measure everything; returns how many cells are missing or failed."""
        from tqdm import tqdm

        self.prepare()
        specs = [(n, s) for n, s in enumerate(self.specs()) if self.missing(s)]
        total = sum(len(self.missing(spec)) for _n, spec in specs)
        if specs and self.options.start != "spawn":
            self._import_for_forks()
        tqdm.monitor_interval = 0  # its thread would be forked, too
        self._bar = tqdm(total=total, unit="cell", desc="sweep", dynamic_ncols=True, mininterval=2)
        if self.options.interleave:
            self.measure_together(specs)
        else:
            for number, spec in specs:
                self.measure(spec, number)
        self._bar.close()
        self._bar = None
        left = sum(len(self.missing(spec)) for spec in self.specs())
        self.note(f"{len(self.report['cells'])} cells in {self.options.out}, {left} missing; logs in {self.workdir}")
        return left


def _brief(cell: dict[str, Any]) -> str:
    if "error" in cell:
        return "FAILED: " + cell["error"]
    number = functools.partial("{:.3f}".format)
    parts = [f"{cell['output_tokens_per_s']:.1f} tokens/s", f"AL {number(cell['acceptance_length'])}"]
    names = ("ms_round", "ms_draft", "ms_verify", "ms_rest")
    parts += [f"{name} {number(cell[name])}" for name in names if cell.get(name) is not None]
    return ", ".join(parts) + (" (simulated acceptance)" if cell["simulated_acceptance"] else "")


def main(argv: Optional[list[str]] = None) -> int:
    """Exit status 0 if every cell is there, 3 if some are missing."""
    try:
        options = arguments(argv, __doc__)
        if options.merge:
            if options.out.exists() and options.out not in options.merge:
                raise PEagleError(f"{options.out} exists", "its results would be overwritten", "choose another --out")
            write_report(options.out, merged(json.loads(p.read_text()) for p in options.merge))
            return 0
        return 3 if Sweep(options).all() else 0
    except PEagleError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
