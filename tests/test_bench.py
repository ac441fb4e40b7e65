"""The benchmark sweep: its plan, its report, its parsing of traces, and a sweep of real engines of a toy shape."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pair
import pytest

ROOT = Path(__file__).parent.parent
BENCH = ROOT / "bench"
sys.path[:0] = [str(BENCH)]

import report  # noqa: E402
import sweep  # noqa: E402
import sweep_engine  # noqa: E402
import sweep_models  # noqa: E402
import sweep_plan  # noqa: E402
import sweep_probe  # noqa: E402
import sweep_process  # noqa: E402
import sweep_trace  # noqa: E402
import sweep_turns  # noqa: E402

from sgl_peagle.errors import PEagleError  # noqa: E402
from sgl_peagle.heads import read_head  # noqa: E402

# -- plan -------------------------------------------------------------------------------------------------


def test_published_acceptance_is_kept_and_other_k_are_labelled() -> None:
    for method, values in sweep_plan.PUBLISHED_AL.items():
        lengths = [sweep_plan.simulated_acceptance(method, k) for k in sweep_plan.K_VALUES]
        assert [a.length for a in lengths] == sorted(a.length for a in lengths)
        assert all(1 < a.length < k + 1 for a, k in zip(lengths, sweep_plan.K_VALUES))
        for k, acceptance in zip(sweep_plan.K_VALUES, lengths):
            if k in values:
                assert acceptance.length == values[k] and "published" in acceptance.source
            else:
                assert acceptance.source.startswith(("interpolated", "extrapolated"))


def test_what_matters_most_comes_first() -> None:
    specs = sweep_plan.engines("m", ["none", "eagle3", "peagle"], [1, 3, 5, 7, 10], ["32k", "full"], "default", True)
    assert [(s.method, s.k, s.vocab) for s in specs[:5]] == [
        ("none", 0, "none"), ("eagle3", 7, "32k"), ("peagle", 7, "32k"), ("eagle3", 3, "32k"), ("peagle", 3, "32k"),
    ]  # fmt: skip
    assert len(specs) == 1 + 2 * 5 * 2 and len({s.name for s in specs}) == len(specs)
    assert sweep_plan.ordered_concurrencies([1, 2, 4, 8, 16, 32, 64]) == [1, 8, 64, 2, 4, 16, 32]
    assert all(sweep_plan.prompts_for(c) >= max(4, 2 * c) for c in sweep_plan.CONCURRENCIES)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--k", "4"], "--k 4"),
        (["--concurrency", "128"], "--concurrency"),
        (["--models", "nonsense"], "--models nonsense"),
        (["--target", "x"], "--prompts"),
        (["--target", "x", "--prompts", "p", "--methods", "peagle"], "--head-peagle"),
        (["--prompts", "p"], "--target"),
    ],
)
def test_bad_arguments_are_refused_in_three_parts(argv: list[str], named: str) -> None:
    with pytest.raises(PEagleError) as refusal:
        sweep.arguments(["--out", "x.json", *argv])
    assert named in str(refusal.value) and refusal.value.why and refusal.value.fix


# -- models -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", ["32k", "full"])
def test_heads_are_files_that_the_strict_reader_accepts(tmp_path: Path, vocab: str) -> None:
    import torch
    from safetensors.torch import load_file

    shape = sweep_models.SHAPES["toy"]
    folder = sweep_models.write_head(shape, "peagle", vocab, tmp_path / "head")
    head = read_head(str(folder))
    assert head.config.num_layers == sweep_models.LAYERS["peagle"]
    assert head.config.draft_vocab_size == sweep_models.draft_vocab_size(shape, vocab)
    tensors = load_file(folder / "model.safetensors")
    floats = sum(t.numel() * t.element_size() for name, t in tensors.items() if name != "d2t")
    assert floats == sweep_models.head_bytes(shape, "peagle", vocab)
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    sweep_models.write_head(shape, "peagle", vocab, folder)
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp, "a finished head is written again"
    eagle = load_file(sweep_models.write_head(shape, "eagle3", vocab, tmp_path / "eagle") / "model.safetensors")
    for weights in (tensors, eagle):
        if vocab == "32k":
            ids = weights["d2t"] + torch.arange(len(weights["d2t"]))
            assert len(set(ids.tolist())) == len(ids) and 0 <= int(ids.min()) <= int(ids.max()) < shape.target["vocab_size"]
        else:
            assert "d2t" not in weights


# -- probe ------------------------------------------------------------------------------------------------


def test_parts_of_a_round_add_up(tmp_path: Path) -> None:
    switch = sweep_probe.Switch(tmp_path)
    probe = sweep_probe.Probe(tmp_path)
    mode = types.SimpleNamespace(is_decode=lambda: True)
    batch = types.SimpleNamespace(forward_mode=mode, reqs=[1, 2])

    class Drafter:
        def draft(self) -> None:
            sum(range(2000))

        def _draft_extend_for_decode(self) -> None:
            sum(range(4000))

    class Worker:
        draft_worker = Drafter()

        def verify(self) -> None:
            sum(range(8000))

        def forward_batch_generation(self, batch: Any) -> None:
            self.draft_worker.draft()
            self.verify()
            self.draft_worker._draft_extend_for_decode()

    worker = Worker()
    probe.instrument(worker)
    worker.forward_batch_generation(batch)
    switch.on()
    for _ in range(12):
        worker.forward_batch_generation(batch)
    switch.off()
    with pytest.raises(TimeoutError):
        switch.rounds(timeout=0.05)
    worker.forward_batch_generation(batch)
    rounds = switch.rounds()["rounds"]
    assert len(rounds) == 11
    mean = sweep_probe.summary(rounds, 2)
    assert mean is not None and sweep_probe.summary(rounds, 3) is None
    assert mean["draft"] > 0 and mean["verify"] > 0 and mean["rest"] > 0
    assert mean["draft"] + mean["verify"] + mean["rest"] == pytest.approx(mean["round"])


# -- traces -----------------------------------------------------------------------------------------------


def _trace() -> list[dict[str, Any]]:
    """Three rounds of 1000 us: draft 0-100, a wait at 300, draft_extend 600-700 with one graph of two kernels."""

    def event(cat: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": 7, "args": args}

    events = []
    for number in range(4):
        t = 1000.0 * number
        events += [
            event("user_annotation", "draft", t, 100), event("user_annotation", "draft_extend", t + 600, 100),
            event("cuda_runtime", "cudaGraphLaunch", t + 650, 5, correlation=10 * number + 1),
            event("kernel", "a", t + 800, 20, correlation=10 * number + 1),
            event("kernel", "b", t + 830, 20, correlation=10 * number + 1),
            event("cuda_runtime", "cudaLaunchKernel", t + 200, 5, correlation=10 * number + 2),
            event("kernel", "verify", t + 210, 300, correlation=10 * number + 2),
            event("cuda_runtime", "cudaEventSynchronize", t + 300, 50, correlation=10 * number + 3),
            event("python_function", "/x/site-packages/sglang/srt/managers/scheduler.py(1): run", t, 990),
            event("python_function", "/x/site-packages/torch/cuda/streams.py(9): synchronize", t + 299, 60),
            event("python_function", "/x/lib/other.py(9): elsewhere", t + 298, 70),
        ]  # fmt: skip
    return events


def test_waits_and_gpu_time_are_read_from_a_trace() -> None:
    events = _trace()
    waits = sweep_trace.waits(events)
    assert waits["rounds"] == 3 and waits["calls"] == {"cudaEventSynchronize": 3} and waits["calls_per_round"] == 1
    assert waits["inside_drafter_calls"] == {}
    assert waits["stacks"] == [{
        "call": "cudaEventSynchronize", "times": 3,
        "frames": ["torch/cuda/streams.py(9): synchronize", "sglang/srt/managers/scheduler.py(1): run"],
    }]  # fmt: skip
    gpu = sweep_trace.gpu_time(events)
    assert gpu == {
        "rounds": 3, "round": 1.0, "drafter_busy": 0.04, "drafter_span": 0.05, "other_busy": 0.3, "drafter_kernels_per_round": 2.0,
    }  # fmt: skip


def test_a_wait_inside_the_drafter_is_found() -> None:
    events = _trace()
    for event in events:
        if event["name"] == "cudaEventSynchronize":
            event["ts"] += 320
    assert sweep_trace.waits(events)["inside_drafter_calls"] == {"cudaEventSynchronize": 3}


# -- report -----------------------------------------------------------------------------------------------


def _cell(method: str, k: int, c: int, ms: float, tps: float, **more: Any) -> dict[str, Any]:
    simulated = method != "none"
    return {
        "model": "m", "preset": "default", "method": method, "k": k, "concurrency": c, "prompts": 4, "input_tokens": 8,
        "output_tokens": 8, "draft_vocab_name": "32k" if k else "none", "draft_vocab": 32000 if k else None,
        "output_tokens_per_s": tps, "acceptance_length": 3.0 if k else 1.0, "ms_round": ms, "ms_draft": 0.3 * ms if k else 0.0,
        "ms_verify": 0.6 * ms, "ms_rest": 0.1 * ms, "simulated_acceptance": simulated, "dummy_weights": True,
        "simulated_acceptance_length": 3.0 if simulated else None, "head_bytes": int(2.15e9) if k else None,
        "acceptance_source": "published (somewhere)" if simulated else "no speculation",
    } | more  # fmt: skip


def _report() -> dict[str, Any]:
    cells = [_cell("none", 0, c, 5.0, 200.0 * c) for c in (1, 64)]
    cells += [_cell("eagle3", 3, 1, 6.0, 450.0), _cell("eagle3", 7, 1, 7.0, 440.0), _cell("peagle", 3, 1, 5.5, 600.0)]
    cells += [_cell("peagle", 7, 1, 5.6, 720.0), _cell("eagle3", 3, 64, 10.0, 9000.0), _cell("eagle3", 7, 64, 17.0, 8000.0)]
    cells += [_cell("peagle", 3, 64, 9.6, 9900.0), _cell("peagle", 7, 64, 15.3, 9800.0)]
    cells += [_cell("peagle", 5, 1, 0, 0) | {"error": "RuntimeError: it | broke"}]
    engines = []
    for method, start, graph in (("eagle3", 40.0, 1.0), ("peagle", 42.0, 1.4)):
        for k in (3, 7):
            usage = {"graph": {"decode": 0.0, "target_verify": graph / 2, "draft_extend": graph / 2}}
            engines.append({
                "model": "m", "preset": "default", "method": method, "k": k, "vocab": "32k", "start_s": start + k,
                "memory_usage": usage, "start_of_method": 1 + (k == 7), "start_method": "fork", "capture_gb": {},
            })  # fmt: skip
    environment = {"gpu": "test", "date": "2026-01-01"}
    return {
        "environment": environment, "environments": [environment], "settings": [{}], "engines": engines, "host_sync": [],
        "cells": cells,
    }  # fmt: skip


def test_targets_are_checked() -> None:
    data = _report()
    verdicts = {v.name: v for v in report.targets(data["cells"], data["engines"])}
    expected = {
        "ms/round, c=1: P-EAGLE K=7 / EAGLE-3 K=7": (0.8, True),
        "ms/round, c=1: P-EAGLE K=7 / EAGLE-3 K=3": (5.6 / 6, True),
        "ms/round, c=64: P-EAGLE K=7 / EAGLE-3 K=7": (0.9, False),
        "ms/round, c=64: P-EAGLE K=3 / EAGLE-3 K=3": (0.96, False),
        "ms of the draft pass, c=1, K=7 (events, host gaps included)": (1.68, False),
        "tokens/s, c=1: P-EAGLE / EAGLE-3, each at its best K": (1.6, True),
        "tokens/s, c=64: P-EAGLE / EAGLE-3, each at its best K": (1.1, False),
        "start time, K=3: P-EAGLE / EAGLE-3": (45 / 43, True),
        "graph memory, K=7: P-EAGLE / EAGLE-3": (1.4, True),
    }
    for name, (found, met) in expected.items():
        assert verdicts[name].found == pytest.approx(found) and verdicts[name].met is met, name
    drafter = verdicts["ms of the draft pass, c=1, K=7 (events, host gaps included)"]
    assert drafter.limit == pytest.approx(1.5 * 2.15e9 / 4.3e12 * 1e3 + 0.04)
    assert verdicts["ms of the draft pass, c=1, K=7 (first to last kernel in a trace)"].met is None


def test_report_labels_simulated_rows_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    data = _report()
    (tmp_path / "a.json").write_text(json.dumps(data))
    assert report.main([str(tmp_path / "a.json"), "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "report.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith(("| P-EAGLE |", "| EAGLE-3 |")) and "published" in line]
    assert len(rows) == 9 and all("simulated 3.0" in row for row in rows)
    assert "**1.60**" in text and "failed: RuntimeError: it / broke" in text
    plots = sorted(p.name for p in (tmp_path / "out").glob("*.png"))
    assert len(plots) == 6 and all(p in text for p in plots) and all((tmp_path / "out" / p).stat().st_size > 5000 for p in plots)


def test_ratios_of_single_timings_need_one_session() -> None:
    p = _cell("peagle", 7, 1, 5.0, 600.0, output_tokens_per_s_all=[600.0, 660.0, 500.0], environment_index=0)
    e = _cell("eagle3", 7, 1, 6.0, 500.0, output_tokens_per_s_all=[500.0, 600.0, 400.0], environment_index=0)
    assert "| **1.20** | 1.20, 1.10, 1.25 |" in report.ratio_table([p, e])[-1]
    for other in (e | {"environment_index": 1}, e | {"output_tokens_per_s_all": [500.0]}):
        assert "| **1.20** | – |" in report.ratio_table([p, other])[-1] and not report.pooled_table([p, other])
    same_k, best = report.pooled_table([p, e, e | {"k": 5, "output_tokens_per_s": 400.0, "output_tokens_per_s_all": [1.0, 2.0, 3.0]}])[-2:]
    assert same_k.startswith("| 7 | 1 | **1.18** | 1.10 to 1.25 | 3 of 3 | ") and best == same_k.replace("7", "each at its best", 1)


def test_merge_keeps_good_cells(tmp_path: Path) -> None:
    first, second = _report(), _report()
    second["cells"] = [_cell("peagle", 5, 1, 5.5, 700.0), _cell("peagle", 7, 1, 0, 0) | {"error": "x"}]
    merged = sweep_plan.merged([first, second])
    assert not [c for c in merged["cells"] if "error" in c]
    assert len(merged["cells"]) == len(first["cells"]) and len(merged["environments"]) == 2
    assert [c["environment_index"] for c in merged["cells"] if c["k"] == 5] == [1]


def test_reason_is_the_cause(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("ValueError: no such backend\nTraceback\nRuntimeError: Rank 0 scheduler died during initialization\nbye\n")
    assert sweep_process.reason(log) == "ValueError: no such backend"
    assert sweep_engine.capture_memory(None) == {}
    log.write_text("Capture target verify CUDA graph end. elapsed=1.00 s, mem usage=0.25 GB, avail mem=9 GB.\n")
    assert sweep_engine.capture_memory(str(log)) == {"target verify CUDA graph": 0.25}


def test_torch_is_answered_until_cuda_is_in_use() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\nimport sweep_cuda, torch\n"
        "where = sweep_cuda.answer_for_torch({'major': 9, 'minor': 0, 'name': 'H', 'multi_processor_count': 132})\n"
        "assert torch.cuda.get_device_capability() == (9, 0) and torch.cuda.get_device_name() == 'H'\n"
        "assert torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count == 132\n"
        "assert where() is None and not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code, str(BENCH)], check=True)


# -- a sweep of real engines ------------------------------------------------------------------------------


def _sweep(out: Path, *more: str) -> tuple[int, dict[str, Any], str]:
    command = [sys.executable, str(BENCH / "sweep.py"), "--models", "toy", "--out", str(out), "--workdir", str(out.parent / "work")]
    command += ["--input-tokens", "12", "--output-tokens", "24", "--repeats", "1", "--profile", "--device", "cpu"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *more], capture_output=True, text=True, env=environment, timeout=240)
    return done.returncode, json.loads(out.read_text()), done.stdout + done.stderr


def test_sweep_of_real_engines(tmp_path: Path) -> None:
    """Every method once; then a resumed sweep with one more K that fails, and one that works."""
    out = tmp_path / "sweep.json"
    code, data, text = _sweep(out, "--k", "3", "--concurrency", "1", "2")
    assert code == 0, text
    assert [(c["method"], c["k"], c["concurrency"]) for c in data["cells"]] == [
        (m, k, c) for m, k in (("none", 0), ("eagle3", 3), ("peagle", 3)) for c in (1, 2)
    ]  # fmt: skip
    for cell in data["cells"]:
        assert "error" not in cell, cell
        assert cell["simulated_acceptance"] is (cell["method"] != "none")
        assert cell["output_tokens_per_s"] > 0 and cell["ms_round"] > 0
        wanted = cell["simulated_acceptance_length"] or 1.0
        assert 1 + 0.7 * (wanted - 1) <= cell["acceptance_length"] <= 4
        parts = cell["ms_draft"] + cell["ms_verify"] + cell["ms_rest"]
        assert parts == pytest.approx(cell["ms_round_split_pass"])
        assert (cell["ms_draft"] > 0) is (cell["method"] != "none") and cell["ms_verify"] > 0
    assert len(data["engines"]) == 3 and all(e["start_s"] > 0 and "graph" in e["memory_usage"] for e in data["engines"])
    assert data["environment"]["sglang"] and data["environment"]["sgl_peagle_commit"]

    # A broken head (its config promises tensors that are not there): EAGLE-3 and none need nothing new and are skipped.
    broken = tmp_path / "work" / "toy-peagle-32k" / "model.safetensors"
    weights = broken.read_bytes()
    broken.write_bytes(weights[:1000])
    code, data, text = _sweep(out, "--continue", "--methods", "peagle", "eagle3", "--k", "1", "3", "--concurrency", "1")
    assert code == 3, text
    failed = [c for c in data["cells"] if "error" in c]
    assert [(c["method"], c["k"], c["concurrency"]) for c in failed] == [("peagle", 1, 1)] and "PEagleError" in failed[0]["error"]
    assert [c["method"] for c in data["cells"] if c["k"] == 1 and "error" not in c] == ["eagle3"]
    assert len([e for e in data["engines"] if "error" not in e]) == 4, "a finished engine was started again"

    broken.write_bytes(weights)
    wider = ("--vocab", "32k", "full")
    code, data, text = _sweep(out, "--continue", "--methods", "peagle", "--k", "1", "--concurrency", "1", *wider)
    assert code == 0 and not [c for c in data["cells"] if "error" in c], text
    assert [c["draft_vocab_name"] for c in data["cells"] if c["method"] == "peagle" and c["k"] == 1] == ["32k", "full"]
    refused = subprocess.run(
        [sys.executable, str(BENCH / "sweep.py"), "--models", "toy", "--out", str(out)], capture_output=True, text=True
    )
    assert refused.returncode == 2 and "--continue" in refused.stderr


def test_sweep_of_a_real_head(tmp_path: Path) -> None:
    """Real acceptance, every batch timed twice; the file says which head and prompts it is about, but no path."""
    prompts, out = tmp_path / "some.jsonl", tmp_path / "real.json"
    prompts.write_text('{"prompt": "Count by 2"}\n{"turns": ["Where does Anna live?", "And Ben?"]}\n')
    real = ["--target", str(pair.TARGET), "--head-peagle", str(pair.HEAD), "--prompts", str(prompts), "--methods", "peagle"]
    code, data, text = _sweep(out, *real, "--k", "3", "--concurrency", "1", "--repeats", "2")
    assert code == 0, text
    (cell,) = data["cells"]
    assert (cell["simulated_acceptance"], cell["dummy_weights"], cell["prompts"]) == (False, False, 4) and cell["acceptance_length"] > 1
    assert len(cell["output_tokens_per_s_all"]) == 2 and cell["output_tokens_per_s"] == pytest.approx(
        min(cell["output_tokens_per_s_all"]), abs=0.01
    )
    (settings,) = data["settings"]
    assert list(settings["heads_sha256"]) == [f"peagle {pair.HEAD.name}"] and settings["prompts"] == "some.jsonl"
    assert settings["models"] == [pair.TARGET.name] and str(tmp_path) not in out.read_text()
    prompts.write_text('{"prompt": "Count by 3"}\n')
    refused = subprocess.run(
        [sys.executable, str(BENCH / "sweep.py"), "--out", str(out), *real, "--continue", "--output-tokens", "24", "--repeats", "2"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert refused.returncode == 2 and "prompts_sha256" in refused.stderr, refused.stderr


def test_engines_take_turns(tmp_path: Path) -> None:
    """Two engines at once, none and P-EAGLE: nobody begins before both are ready, and their batches alternate."""
    prompts, out = tmp_path / "some.jsonl", tmp_path / "real.json"
    prompts.write_text('{"prompt": "Count by 2"}\n')
    real = ["--target", str(pair.TARGET), "--head-peagle", str(pair.HEAD), "--prompts", str(prompts), "--interleave"]
    code, data, text = _sweep(out, *real, "--methods", "none", "peagle", "--k", "3", "--concurrency", "1", "2", "--repeats", "2")
    assert code == 0, text
    assert sorted((c["method"], c["concurrency"]) for c in data["cells"]) == [("none", 1), ("none", 2), ("peagle", 1), ("peagle", 2)]
    assert all(len(c["output_tokens_per_s_all"]) == 2 and c["ms_round"] > 0 for c in data["cells"]), data["cells"]
    assert data["settings"][0]["interleave"] is True and {e["together"] for e in data["engines"]} == {2}
    assert {(e["method"], "first_generation_s" in e) for e in data["engines"]} == {("none", True), ("peagle", True)}
    # A warm-up, two timed batches and the split pass per concurrency.
    spans = [json.loads(line) for file in (tmp_path / "work").glob("turns-*/spans-*") for line in file.read_text().splitlines()]
    spans.sort(key=lambda span: span["begin"])
    assert all(a["end"] <= b["begin"] for a, b in zip(spans, spans[1:])), "two engines worked at once"
    assert [s["place"] for s in spans] == [0, 1] * 8

    # An engine that dies while it starts: the other one goes on alone, and is not measured again.
    broken = tmp_path / "broken"
    shutil.copytree(pair.HEAD, broken)
    (broken / "model.safetensors").write_bytes((broken / "model.safetensors").read_bytes()[:1000])
    real[real.index(str(pair.HEAD))] = str(broken)
    begun = ("--continue", "--methods", "none", "peagle", "--k", "1", "--concurrency", "1", "4", "--repeats", "2")
    code, data, text = _sweep(out, *real, *begun)
    assert code == 3, text
    assert [(c["method"], c["k"], c["concurrency"]) for c in data["cells"] if "error" in c] == [("peagle", 1, 1), ("peagle", 1, 4)]
    assert all("PEagleError" in c.get("error", "PEagleError") for c in data["cells"]), text
    assert sorted((e["method"], "error" in e) for e in data["engines"][2:]) == [("none", False), ("peagle", True)]
    assert [(c["method"], c["concurrency"]) for c in data["cells"] if "error" not in c and c["concurrency"] == 4] == [("none", 4)]


def test_turns_go_on_when_an_engine_leaves(tmp_path: Path) -> None:
    first, second, third = (sweep_turns.Turns(tmp_path, place, 3, deadline=time.time() + 20) for place in range(3))
    with pytest.raises(sweep_turns.TimeIsOver), sweep_turns.Turns(tmp_path, 0, 3, deadline=time.time() + 0.1).mine():
        raise AssertionError("a turn began before all were ready")
    first.ready(), second.ready()
    third.leave()  # died while it started
    for turns in (first, second, first):
        with turns.mine():
            pass
    second.leave()  # died while it was its turn
    for _ in range(2):
        with first.mine():
            pass


def test_the_median_of_several_batches_is_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    took = iter((1.0, 4.0, 1.5, 2.0))  # the warm-up, then three timed batches
    requests = types.SimpleNamespace(
        prompts=lambda count: [[1]] * count, rewind=lambda: None,
        run=lambda prompts, _c, tokens: (next(took), [{"completion_tokens": tokens, "spec_verify_ct": 2} for _ in prompts]),
    )  # fmt: skip
    monkeypatch.setattr(sweep_engine, "split", lambda *_: {"ms_round_split_pass": 1.0})
    job = {"prompts_for": {"2": 3}, "output_tokens": 8, "short_tokens": 4, "prompts": [[1]], "repeats": 3,
           "simulated_acceptance_length": None}  # fmt: skip
    cell = sweep_engine.measure(requests, None, job, 2)
    assert (cell["seconds"], cell["output_tokens_per_s"], cell["output_tokens_per_s_all"]) == (2.0, 12.0, [6.0, 16.0, 12.0])


def test_trained_heads_have_targets_of_their_own() -> None:
    def cell(method: str, k: int, tps: float, length: float) -> dict[str, Any]:
        return {"method": method, "k": k, "concurrency": 1, "output_tokens_per_s": tps, "acceptance_length": length,
                "dummy_weights": False, "simulated_acceptance": False}  # fmt: skip

    cells = [cell("peagle", 3, 120, 2.5), cell("peagle", 7, 140, 3.0), cell("eagle3", 3, 100, 2.6), cell("eagle3", 7, 90, 3.6)]
    found = {v.name: (v.found, v.met) for v in report.targets(cells, []) if v.found is not None}
    assert [round(value, 3) for value, _ in found.values()] == [1.4, 0.833, 0.5]
    assert [met for _, met in found.values()] == [True, False, False]
