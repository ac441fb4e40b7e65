"""Data runs with several workers, and what makes their engines fast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pair
import pytest
from data_runs import files, make_run  # noqa: F401  (files is a fixture)

from sgl_peagle.errors import PEagleError
from sgl_peagle.train.chat import ChatFormat
from sgl_peagle.train.conversations import Job, Speaker, Task
from sgl_peagle.train.corpus import Corpus
from sgl_peagle.train.crew import Workers, visible_gpus
from sgl_peagle.train.prompts import Prompt

def test_two_workers_make_the_same_documents(tmp_path: Path, files: dict[str, Path]) -> None:
    """With transformers, whose draws depend on the job only, even the sampled ones."""
    make_run(tmp_path / "one", files, synthetic=8).everything()
    crew = Workers(2, "transformers", pair.TARGET, 0, {})
    make_run(tmp_path / "two", files, synthetic=8, crew=crew).everything()
    folders = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").glob("eval/*"))
    for folder in [Path("train"), *folders]:
        assert Corpus.open(tmp_path / "one" / folder).sha256 == Corpus.open(tmp_path / "two" / folder).sha256
    assert len(folders) >= 2


def _jobs(number: int) -> list[Job]:
    prompts = [Prompt("gsm8k", (f"Count by {i} from {i}",)) for i in range(1, number + 1)]
    return [Job(f"job {i}", [Task("answer", "", prompt)] * 8) for i, prompt in enumerate(prompts)]


def _begun(workers: int) -> tuple[Workers, list[str]]:
    notes: list[str] = []
    crew = Workers(workers, "transformers", pair.TARGET, 0, {})
    crew.begin(Speaker(ChatFormat.of(pair.TARGET), 512, 24), notes.append)
    return crew, notes


def test_jobs_of_a_killed_worker_go_to_another() -> None:
    crew, notes = _begun(2)
    found: dict[str, list[Any]] = {}

    def finished(name: str, results: list[Any]) -> None:
        if not found:  # one of the two is in the middle of a job
            crew._hands[0].process.kill()
        assert name not in found
        found[name] = results

    try:
        crew.work(iter(_jobs(12)), finished, 96, "test")
    finally:
        crew.close()
    assert sorted(found) == sorted(job.name for job in _jobs(12)) and all(len(r) == 8 for r in found.values())
    assert any("worker 0 is lost: it ended with exit code -9" in note for note in notes)


def test_no_worker_left_is_an_error() -> None:
    crew, _ = _begun(2)

    def finished(_name: str, _results: list[Any]) -> None:
        for hand in crew._hands:
            hand.process.kill()

    try:
        with pytest.raises(PEagleError, match=r"(no worker is left|under way in 2 workers)[^!]*exit code -9"):
            crew.work(iter(_jobs(12)), finished, 96, "test")
    finally:
        crew.close()


def test_a_worker_says_why_it_cannot_start(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    crew = Workers(2, "nothing", tmp_path, 0, {})
    crew.begin(Speaker(ChatFormat.of(pair.TARGET), 512, 24), lambda _text: None)
    try:
        with pytest.raises(PEagleError, match="no worker is left[^!]*there are sglang and transformers"):
            crew.work(iter(_jobs(1)), lambda _name, _results: None, 8, "test")
    finally:
        crew.close()


def test_workers_are_spread_over_the_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    assert visible_gpus() == ["3", "5"]
    started: list[Any] = []

    class Process:
        def __init__(self, args: Any, **_named: Any) -> None:
            started.append(args[0])

        def start(self) -> None: ...

    from multiprocessing.context import SpawnContext

    monkeypatch.setattr(SpawnContext, "Process", Process)
    Workers(5, "sglang", pair.TARGET, 0, {})
    assert [(start.gpu, start.share) for start in started] == [("3", 3), ("5", 2), ("3", 3), ("5", 2), ("3", 3)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert visible_gpus() == []


def test_cache_of_workers_that_share_a_gpu(tmp_path: Path) -> None:
    from sgl_peagle.train.generate import RUNNING, Share, _cache_tokens

    config = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert _cache_tokens(tmp_path, Share(3, 140 * 2**30), RUNNING) == RUNNING * 1280  # 23 kB each: enough for all requests
    assert RUNNING * 640 < _cache_tokens(tmp_path, Share(5, 140 * 2**30), RUNNING) < RUNNING * 1280
    with pytest.raises(PEagleError, match="do not fit"):
        _cache_tokens(tmp_path, Share(30, 140 * 2**30), RUNNING)
