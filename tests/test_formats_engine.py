"""One head in every format, in real engines: the drafts are the oracle's, and the same in every format."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from formats_for_tests import ALL, with_target_rows, write_as
from harness import EngineFailed, with_engine
from heads_for_tests import random_head
from pair import HEAD, TARGET, compare, greedy, oracle, prompts, read_rounds
from safetensors.torch import load_file
from test_engine import generate, peagle

from sgl_peagle.heads.config import MASK_ID_ENV
from sgl_peagle.oracle import OracleHead

K = 5


def drafts(
    folder: Path, judge: Path, record: Path, points: tuple[int, ...], target: Path = TARGET, **env: str
) -> list[tuple[int, list[int]]]:
    """Serve a head; check every round against the oracle on ``judge``; return the drafts in order."""
    chosen = prompts(4)
    outputs = with_engine(
        lambda engine: generate(engine, [[list(p)] for p in chosen], 24),
        env={"SGL_PEAGLE_RECORD": str(record)} | env,
        **peagle(K, speculative_draft_model_path=str(folder), model_path=str(target)),
    )
    texts = {rid: prompt + tuple(ids) for prompt, (rid, ids) in zip(chosen, outputs, strict=True)}
    rounds = read_rounds(record)
    result = compare(rounds, texts, K, head=judge, target=target, points=points)
    assert not result.differences, "\n".join(result.differences[:4])
    assert result.rounds >= 20
    return [(entry["tokens"], entry["drafts"]) for entry in rounds]


def mask_env(name: str) -> dict[str, str]:
    return {MASK_ID_ENV: str(oracle().mask_token_id)} if name == "specforge" else {}


def test_the_trained_head_drafts_the_same_in_every_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sgl_peagle.draft_worker import PEagleDraftWorker

    original, seen = PEagleDraftWorker.init_lm_head, tmp_path / "h_shared.pt"

    def spy(self: Any) -> None:
        original(self)
        mask = torch.tensor([self.mask_token_id])
        torch.save((self.model.shared_hidden.clone(), self.model.model.embed(mask, self.mask_token_id)[0]), seen)

    monkeypatch.setattr(PEagleDraftWorker, "init_lm_head", spy)  # inherited by the forked engine
    judge = with_target_rows(HEAD, tmp_path / "judge", TARGET)
    truth = OracleHead.from_folder(judge).shared_hidden()
    row = load_file(judge / "model.safetensors")["embed_tokens.weight"][oracle().mask_token_id].float()
    found, shared = {}, {}
    for name in ALL:
        folder = write_as(judge, tmp_path / name, name)
        found[name] = drafts(folder, judge, tmp_path / f"record-{name}", (2, 4, 5), **mask_env(name))
        shared[name], embedded = torch.load(seen)
        assert torch.equal(embedded, row), f"{name}: the MASK row is not the head's"
        seen.unlink()
    assert all(found[name] == found["vllm"] for name in ALL)
    assert all(torch.equal(shared[name], shared["vllm"]) for name in ALL)
    assert torch.allclose(shared["vllm"], truth, atol=1e-5)
    assert len(found["vllm"]) >= 20


EVERYTHING: dict[str, Any] = {
    "eagle_aux_hidden_state_layer_ids": [1, 2, 4, 5, 7],
    "fc_norm": True,
    "attention_bias": True,
    "norm_before_residual": True,
    "draft_vocab_size": 200,
}


@pytest.mark.parametrize("name", [name for name in ALL if name not in ("vllm", "compact")])
def test_all_options_together(name: str, tmp_path: Path) -> None:
    """Five aux layers, their norms, biases, the other residual and a reduced vocabulary."""
    judge = random_head(tmp_path / "judge", **EVERYTHING)
    folder = write_as(judge, tmp_path / name, name)
    drafts(folder, judge, tmp_path / "record", (1, 2, 4, 5, 7), **mask_env(name))


def qwen3_target(folder: Path) -> Path:
    """A random Qwen3 target of the tiny pair's size, with its tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512, hidden_size=128, intermediate_size=192, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, tie_word_embeddings=False, initializer_range=0.1,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TARGET / file, folder / file)
    return folder


