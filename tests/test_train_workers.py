"""Data runs with several workers, and what makes their engines fast."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pair
import pytest
import torch
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


# -- the engine's shortcuts -------------------------------------------------------------------------------------------


@pytest.mark.skipif(find_spec("sglang") is None, reason="imports the engine's module")
def test_rows_are_sampled_by_their_own_settings() -> None:
    from sgl_peagle.train.offline_engine import sample

    torch.manual_seed(0)
    rows, logits = 20000, torch.tensor([1.0, 3.0, 2.0, -5.0])
    drawn = sample(logits.repeat(rows, 1), torch.full((rows, 1), 0.7), torch.full((rows,), 1 << 30))
    share = torch.bincount(drawn.long(), minlength=4) / rows
    torch.testing.assert_close(share, torch.softmax(logits / 0.7, 0), atol=0.015, rtol=0)
    mixed = sample(logits.repeat(rows, 1), torch.ones(rows, 1), torch.tensor([1, 1 << 30]).repeat(rows // 2))
    assert bool((mixed[::2] == 1).all()) and 0.2 < float((mixed[1::2] != 1).float().mean()) < 0.5


@pytest.mark.skipif(find_spec("sglang") is None or torch.accelerator.is_available(), reason="needs SGLang on a CPU")
def test_the_offline_engine_answers_as_sglangs_own() -> None:
    """Greedy requests among sampled ones, of many lengths, with late admissions and a cache that is too small for all."""
    import harness

    def answers(offline: bool) -> list[tuple[list[int], str]]:
        from sglang.srt.entrypoints.engine import Engine

        from sgl_peagle.train.offline_engine import start_engine

        options = harness.ENGINE_DEFAULTS | {
            "model_path": str(pair.TARGET), "skip_tokenizer_init": True, "sampling_backend": "pytorch",
            "max_running_requests": 16, "max_total_tokens": 640, "min_free_slots_delay": 4, "disable_radix_cache": True,
        }  # fmt: skip
        engine = (start_engine if offline else Engine)(**options)
        try:
            prompts = [[5 + (7 * i + j) % 90 for j in range(4 + i % 9)] for i in range(40)]
            sampling = [
                {"temperature": 0.7 * (i % 2), "max_new_tokens": 1 + (11 * i) % 60, "stop_token_ids": [2, 20 + i % 5]}
                for i in range(40)
            ]
            outputs = engine.generate(input_ids=prompts, sampling_params=sampling)
        finally:
            engine.shutdown()
        return [(output["output_ids"], output["meta_info"]["finish_reason"]["type"]) for output in outputs]

    mine, theirs = (harness.in_fork(lambda offline=offline: answers(offline)) for offline in (True, False))
    assert mine[::2] == theirs[::2]
    assert {reason for _, reason in mine} == {"stop", "length"}
    for i, (ids, reason) in enumerate(mine):  # sampled ones end where they should, too
        stops = {2, 20 + i % 5}
        assert not stops & set(ids[:-1]) and (reason == "stop") == (ids[-1] in stops)
        assert len(ids) <= 1 + (11 * i) % 60 and (reason == "stop" or len(ids) == 1 + (11 * i) % 60)
