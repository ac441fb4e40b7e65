"""Heads of every supported shape, in real engines: the drafts of random heads equal the oracle's.

Random weights (norms included) hit nothing, so these rounds prove the forward pass, not accepted paths.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import flush, with_engine
from heads_for_tests import random_head
from pair import HEAD, aux_hidden, compare, greedy, hf_model, oracle, prompts, read_rounds
from safetensors.torch import load_file
from test_engine import generate, peagle

K = 4
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 512}

VARIANTS: dict[str, dict[str, Any]] = {
    "one layer": {"num_hidden_layers": 1},
    "four layers": {"num_hidden_layers": 4},
    "attention bias": {"attention_bias": True},
    "norm before residual": {"norm_before_residual": True},
    "one norm per aux layer": {"fc_norm": True},
    "one norm over all aux": {"norm_before_fc": True},
    "five aux layers": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4, 5, 7]},
    "two aux layers": {"eagle_aux_hidden_state_layer_ids": [3, 6]},
    "default aux layers": {"eagle_aux_hidden_state_layer_ids": None},
    "llama3 RoPE, old spelling": {"rope_scaling": {"type": "llama3", **LLAMA3}},
    "llama3 RoPE, new spelling": {"rope_theta": None, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    "yarn RoPE": {"rope_scaling": {"rope_type": "yarn", **YARN}},
    "linear RoPE": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "reduced vocabulary": {"draft_vocab_size": 200},
    "another width than the target": {"hidden_size": 96, "target_hidden_size": 128},
    "bias of fc": {"extra": {"fc.bias": torch.linspace(-1, 1, 128)}},
    "the target's embedding": {"drop": ("embed_tokens.weight",)},
    "the target's LM head": {"drop": ("lm_head.weight",)},
    "another epsilon": {"rms_norm_eps": 1e-2},
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda name: name.replace(" ", "-"))
def test_drafts_equal_the_oracle(variant: str, tmp_path: Path) -> None:
    changes = VARIANTS[variant]
    folder = random_head(tmp_path / "head", **changes)
    points = tuple(changes.get("eagle_aux_hidden_state_layer_ids") or (2, 4, 5))
    chosen = prompts(6)
    outputs = with_engine(
        lambda engine: generate(engine, [[list(p) for p in chosen]], 16),
        env={"SGL_PEAGLE_RECORD": str(tmp_path / "record")},
        **peagle(K, speculative_draft_model_path=str(folder)),
    )
    texts = {rid: prompt + tuple(ids) for prompt, (rid, ids) in zip(chosen, outputs, strict=True)}
    assert all(tuple(ids) == greedy(prompt, 16) for prompt, (_, ids) in zip(chosen, outputs))
    result = compare(read_rounds(tmp_path / "record"), texts, K, head=folder, points=points)
    assert not result.differences, "\n".join(result.differences[:4])
    assert result.rounds >= 60


def test_the_oracle_tells_heads_apart(tmp_path: Path) -> None:
    """The comparison above can fail: rounds of one head are not those of another."""
    folder = random_head(tmp_path / "head")
    chosen = prompts(2)
    outputs = with_engine(
        lambda engine: generate(engine, [[list(p) for p in chosen]], 8),
        env={"SGL_PEAGLE_RECORD": str(tmp_path / "record")},
        **peagle(K, speculative_draft_model_path=str(folder)),
    )
    texts = {rid: prompt + tuple(ids) for prompt, (rid, ids) in zip(chosen, outputs, strict=True)}
    other = random_head(tmp_path / "other", seed=1)
    assert compare(read_rounds(tmp_path / "record"), texts, K, head=other).differences


def test_own_embedding_is_kept_and_h_shared_is_projected(tmp_path: Path) -> None:
    """After start-up the drafter's MASK row is the checkpoint's, not the target's."""
    from sgl_peagle.draft_worker import PEagleDraftWorker

    saved = tmp_path / "seen.pt"
    original = PEagleDraftWorker.init_lm_head

    def spy(self: Any) -> None:
        original(self)
        model = self.model
        torch.save((model.model.embed_tokens.weight[self.mask_token_id].clone(), model.shared_hidden.clone()), saved)

    PEagleDraftWorker.init_lm_head = spy  # inherited by the forked engine
    try:
        with_engine(lambda engine: None, **peagle(K))
    finally:
        PEagleDraftWorker.init_lm_head = original
    row, shared = torch.load(saved)
    mask = oracle().mask_token_id
    assert torch.equal(row, load_file(HEAD / "model.safetensors")["embed_tokens.weight"][mask].float())
    assert not torch.equal(row, hf_model().get_input_embeddings().weight[mask])
    assert torch.allclose(shared, oracle().shared_hidden(), atol=1e-5)


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
def test_committed_kv_equals_a_fresh_prefill(overlap: bool, tmp_path: Path) -> None:
    """After many rounds the drafter's KV of committed positions is what a prefill of the text would write."""
    chosen = prompts(3)
    env = {"SGL_PEAGLE_RECORD": str(tmp_path), "SGL_PEAGLE_RECORD_KV": "1"}

    def use(engine: Any) -> list[tuple[str, list[int]]]:
        first = generate(engine, [[list(p) for p in chosen]], 30)
        flush(engine)
        whole = [list(p) + ids for p, (_, ids) in zip(chosen, first)]
        return first + generate(engine, [whole], 1)

    outputs = with_engine(use, env=env | ({"SGL_PEAGLE_CPU_OVERLAP": "1"} if overlap else {}), **peagle(5))
    rounds = read_rounds(tmp_path)
    checked = 0
    for i, prompt in enumerate(chosen):
        text = prompt + tuple(outputs[i][1])
        decode = [r for r in rounds if r["rid"] == outputs[i][0] and r["tokens"] <= len(text)]
        last = torch.load(tmp_path / decode[-1]["kv"])
        fresh = torch.load(tmp_path / next(r["kv"] for r in rounds if r["rid"] == outputs[3 + i][0]))
        length = decode[-1]["tokens"] - 1
        truth = oracle().layer_kv(torch.tensor(text[: length + 1]), aux_hidden(text)[:length])
        layers = len(truth)  # the drafter's come first, then the target's
        for (k, v), (fresh_k, fresh_v), (true_k, true_v) in zip(last[:layers], fresh[:layers], truth, strict=True):
            for mine, prefilled, true in ((k, fresh_k, true_k), (v, fresh_v, true_v)):
                assert mine.shape[0] == length and torch.isfinite(mine).all()
                assert torch.allclose(mine, prefilled[:length], atol=1e-4)
                assert torch.allclose(mine, true, atol=1e-4)
                checked += 1
    assert checked == 3 * 2 * 2


