"""One head in every format, in real engines: the drafts are the oracle's, and the same in every format."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from formats_for_tests import ALL, with_target_rows, write_as
from harness import EngineFailed, with_engine
from heads_for_tests import random_head
from pair import HEAD, TARGET, compare, oracle, prompts, read_rounds
from test_engine import generate, peagle

from sgl_peagle.heads.config import MASK_ID_ENV

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


def test_the_trained_head_drafts_the_same_in_every_format(tmp_path: Path) -> None:
    judge = with_target_rows(HEAD, tmp_path / "judge", TARGET)
    found = {}
    for name in ALL:
        folder = write_as(judge, tmp_path / name, name)
        found[name] = drafts(folder, judge, tmp_path / f"record-{name}", (2, 4, 5), **mask_env(name))
    assert all(found[name] == found["vllm"] for name in ALL)
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
