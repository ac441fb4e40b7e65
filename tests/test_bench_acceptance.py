"""bench/acceptance.py: its arithmetic, its resumption, and one real CPU engine."""

from __future__ import annotations

import importlib.util
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pair
import pytest
import torch

pytestmark = pytest.mark.skipif(
    find_spec("sglang") is None or torch.accelerator.is_available(), reason="needs SGLang on a machine without a GPU"
)


@pytest.fixture
def bench() -> ModuleType:
    file = Path(__file__).parent.parent / "bench" / "acceptance.py"
    spec = importlib.util.spec_from_file_location("bench_acceptance", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def record(
    prompt: int, completion: int, rounds: int, histogram: list[int], loops: bool = False, kind: str = "a"
) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt, "completion_tokens": completion, "rounds": rounds, "loops": loops, "kind": kind,
        "histogram": histogram,
    }  # fmt: skip


def test_cells(bench: ModuleType) -> None:
    """Two requests; the first has rounds with 0, 1 and 2 accepted drafts, the second loops and accepts all."""
    records = [record(100, 7, 3, [1, 1, 1]), record(600, 9, 2, [0, 0, 0, 2], True, "b"), record(5, 1, 0, [])]
    found = list(bench.cells(records, 3))
    by = {(cell["loops"], cell["context"]): cell for cell in found if cell["kind"] == "all"}
    assert {(c["loops"], c["kind"]): c["acceptance_length"] for c in found if c["kind"] != "all"} == {
        ("included", "a"): 2.0, ("included", "b"): 4.0
    }  # fmt: skip
    whole, calm = by["included", "all"], by["excluded", "all"]
    assert whole["acceptance_length"] == round((6 + 8) / 5, 4) and whole["rounds"] == 5 and whole["requests"] == 2
    assert whole["per_position"] == [0.8, 0.6, 0.4] and whole["one_plus_accepted"] == 2.8
    assert whole["mean_of_requests"] == 3.0
    assert calm["acceptance_length"] == 2.0 and calm["per_position"] == [0.6667, 0.3333, 0.0]
    assert by["included", "<=512"]["rounds"] == 3 and by["included", "<=1024"]["rounds"] == 2
    assert ("excluded", "<=1024") not in by


def test_merge(bench: ModuleType) -> None:
    def report(method: str, k: int, date: str = "d", gpu: str = "one") -> dict[str, Any]:
        cell = {"target": "t", "head": "h", "method": method, "prompts": "p", "k": k, "temperature": 0}
        cell |= {"loops": "included", "context": "all", "kind": "all"}
        environment = {"date": date, "gpu": gpu, "cpu_count": {"d": "16", "later": "32"}[date]}
        return {"environment": environment, "concurrency": 8, "failed": {f"{method} {k}": "x"}, "cells": [cell]}

    whole = bench.merged([report("eagle3", 7), report("peagle", 7), report("eagle3", 3)])
    assert [(c["method"], c["k"]) for c in whole["cells"]] == [("eagle3", 3), ("peagle", 7), ("eagle3", 7)]
    assert len(whole["failed"]) == 3 and whole["concurrency"] == 8
    assert "environments" not in whole and "environment_index" not in whole["cells"][0]
    with pytest.raises(SystemExit, match="differ in environment"):
        bench.merged([report("eagle3", 7), report("peagle", 7, gpu="other")])
    with pytest.raises(SystemExit, match="differ in concurrency"):
        bench.merged([report("eagle3", 7), report("peagle", 7) | {"concurrency": 9}])
    later = bench.merged([report("eagle3", 7), report("peagle", 7, "later"), report("peagle", 3, "later")])
    with pytest.raises(SystemExit, match="merged already"):
        bench.merged([later, report("eagle3", 3)])
    assert [e["date"] for e in later["environments"]] == ["d", "later"]
    assert [(c["k"], c["method"], c["environment_index"]) for c in later["cells"]] == [(3, "peagle", 1), (7, "peagle", 1), (7, "eagle3", 0)]
    with pytest.raises(SystemExit, match="same cell"):
        bench.merged([report("eagle3", 7), report("eagle3", 7)])


