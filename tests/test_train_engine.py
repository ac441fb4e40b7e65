"""Heads from the trainer in real engines: lossless, drafts as the oracle's, and as many rounds as the walk foretells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import with_engine
from pair import TARGET, greedy, prompts
from test_engine import check, peagle

from sgl_peagle.train.attention import sdpa_plan
from sgl_peagle.train.batches import Document
from sgl_peagle.train.corpus import Corpus
from sgl_peagle.train.holdout import accepted, eagle3_drafts, peagle_drafts, walk
from sgl_peagle.train.loop import Trainer
from sgl_peagle.train.rows import supervised
from sgl_peagle.train.settings import Settings

NEW, K = 40, 4


def texts() -> list[tuple[int, tuple[int, ...]]]:
    """(length of the prompt, prompt and greedy answer) of the pair's prompts."""
    return [(len(p), p + greedy(p, NEW)) for p in prompts(12)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus") / "corpus"
    Corpus.of(((list(t), [i >= n for i in range(len(t))]) for n, t in texts()), {"what": "test"}).write(folder)
    return folder


def trained(corpus: Path, out: Path, method: str, steps: int) -> Trainer:
    own: dict[str, Any] = {"mask_token_id": 3, "layers": 2} if method == "peagle" else {}
    settings = Settings(
        target=str(TARGET), corpus=str(corpus), method=method, depths=K + 1, steps=steps, tokens_per_step=600,
        max_length=256, lr=3e-3, device="cpu", **own,
    )  # fmt: skip
    trainer = Trainer(settings, out, formats=("peagle", "vllm") + (("speculators",) if method == "peagle" else ()), echo=lambda _: None)
    trainer.run()
    with torch.no_grad():  # the walk must see the weights that the engine loads
        for name, parameter in trainer.head.named_parameters():
            parameter.copy_(parameter.bfloat16().float())
    return trainer


def rounds_by_walk(trainer: Trainer, drafts_of: Any) -> list[int]:
    found = []
    for n, text in texts():
        marks = np.arange(len(text)) >= n
        document = Document(0, np.array(text), supervised(marks))
        drafts = drafts_of(trainer.head, [document], trainer.target, sdpa_plan, K)[0]
        found.append(len(walk(document, accepted(document, drafts))))
    return found


def rounds_by_engine(**engine: Any) -> list[int]:
    """Verify rounds of each text, one request at a time; the output is checked as well."""

    def use(running: Any) -> list[tuple[list[int], int]]:
        params = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
        done = [running.generate(input_ids=list(p), sampling_params=params) for p in prompts(12)]
        return [(list(o["output_ids"]), o["meta_info"]["spec_verify_ct"]) for o in done]

    results = with_engine(use, **engine)
    for prompt, (ids, _) in zip(prompts(12), results):
        assert tuple(ids) == greedy(prompt, NEW)
    return [count for _, count in results]


def test_peagle_head_serves(corpus: Path, tmp_path: Path) -> None:
    trainer = trained(corpus, tmp_path / "run", "peagle", 120)
    (tmp_path / "record").mkdir()
    check(tmp_path / "record", K, head=tmp_path / "run" / "head-vllm", warm=False,
          speculative_draft_model_path=str(tmp_path / "run" / "head-vllm"))  # fmt: skip
    want = rounds_by_walk(trainer, peagle_drafts)
    assert sum(want) < 12 * (NEW - 1) * 0.6, "the head learned too little for the comparison to mean anything"
    for folder in ("head", "head-speculators"):
        assert rounds_by_engine(**peagle(K, speculative_draft_model_path=str(tmp_path / "run" / folder))) == want, folder


def test_eagle3_head_serves_in_stock_sglang(corpus: Path, tmp_path: Path) -> None:
    trainer = trained(corpus, tmp_path / "run", "eagle3", 120)
    want = rounds_by_walk(trainer, eagle3_drafts)
    assert sum(want) < 12 * (NEW - 1) * 0.6
    found = rounds_by_engine(
        model_path=str(TARGET), speculative_algorithm="EAGLE3", speculative_eagle_topk=1, speculative_num_steps=K,
        speculative_num_draft_tokens=K + 1, speculative_draft_model_path=str(tmp_path / "run" / "head"),
    )  # fmt: skip
    assert found == want
