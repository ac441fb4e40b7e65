"""Weight decay, running mean, noise, choice of the exported step, and equal batches for both methods."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sgl_peagle.train.batches import Documents, Feed, epoch_order, row_budget, training_batch
from sgl_peagle.train.corpus import Corpus
from sgl_peagle.train.loop import LOG, Trainer
from sgl_peagle.train.noise import with_noise
from sgl_peagle.train.rows import Cod
from sgl_peagle.train.target import States
from sgl_peagle.train.weights import Ema, make_optimizer, wearing
from train_cases import MASK, VOCAB, documents, load_target, make_head, place_of, quiet, run, settings_of


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return place_of(tmp_path_factory.mktemp("place"))


@pytest.mark.parametrize("optimizer_name", ["muon", "adamw"])
@pytest.mark.parametrize("embedding", ["mask_row", "full"])
def test_only_matrices_decay(place: Path, embedding: str, optimizer_name: str) -> None:
    """With gradients of zero a step moves what decays, and nothing else."""
    head = make_head(load_target(place / "target"), embedding=embedding)
    before = {name: p.detach().clone() for name, p in head.named_parameters()}
    settings = settings_of(place, optimizer=optimizer_name, matrix_lr=0.1, lr=0.1, embedding_lr=0.1, weight_decay=0.5)
    optimizer = make_optimizer(head, settings)
    for parameter in head.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    moved = {name for name, p in head.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if name.endswith(("_proj.weight", "fc.weight"))}
    assert torch.allclose(head.fc.weight, before["fc.weight"] * 0.95)


def test_running_mean(place: Path) -> None:
    head = make_head(load_target(place / "target"))
    ema, want = Ema(head, 0.8), head.fc.weight.detach().clone()
    for step in range(1, 30):
        with torch.no_grad():
            head.fc.weight.add_(1.0)
        ema.update(step)
        decay = min(0.8, (1 + step) / (10 + step))
        want = decay * want + (1 - decay) * head.fc.weight
    assert torch.allclose(ema.weights["fc.weight"], want, atol=1e-4)
    own = head.fc.weight.detach().clone()
    with pytest.raises(RuntimeError), wearing(head, ema.weights):
        assert torch.equal(head.fc.weight, ema.weights["fc.weight"])
        raise RuntimeError
    assert torch.equal(head.fc.weight, own)


def test_the_mean_is_exported(place: Path, tmp_path: Path) -> None:
    trainer = run(settings_of(place, ema=0.9), tmp_path / "out")
    assert trainer.ema is not None
    exported = load_file(tmp_path / "out" / "head" / "model.safetensors")
    name = "layers.0.mlp.up_proj.weight"
    assert torch.equal(exported[name], trainer.ema.weights[name].bfloat16())
    assert not torch.equal(exported[name], trainer.head.state_dict()[name].bfloat16())
    plain = run(settings_of(place), tmp_path / "plain")
    assert all(torch.equal(p, q) for p, q in zip(plain.head.parameters(), trainer.head.parameters()))


def test_noise_belongs_to_the_document(place: Path) -> None:
    texts = documents(3, 30)
    scale = torch.arange(1, 7).float()

    def noise_of(chosen: list[int], seed: int = 1, epoch: int = 0) -> dict[int, torch.Tensor]:
        batch = training_batch([texts[i] for i in chosen], 0, 0, Cod(3))
        states = States(torch.zeros(batch.tokens.numel(), 6), torch.ones(batch.tokens.numel(), 2))
        found = with_noise(states, batch, 0.5, scale, seed, epoch)
        assert torch.equal(found.last, states.last) and not states.aux.any()
        aux = found.aux.view(*batch.tokens.shape, 6)
        return {i: aux[at, : texts[i].n] for at, i in enumerate(chosen)}

    whole, other = noise_of([0, 1, 2]), noise_of([2, 0])
    assert torch.equal(whole[0], other[0]) and torch.equal(whole[2], other[2])
    assert not torch.equal(whole[0][:5], whole[1][:5])
    assert not torch.equal(whole[0], noise_of([0], seed=2)[0])
    assert not torch.equal(whole[0], noise_of([0], epoch=1)[0])
    relative = whole[0] / (0.5 * scale)
    assert float(relative.abs().max()) <= 1 and float(relative.abs().mean()) == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("way", ["recompute", "cached"])
def test_noise_does_not_depend_on_the_partition(place: Path, tmp_path: Path, way: str) -> None:
    one = run(settings_of(place, optimizer="adamw", noise=0.3, steps=2), tmp_path / "one")
    cut = run(
        settings_of(place, optimizer="adamw", noise=0.3, steps=2, segments=3, partition=way), tmp_path / "cut"
    )
    without = run(settings_of(place, optimizer="adamw", steps=2), tmp_path / "without")
    states = [trainer.optimizer.state_dict()[-1]["state"] for trainer in (one, cut, without)]  # AdamW's
    means = [torch.cat([s["exp_avg"].flatten() for s in state.values()]) for state in states]
    assert float((means[0] - means[1]).norm() / means[0].norm()) < 1e-3
    assert float((means[0] - means[2]).norm() / means[0].norm()) > 1e-2


@pytest.mark.parametrize("select", ["last", "best"])
def test_choice_of_the_exported_step(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, select: str) -> None:
    """A run whose held-out walk is best in the middle."""
    settings = settings_of(place, select=select, holdout=2, eval_every=2, served=2, embedding="full")
    trainer = Trainer(settings, tmp_path / "out", echo=quiet)
    kept = {}

    def walks(head: object, *_: object, **__: object) -> dict[str, object]:
        kept[trainer.step] = trainer.head.fc.weight.detach() / trainer.head.aux_scale
        walk = [1.0, 2.0 if trainer.step == 4 else 1.5, 9.0 - trainer.step, 1.0]
        return {"walk": walk, "all_anchors": [1.0] * 4, "accuracy": []}

    monkeypatch.setattr("sgl_peagle.train.loop.evaluate", walks)
    trainer.run()
    record = json.loads((tmp_path / "out" / "head" / "training.json").read_text())
    step = 4 if select == "best" else 6
    assert record["exported_step"] == step and record["steps_done"] == 6 and record["select"] == select
    assert record["holdout"] == {
        "documents": 2, "k": 2, "last": {"step": 6, "walk": 1.5}, "best": {"step": 4, "walk": 2.0},
    }  # fmt: skip
    exported = load_file(tmp_path / "out" / "head" / "model.safetensors")
    assert torch.equal(exported["fc.weight"], kept[step].bfloat16())
    line = json.loads((tmp_path / "out" / LOG).read_text().splitlines()[-1])
    assert line["exported_step"] == step and line["of"] == record["holdout"]


def test_both_methods_see_the_same_documents(place: Path, tmp_path: Path) -> None:
    """In the same order, step by step; and no batch has more rows than shapes are made for."""
    corpus = Corpus.open(place / "corpus")
    feeds = []
    for mask, cod in ((MASK, Cod(8, 0.8, 0.2)), (None, Cod(1))):
        found = list(Documents(corpus, 64, True, VOCAB, mask))
        feed = Feed(found, 5, 100, cod)
        seen = [feed.next() for _ in range(20)]
        feed.close()
        assert all(len(item[3].rows) <= row_budget(found, 5, 100, cod) for item in seen)
        feeds.append(seen)
    for one, two in zip(*feeds):
        assert one[:3] == two[:3] and np.array_equal(one[3].samples, two[3].samples)
    lengths = [d.n for d in documents(12, 40)]
    assert all(sum(lengths[i] for i in batch) <= 100 for batch in epoch_order(documents(12, 40), 0, 0, 100))
