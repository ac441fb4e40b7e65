"""Heads saved by the speculators package, against the logits of its own P-EAGLE model (``golden/``).

Our reader reads each head as it was saved; the oracle, which the engine's drafts are compared with elsewhere, computes
the logits from what the reader made of it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sgl_peagle.cli import main
from sgl_peagle.draft_config import llama_config
from sgl_peagle.heads import Head, read_head
from sgl_peagle.heads.formats.vllm import flat_fields
from sgl_peagle.oracle import OracleHead

GOLDEN = Path(__file__).parent / "golden"
NAMES = sorted(path.stem for path in GOLDEN.glob("*.safetensors"))


def oracle_of(head: Head) -> OracleHead:
    stored = {head.canonical(name): tensor for name, tensor in load_file(head.folder / "model.safetensors").items()}
    return OracleHead(flat_fields(head.config) | {"mask_token_id": head.config.mask_token_id}, stored)


def worst(judge: OracleHead, golden: dict[str, torch.Tensor]) -> float:
    """Largest difference between the oracle's logits and the package's, over every anchor with all depths."""
    anchors, depths, logits = golden["anchors"], golden["depths"], golden["logits"]
    k, difference, compared = int(depths.max()) + 1, 0.0, 0
    for anchor in range(int(anchors.max()) + 1):
        rows = [int(((anchors == anchor) & (depths == depth)).nonzero()[0]) for depth in range(k)
                if bool(((anchors == anchor) & (depths == depth)).any())]  # fmt: skip
        # Row p of the package holds (token p, hidden state p): the context is one older token and rows 0 ... anchor.
        tokens = torch.cat([torch.zeros(1, dtype=torch.int64), golden["input_ids"][: anchor + 1]])
        ours = judge.drafts(tokens, golden["hidden_states"][: anchor + 1], len(rows)).logits
        difference = max(difference, float((ours - logits[rows]).abs().max()))
        compared += len(rows)
    assert compared == len(anchors) and k == 5
    return difference


def test_there_are_golden_vectors() -> None:
    assert len(NAMES) == 4


@pytest.mark.parametrize("name", NAMES)
def test_same_inputs_same_logits(name: str) -> None:
    head = read_head(str(GOLDEN / name))
    assert head.format.name == "speculators" and head.config.k_trained == 5
    assert head.config.qk_norm == (name == "qwen3")
    golden = load_file(GOLDEN / f"{name}.safetensors")
    assert worst(oracle_of(head), golden) <= 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_the_comparison_can_fail(name: str, tmp_path: Path) -> None:
    """A wrong mask_hidden, MASK row or norm is seen."""
    golden, tensors = load_file(GOLDEN / f"{name}.safetensors"), load_file(GOLDEN / name / "model.safetensors")
    norms = [key for key in tensors if "norm" in key]
    assert norms
    for key in ["mask_hidden", "embed_tokens.weight", *norms]:
        changed = {n: t.clone() for n, t in tensors.items()}
        changed[key] += 0.1 * torch.randn(changed[key].shape, generator=torch.Generator().manual_seed(0))
        save_file(changed, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_bytes((GOLDEN / name / "config.json").read_bytes())
        assert worst(oracle_of(read_head(str(tmp_path))), golden) > 1e-4, key


@pytest.mark.parametrize("name", NAMES)
def test_converted_heads_give_the_same_logits(name: str, tmp_path: Path) -> None:
    from click.testing import CliRunner

    run = CliRunner().invoke(main, ["convert", str(GOLDEN / name), str(tmp_path / "out"), "--to", "peagle"])
    assert run.exit_code == 0, run.output
    head = read_head(str(tmp_path / "out"))
    assert head.config == read_head(str(GOLDEN / name)).config
    assert worst(oracle_of(head), load_file(GOLDEN / f"{name}.safetensors")) <= 1e-4
    described = llama_config(head.config)  # what SGLang is told
    assert described.hidden_size == 32 and described.num_hidden_layers == 2 and described.head_dim == 8