def test_multi_turn_conversations_are_one_of_six_kinds(bench: ModuleType) -> None:
    stamp = {"target": "t", "head": "h", "method": "peagle", "prompts": "spec_bench", "k": 2, "temperature": 0.0}
    records = [record(10, 9, 4, [0, 4]), record(10, 13, 4, [0, 0, 4]), record(10, 5, 2, [0, 2])]
    for one, kind in zip(records, ("math", "stem", "qa")):
        one["kind"] = kind
    found = bench.with_multi_turn([stamp | cell for cell in bench.cells(records, 2)])
    pooled = [c for c in found if c["kind"] == "multi_turn" and c["loops"] == "included"]
    direct = bench.acceptance(records[:2], 2)
    assert len(pooled) == 1 and {name: pooled[0][name] for name in direct} == direct
    assert bench.with_multi_turn(found) == found


def test_results_of_another_head_or_setting_stay_apart(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bench, "run_engine", lambda _setup, work, *_: [[record(10, 5, 2, [0, 2])] for _ in work])
    out = tmp_path / "acceptance.json"
    run(bench, monkeypatch, out, "--k", "3")
    report = json.loads(out.read_text())
    assert report["limit"] is None and len(report["heads_sha256"]["peagle head"]) == 64
    with pytest.raises(SystemExit, match="limit None, not 1"):
        run(bench, monkeypatch, out, "--k", "5", "--limit", "1")
    other = report | {"heads_sha256": {"peagle head": "0" * 64}}
    out.write_text(json.dumps(other))
    with pytest.raises(SystemExit, match="heads_sha256"):
        run(bench, monkeypatch, out, "--k", "5")
    moved = other | {"cells": [cell | {"k": 9} for cell in other["cells"]]}
    with pytest.raises(SystemExit, match="different things named 'peagle head'"):
        bench.merged([report, moved])


def test_plot(bench: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    stamp = {"target": "t", "head": "h", "method": "peagle", "prompts": "p", "temperature": 0.0}
    cells = [stamp | {"k": k} | cell for k in (3, 5) for cell in bench.cells([record(10, 5, 2, [0, 2])], k)]
    report = {"environment": {"gpu": "none", "date": "today"}, "cells": cells}
    bench.plot(report, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 5000
    with pytest.raises(SystemExit, match="one head of each method"):
        bench.plot(report | {"cells": cells + [cell | {"head": "other"} for cell in cells]}, tmp_path / "b.png")


def run(bench: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, *more: str) -> None:
    prompts = out.parent / "toy.jsonl"
    prompts.write_text('{"turns": ["Where does Anna live?", "List more"]}\n{"prompt": "Count by 2"}\n')
    arguments = ["--target", str(pair.TARGET), "--peagle", str(pair.HEAD), "--prompts", f"toy={prompts}", "--max-new-tokens", "16"]
    monkeypatch.setattr(sys, "argv", ["acceptance.py", *arguments, "--out", str(out), *more])
    bench.main()


def test_real_engine(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "acceptance-toy.json"
    run(bench, monkeypatch, out, "--k", "3")
    report = json.loads(out.read_text())
    assert {"gpu", "driver", "torch", "triton", "sglang", "sgl_peagle", "date"} <= set(report["environment"])
    cell = report["cells"][0]
    assert {"target", "head", "method", "prompts", "k", "temperature", "acceptance_length", "per_position"} <= set(cell)
    assert (cell["method"], cell["k"], cell["temperature"], cell["requests"]) == ("peagle", 3, 0.0, 3)
    assert cell["acceptance_length"] > 1
    shown = capfd.readouterr().out
    assert "temperature 0.7 is left out" in shown and "| peagle | head | toy | 0 | 3 |" in shown
    assert str(tmp_path) not in out.read_text()


def test_cells_that_are_there_are_not_run_again(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import harness

    ran = []

    def engine(setup: Any, work: list[Any], *_rest: Any) -> list[Any]:
        ran.append((setup.k, [(wanted.name, temperature) for wanted, temperature in work]))
        if setup.k == 5 and len(ran) == 2:
            raise harness.EngineFailed("out of memory")
        return [[record(10, 5, 2, [0, 2])] for _ in work]

    monkeypatch.setattr(bench, "run_engine", engine)
    out = tmp_path / "acceptance.json"
    run(bench, monkeypatch, out, "--k", "3,5", "--temperature", "0")
    assert [k for k, _ in ran] == [3, 5] and json.loads(out.read_text())["failed"] == {"peagle head K=5": "out of memory"}
    run(bench, monkeypatch, out, "--k", "3,5", "--temperature", "0")
    assert [k for k, _ in ran] == [3, 5, 5] and ran[-1][1] == [("toy", 0.0)]
    report = json.loads(out.read_text())
    assert report["failed"] == {} and {cell["k"] for cell in report["cells"]} == {3, 5}
    assert "K=3: all cells are there" in capfd.readouterr().out
