"""Whole runs on a small random target: resumption bit by bit, learning, refusals, and what is exported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from sgl_peagle.cli import main
from sgl_peagle.errors import PEagleError
from sgl_peagle.heads.report import inspect_head
from sgl_peagle.oracle import OracleHead
from sgl_peagle.train import checkpoint
from sgl_peagle.train.attention import sdpa_plan
from sgl_peagle.train.batches import Documents, Feed, epoch_order, row_budget
from sgl_peagle.train.corpus import Corpus
from sgl_peagle.train.holdout import accepted, evaluate, peagle_drafts, walk
from sgl_peagle.train.loop import LOG, Trainer
from sgl_peagle.train.rows import Cod
from sgl_peagle.train.settings import DEFAULTS, METHODS, Settings
from train_cases import MASK, VOCAB, corpus, documents, load_target, make_head
from train_cases import place_of, quiet, run, settings_of


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return place_of(tmp_path_factory.mktemp("place"))


@pytest.mark.parametrize("changes", [
    {}, {"embedding": "full", "segments": 3}, {"segments": 2, "partition": "cached"}, {"method": "eagle3", "refused_weight": 0.2}, {"refused_weight": 0.1, "segments": 2}, {"optimizer": "adamw"}, {"steps": None, "epochs": 1.5, "tokens_per_step": 120},
    {"ema": 0.9, "noise": 0.1, "weight_decay": 0.1, "segments": 2}, {"holdout": 2, "select": "best", "eval_every": 1, "ema": 0.9},
])  # fmt: skip
def test_resume_is_bit_exact(place: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    """6 steps are 3 steps, a checkpoint and 3 steps: weights, optimiser, order of the data, random state."""
    settings = settings_of(place, **changes)
    straight = run(settings, tmp_path / "straight")
    run(settings, tmp_path / "broken", stop_after=3)
    assert not (tmp_path / "broken" / "head").exists()
    run(settings, tmp_path / "broken", resume=True)
    one, two = (checkpoint.load(tmp_path / name) for name in ("straight", "broken"))
    assert one["step"] == two["step"] == straight.total
    for name in ("epoch", "index", "tokens_seen", "schedule", "plans"):
        assert one[name] == two[name]
    assert torch.equal(one["rng"], two["rng"])
    assert all(torch.equal(one["head"][name], two["head"][name]) for name in one["head"])
    for first, second in zip(one["optimizer"], two["optimizer"], strict=True):
        for key, state in first["state"].items():
            assert all(torch.equal(state[name], second["state"][key][name]) for name in state)
    assert (one["ema"] is None) == (two["ema"] is None)
    assert all(torch.equal(value, two["ema"][name]) for name, value in (one["ema"] or {}).items())
    files = [load_file(tmp_path / name / "head" / "model.safetensors") for name in ("straight", "broken")]
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])


def test_feed_goes_on_where_it_stopped(place: Path) -> None:
    found = list(Documents(Corpus.open(place / "corpus"), 64, True, VOCAB, MASK))
    cod = Cod(4, 0.7, 0.2)
    budget = row_budget(found, 1, 80, cod)
    whole = Feed(found, 1, 80, cod)
    seen = [whole.next() for _ in range(12)]
    whole.close()
    epoch, index = seen[7][:2]
    later = Feed(found, 1, 80, cod, epoch, index)
    for want in seen[7:]:
        got = later.next()
        assert got[:3] == want[:3] and torch.equal(got[3].tokens, want[3].tokens)
        assert np.array_equal(got[3].rows.anchor, want[3].rows.anchor)
    later.close()
    order = epoch_order(found, 1, 0, 80)
    assert sorted(i for batch in order for i in batch) == list(range(len(found)))
    assert order != epoch_order(found, 1, 1, 80)
    assert all(len(item[3].rows) <= budget for item in seen)


def test_overfits_one_batch(place: Path, tmp_path: Path) -> None:
    """A head learns a few documents by heart, at every depth (random text: nothing else to learn)."""
    corpus(4, 20).write(tmp_path / "corpus")
    settings = settings_of(
        place, corpus=str(tmp_path / "corpus"), steps=250, tokens_per_step=400, lr=5e-3, cod_ratio=1.0, log_every=25
    )
    trainer = run(settings, tmp_path / "out")
    lines = [json.loads(line) for line in (tmp_path / "out" / LOG).read_text().splitlines()]
    lines = [line for line in lines if "loss" in line]
    assert all(loss < 0.05 for loss in lines[-1]["loss_by_depth"])
    assert all(first > 0.3 for first in lines[0]["loss_by_depth"])
    assert min(lines[-1]["accuracy"]) > 0.8  # the target is undecided between tokens in places
    moved = trainer.head.mask_hidden.detach() - make_head(trainer.target).mask_hidden
    assert float(moved.norm()) > 0


@pytest.mark.parametrize("method", ["peagle", "eagle3"])
def test_learns_through_the_command(place: Path, tmp_path: Path, method: str) -> None:
    arguments = ["train", "run", "--target", str(place / "target"), "--corpus", str(place / "corpus"), "--out"]
    arguments += [str(tmp_path / "out"), "--method", method, "--steps", "30", "--tokens-per-step", "200", "--holdout", "2"]
    arguments += ["--depths", "3", "--lr", "3e-3", "--log-every", "5", "--max-length", "64", "--device", "cpu"]
    arguments += ["--mask-token-id", str(MASK), "--to", "peagle", "--to", "vllm", "--to", "speculators"] * (method == "peagle")
    arguments += ["--ema", "0.5", "--noise", "0.01", "--weight-decay", "0.01", "--select", "best", "--served-k", "2"]
    arguments += ["--eval-every", "10", "--clip", "0.9", "--intermediate-size", "48"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in (tmp_path / "out" / LOG).read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert steps[-1]["loss"] < 0.8 * steps[0]["loss"] and steps[-1]["step"] == 30
    held = [line["holdout"] for line in lines if "holdout" in line]
    assert len(held[-1]["walk"]) == len(held[-1]["accuracy"]) == 3 and held[-1]["walk"][0] >= 1
    config = json.loads((tmp_path / "out" / "head" / "config.json").read_text())
    record = config["training"]
    assert config["intermediate_size"] == 48 and record["refused_weight"] == (0.1 if method == "peagle" else 1.0)
    assert record["num_depths"] == 3 and record["seed"] == 0 and record["aux_layer_ids"] == [2, 3, 4]
    assert record["corpus_sha256"] == Corpus.open(place / "corpus").sha256
    assert record["exported_step"] in (10, 20, 30) and record["holdout"]["k"] == 2 and record["clip"] == 0.9
    assert str(place) not in json.dumps(config)
    if method == "eagle3":
        tensors = load_file(tmp_path / "out" / "head" / "model.safetensors")
        assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["draft_vocab_size"] is None
        assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
        assert "mask_hidden" not in tensors and "midlayer.self_attn.q_proj.weight" in tensors and "fc.weight" in tensors
        return
    target = str(place / "target")
    for name in ("head", "head-vllm", "head-speculators"):
        report = inspect_head(str(tmp_path / "out" / name), target=target)
        assert report.ok and report.head.config.k_trained == 3
    model = AutoModelForCausalLM.from_pretrained(target)
    embedding, lm_head = (m.weight.detach() for m in (model.get_input_embeddings(), model.get_output_embeddings()))
    # Every tensor of each file is consumed, and all three give the same drafts.
    rounds = []
    text = documents(1, 20)[0]
    aux = load_target(place / "target").read(torch.from_numpy(text.tokens[None, :-1])).aux
    full = load_file(tmp_path / "out" / "head-vllm" / "model.safetensors")
    compact = load_file(tmp_path / "out" / "head" / "model.safetensors")
    assert torch.equal(full["lm_head.weight"], lm_head.bfloat16())
    others = torch.arange(VOCAB) != MASK
    assert torch.equal(full["embed_tokens.weight"][others], embedding.bfloat16()[others])
    assert torch.equal(full["embed_tokens.weight"][MASK], compact["embed_mask_row"])
    assert not torch.equal(compact["embed_mask_row"], embedding.bfloat16()[MASK])
    tensors = dict(compact)
    row = tensors.pop("embed_mask_row")
    own = embedding.clone()
    own[MASK] = row.float()
    for name, value in (("compact", tensors), ("full", full)):
        head = OracleHead(config, value, target_embed=own, target_lm_head=lm_head.bfloat16(), source=name)
        rounds.append(head.drafts(torch.from_numpy(text.tokens), aux, 3).logits)
    torch.testing.assert_close(rounds[0], rounds[1], atol=0.05, rtol=0.02)


def test_holdout_numbers(place: Path) -> None:
    """Drafts of the evaluation are the oracle's kind: a head's own rows; walk and all-anchors by a toy."""
    text = documents(1, 6)[0]
    text.weight[:] = [False, False, True, True, True, True]
    lengths = np.array([0, 0, 1, 2, 0, 0])
    assert walk(text, lengths) == [2, 1, 1]  # anchors 2, 4, 5: AL 4/3
    assert 1 + lengths[text.weight].mean() == 1.75
    drafts = np.full((6, 3), -1)
    drafts[2] = [*text.tokens[4:6], 0]
    drafts[3] = [0, *text.tokens[6:7], 0]
    assert accepted(text, drafts).tolist() == [0, 0, 2, 0, 0, 0]
    target = load_target(place / "target")
    head = make_head(target)
    texts = documents(3, 20)
    apart = [peagle_drafts(head, [t], target, sdpa_plan, 3)[0] for t in texts]
    together = peagle_drafts(head, texts, target, sdpa_plan, 3)
    assert all(np.array_equal(a, b) for a, b in zip(apart, together))
    result = evaluate(head, texts, target, sdpa_plan, 3, method="peagle", row_budget=50)
    assert len(result["walk"]) == 3 and result["rounds"] > 0


def test_going_on_after_an_export_keeps_it(place: Path, tmp_path: Path) -> None:
    """Time was up, a head was exported; the resumed run exports its own beside it."""
    settings = settings_of(place)
    trainer = Trainer(settings, tmp_path / "out", echo=quiet)
    trainer._out_of_time = lambda: trainer.step == 2  # type: ignore[method-assign]
    assert trainer.run() is None
    run(settings, tmp_path / "out", resume=True)
    run(settings, tmp_path / "out", resume=True)  # complete: nothing to do
    done = {f.name: json.loads((f / "training.json").read_text())["steps_done"] for f in (tmp_path / "out").glob("head*")}
    assert done == {"head": 6, "head-step2": 2}


@pytest.mark.parametrize(("number", "to_all"), [(signal.SIGTERM, False), (signal.SIGINT, True), (signal.SIGTERM, True)])
def test_a_signal_ends_in_order(number: signal.Signals, to_all: bool, place: Path, tmp_path: Path) -> None:
    """The step is finished, a checkpoint written, the way on is shown; nothing is exported.

    A terminal sends SIGINT to all processes of a run, a cluster SIGTERM: the one that makes batches must outlive them.
    """
    command = [sys.executable, "-c", "from sgl_peagle.cli import main; main()", "train", "run", "--target"]
    command += [str(place / "target"), "--corpus", str(place / "corpus"), "--out", str(tmp_path / "out"), "--steps", "100000"]
    command += ["--mask-token-id", str(MASK), "--tokens-per-step", "80", "--log-every", "1", "--device", "cpu", "--max-length", "64"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )  # fmt: skip
    log = tmp_path / "out" / LOG
    try:
        for _ in range(600):
            if log.is_file() and process.poll() is None and len(log.read_text().splitlines()) > 3:
                break
            time.sleep(0.1)
        (os.killpg if to_all else os.kill)(process.pid, number)
        output, complaints = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + number and "--resume" in output, complaints[-2000:]
    assert "Traceback" not in complaints, complaints[-2000:]
    assert checkpoint.load(tmp_path / "out")["step"] >= 3
    assert not (tmp_path / "out" / "head").exists()


def test_refusals(place: Path, tmp_path: Path) -> None:
    def refused(words: str, **changes: Any) -> None:
        with pytest.raises(PEagleError, match=words):
            Trainer(settings_of(place, **changes), tmp_path / "new", echo=quiet)
        assert not (tmp_path / "new").exists()

    refused("MASK id 5 occurs", mask_token_id=5)
    refused("of a vocabulary of", mask_token_id=VOCAB)
    refused("no MASK token id", mask_token_id=None)
    refused("exactly one", minutes=1.0)
    refused("not given", steps=None)
    refused("positions", max_length=1000)
    refused("nothing is left", holdout=12)
    refused("cannot be read as a corpus", corpus=str(tmp_path))
    refused("no target at", target=str(tmp_path / "nowhere"))
    refused("beyond|after the final norm", aux_layer_ids=(2, 3, 7))
    refused("one layer", method="eagle3", layers=2)
    refused("must learn", embedding="frozen")
    refused("an own embedding", method="eagle3", embedding="full")
    refused("refused_weight is 1.5", refused_weight=1.5)
    refused("intermediate_size is 0", intermediate_size=0)
    refused("shares of the rows", cod_ratio=1.5)
    refused("weight_decay is -1", weight_decay=-1.0)
    refused("noise is 2", noise=2.0)
    refused("ema is 1", ema=1.0)
    refused("without held-out documents", select="best")
    refused("select is 'first'", select="first")
    refused("served is 5", served=5)
    refused("eval_every is 0", eval_every=0)
    (tmp_path / "kept").mkdir()
    with pytest.raises(PEagleError, match="nothing is overwritten"):
        Trainer(settings_of(place), tmp_path / "kept", echo=quiet)
    with pytest.raises(PEagleError, match="checkpoint.pt does not exist"):
        Trainer(settings_of(place), tmp_path / "kept", resume=True, echo=quiet)
    run(settings_of(place), tmp_path / "run", stop_after=2)
    with pytest.raises(PEagleError, match="lr 0.002 -> 0.001"):
        Trainer(replace(settings_of(place), lr=0.001), tmp_path / "run", resume=True, echo=quiet)
    (tmp_path / "run" / checkpoint.FILE).write_bytes(b"no checkpoint")
    with pytest.raises(PEagleError, match="cannot be read"):
        Trainer(settings_of(place), tmp_path / "run", resume=True, echo=quiet)


def test_what_is_left_out_is_the_methods() -> None:
    ours, theirs = (DEFAULTS[method] for method in METHODS)
    for method, length in (("peagle", {"mask_token_id": MASK}), ("eagle3", {})):
        made = Settings(target="t", corpus="c", method=method, steps=1, **length)
        assert {name: getattr(made, name) for name in DEFAULTS[method]} == DEFAULTS[method]
    text = " ".join(CliRunner().invoke(main, ["train", "run", "--help"]).output.split())
    for name in ("layers", "depths", "refused_weight"):
        assert f"[default: {ours[name]:g}; eagle3: {theirs[name]:g}]" in text


def test_commands_are_lazy() -> None:
    code = "import sys; import sgl_peagle.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