@pytest.mark.parametrize("name", ["speculators", "peagle"])
def test_qk_norm_heads_with_a_qwen3_target(name: str, tmp_path: Path) -> None:
    target = qwen3_target(tmp_path / "target")
    norms = {
        f"{layer}.self_attn.{part}_norm.weight": 1 + 0.3 * torch.randn(32) for layer in ("midlayer", "layers.1") for part in "qk"
    }
    judge = random_head(tmp_path / "judge", extra=norms)
    changes = {"qk_norm": True} if name == "peagle" else {}
    folder = write_as(judge, tmp_path / name, name, **changes)
    if name == "speculators":
        raw = json.loads((folder / "config.json").read_text())
        raw["transformer_layer_config"] |= {"model_type": "qwen3", "layer_types": ["full_attention"] * 2}
        (folder / "config.json").write_text(json.dumps(raw))
    drafts(folder, judge, tmp_path / "record", (2, 4, 5), target)


def test_a_head_without_mask_id_is_refused_with_the_command(tmp_path: Path) -> None:
    folder = write_as(HEAD, tmp_path / "head", "specforge")
    with pytest.raises(EngineFailed) as error:
        with_engine(lambda engine: None, **peagle(K, speculative_draft_model_path=str(folder)))
    message = str(error.value).split("--- log ---")[0]
    assert "PEagleError" in message and "sgl-peagle convert" in message and MASK_ID_ENV in message


def hub_cache(root: Path, source: Path, repository: str) -> Path:
    """A folder as huggingface_hub's cache lays it out, with one repository in it: the snapshot's folder."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    base = root / f"models--{repository.replace('/', '--')}"
    (base / "refs").mkdir(parents=True)
    (base / "refs" / "main").write_text(commit)
    snapshot, blobs = base / "snapshots" / commit, base / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(source.iterdir())):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    return snapshot


SERVE = """
import json, sys
import sglang
from harness import ENGINE_DEFAULTS
from pair import TARGET, prompts
if __name__ == "__main__":
    engine = sglang.Engine(**ENGINE_DEFAULTS, model_path=str(TARGET), speculative_algorithm="PEAGLE",
                           speculative_draft_model_path="tiny/head", speculative_num_steps=5)
    params = {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True}
    print("RESULT", json.dumps([o["output_ids"] for o in engine.generate(input_ids=[list(p) for p in prompts(2)],
                                                                          sampling_params=params)]))
    engine.shutdown()
"""


@pytest.mark.parametrize("name", ["speculators", "compact"])
def test_a_hub_id_in_the_cache(name: str, tmp_path: Path) -> None:
    """inspect and convert take a hub id; offline, from the cache."""
    snapshot = hub_cache(tmp_path / "hub", write_as(HEAD, tmp_path / "head", name), "tiny/head")
    env = os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", "from sgl_peagle.cli import main; main()"]
    done = subprocess.run([*command, "inspect", "tiny/head", "--json"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["folder"] == str(snapshot) and "--speculative-draft-model-path tiny/head" in report["command"]
    arguments = ["convert", "tiny/head", str(tmp_path / "out"), "--to", "peagle"]
    done = subprocess.run([*command, *arguments], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    source = json.loads((tmp_path / "out" / "conversion.json").read_text())["source"]
    assert source["head"] == "tiny/head" and source["revision"] == snapshot.name
    done = subprocess.run([*command, "inspect", "tiny/other"], env=env, capture_output=True, text=True)
    assert done.returncode == 1 and "no P-EAGLE head at 'tiny/other'" in done.stderr


@pytest.mark.slow
def test_a_hub_id_is_served(tmp_path: Path) -> None:
    """SGLang itself resolves the id; a fresh process, because the cache's place is read at import."""
    hub_cache(tmp_path / "hub", write_as(HEAD, tmp_path / "head", "speculators"), "tiny/head")
    (tmp_path / "serve.py").write_text(SERVE)
    env = os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), env.get("PYTHONPATH", "")])
    command = [sys.executable, str(tmp_path / "serve.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    assert [tuple(ids) for ids in json.loads(line[7:])] == [greedy(p, 32) for p in prompts(2)]