def _ablated(tmp_path: Path, kind: str) -> Path:
    """A copy of the tiny head that lacks one ingredient of P-EAGLE."""
    from safetensors.torch import save_file

    folder = tmp_path / kind
    shutil.copytree(HEAD, folder)
    tensors = load_file(folder / "model.safetensors")
    if kind == "h_shared zero":
        tensors["mask_hidden"].zero_()
    elif kind == "MASK embedding swapped":
        tensors["embed_tokens.weight"][oracle().mask_token_id] = tensors["embed_tokens.weight"][10].clone()
    save_file(tensors, folder / "model.safetensors")
    return folder


def acceptance_length(k: int, head: Path = HEAD) -> float:
    """Tokens per round in the engine, on all prompts."""
    chosen = [list(p) for p in prompts(48)]

    def use(engine: Any) -> float:
        params = {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True}
        metas = [o["meta_info"] for o in engine.generate(input_ids=chosen, sampling_params=params)]
        return sum(m["completion_tokens"] - 1 for m in metas) / sum(m["spec_verify_ct"] for m in metas)

    return with_engine(use, **peagle(k, speculative_draft_model_path=str(head), page_size=16))


def test_the_pair_needs_p_eagle(tmp_path: Path) -> None:
    """AL >= 3 at K=5, and each ingredient of P-EAGLE is worth at least a fifth of it."""
    from sgl_peagle.draft_worker import PEagleDraftWorker

    full = acceptance_length(5)
    assert full >= 3.0
    lengths = {kind: acceptance_length(5, _ablated(tmp_path, kind)) for kind in ("h_shared zero", "MASK embedding swapped")}

    original = PEagleDraftWorker._run

    def frozen(self: Any, forward_batch: Any, bs: int) -> torch.Tensor:
        """All masks of a request at the position of its first one."""
        masks = (forward_batch.spec_info.hidden_rows < 0).nonzero().flatten().tolist()
        for row in masks:
            if row - 1 in masks:
                forward_batch.positions[row] = forward_batch.positions[row - 1]
        return original(self, forward_batch, bs)

    PEagleDraftWorker._run = frozen
    try:
        lengths["mask positions frozen"] = acceptance_length(5)
    finally:
        PEagleDraftWorker._run = original
    print(f"AL {full:.3f}", {kind: round(value, 3) for kind, value in lengths.items()})
    assert all(value <= 0.8 * full for value in lengths.values()), (full, lengths)


def test_acceptance_grows_with_k() -> None:
    lengths = {k: acceptance_length(k) for k in (1, 3, 7)}
    print({k: round(value, 3) for k, value in lengths.items()})
    assert 1.5 < lengths[1] < lengths[3] < lengths[7]
