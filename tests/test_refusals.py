"""Everything that PEAGLE refuses at start-up, read from the message that the user sees."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TALLY
from harness import EngineFailed, in_fork, with_engine
from heads_for_tests import random_head
from pair import HEAD, TARGET
from test_engine import peagle


def refused(*words: str, env: dict[str, str] | None = None, **kwargs: Any) -> str:
    """Start an engine that must be refused; the message has three parts and holds the words."""
    with pytest.raises(EngineFailed) as error:
        with_engine(lambda engine: None, env=env, **peagle(5) | kwargs)
    message = str(error.value).split("--- log ---")[0]
    assert "PEagleError" in message and "why:" in message and "fix:" in message, message[-1500:]
    for word in words:
        assert word in message, message[-1500:]
    TALLY["refusals"] += 1
    return message


SERVER = {
    "DP attention": ({"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}, ["DP attention"]),
    "pipeline parallelism": ({"pp_size": 2}, ["--pp-size"]),
    "disaggregation": ({"disaggregation_mode": "prefill"}, ["disaggregation"]),
    "mixed chunk": ({"enable_mixed_chunk": True}, ["--enable-mixed-chunk"]),
    "rejection sampling": ({"speculative_use_rejection_sampling": True}, ["rejection sampling"]),
    "accept threshold": ({"speculative_accept_threshold_single": 0.9}, ["accept threshold"]),
    "adaptive": ({"speculative_adaptive": True}, ["adaptive"]),
    "tokenizer workers": ({"tokenizer_worker_num": 2}, ["--tokenizer-worker-num", "plugins"]),
    "deterministic": ({"enable_deterministic_inference": True, "attention_backend": "triton"}, ["deterministic"]),
    "token map": ({"speculative_token_map": "map.pt"}, ["--speculative-token-map"]),
    "draft window": ({"speculative_draft_window_size": 64}, ["--speculative-draft-window-size"]),
    "two-batch overlap": ({"enable_two_batch_overlap": True}, ["two-batch-overlap"]),
    "drafter backend": ({"speculative_draft_attention_backend": "triton"}, ["triton", "torch_native"]),
    "topk": ({"speculative_eagle_topk": 4}, ["--speculative-eagle-topk 4", "chain"]),
    "contradictory K": ({"speculative_num_draft_tokens": 5}, ["contradict", "--speculative-num-draft-tokens 6"]),
    "page size 1": ({"speculative_num_steps": 10, "page_size": 1}, ["--page-size 1", "--page-size 16"]),
    "no head": ({"speculative_draft_model_path": None}, ["--speculative-draft-model-path"]),
    "override of the head": ({"json_model_override_args": '{"num_key_value_heads": 2}'}, ["--json-model-override-args"]),
    "K beyond the context": ({"context_length": 16, "speculative_num_steps": 15, "page_size": 16}, ["K=15", "16 tokens"]),
}  # fmt: skip


@pytest.mark.parametrize("case", SERVER)
def test_server_arguments(case: str) -> None:
    kwargs, words = SERVER[case]
    refused(*words, **kwargs)


def changed_head(tmp_path: Path, **changes: Any) -> str:
    """A copy of the tiny head with config keys changed (None removes one)."""
    folder = tmp_path / "head"
    shutil.copytree(HEAD, folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


NO_MASK_ID = {"mask_token_id": None, "ptd_token_id": None, "pard_token": None}
CONFIGS = {
    "no mask id": (NO_MASK_ID, ["no mask token id", "ptd_token_id"]),
    "mask id out of range": ({"mask_token_id": 512}, ["512", "vocabulary"]),
    "mask id is the end token": ({"mask_token_id": 2}, ["mask token id 2", "eos_token_id"]),
    "unknown key": ({"norm_befor_fc": True}, ["norm_befor_fc"]),
    "short context": ({"max_position_embeddings": 256}, ["256", "--context-length 256"]),
    "aux layer beyond the target": ({"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, ["aux layer id 9", "8 layers"]),
    "aux count": ({"eagle_aux_hidden_state_layer_ids": [2, 4]}, ["fc.weight", "[128, 256]"]),
    "layer count": ({"num_hidden_layers": 3}, ["layers.2.", "num_hidden_layers"]),
    "norm without tensors": ({"fc_norm": True}, ["fc_norm.0.weight"]),
    "sequential head": ({"parallel_drafting": False}, ["parallel_drafting", "EAGLE3"]),
    "sliding window": ({"layer_types": ["sliding_attention"] * 2}, ["sliding-window"]),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_head_configs(case: str, tmp_path: Path) -> None:
    changes, words = CONFIGS[case]
    refused(*words, speculative_draft_model_path=changed_head(tmp_path, **changes))


HEADS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "plain EAGLE-3": ({"drop": ("mask_hidden",)}, ["mask_hidden", "EAGLE-3", "--speculative-algorithm EAGLE3"]),
    "unknown tensor": ({"extra": {"layers.1.mystery.weight": torch.ones(3)}}, ["layers.1.mystery.weight", "model.safetensors"]),
    "missing tensor": ({"drop": ("layers.1.mlp.up_proj.weight",)}, ["layers.1.mlp.up_proj.weight"]),
    "another vocabulary": ({"vocab_size": 600}, ["600", "512"]),
    "another hidden size": ({"hidden_size": 96}, ["96", "128"]),
    "d2t out of range": ({"draft_vocab_size": 200, "extra": {"d2t": torch.full((200,), 400)}}, ["d2t"]),
}  # fmt: skip


@pytest.mark.parametrize("case", HEADS)
def test_head_tensors(case: str, tmp_path: Path) -> None:
    changes, words = HEADS[case]
    refused(*words, speculative_draft_model_path=str(random_head(tmp_path / "head", **changes)))


@pytest.mark.parametrize("damage", ["truncated", "text", "pickle"])
def test_head_files(damage: str, tmp_path: Path) -> None:
    folder = Path(changed_head(tmp_path))
    weights = folder / "model.safetensors"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "text":
        weights.write_text("version https://git-lfs.github.com/spec/v1")
    else:
        weights.rename(folder / "pytorch_model.bin")
    refused("pytorch_model.bin" if damage == "pickle" else "model.safetensors", speculative_draft_model_path=str(folder))


@pytest.mark.parametrize(
    ("kind", "words"),
    [("multimodal", "multimodal or uses M-RoPE"), ("mrope", "multimodal or uses M-RoPE"), ("MLA", "latent (MLA)")],
)
def test_targets_of_another_kind(kind: str, words: str) -> None:
    """SGLang's own ModelConfig decides what a target is; here its answers are set on a real one."""
    from sgl_peagle.errors import PEagleError
    from sgl_peagle.heads import read_head
    from sgl_peagle.refusals import check_target

    def run() -> str:
        from sglang.srt.configs.model_config import AttentionArch, ModelConfig

        target = ModelConfig(str(TARGET))
        if kind == "MLA":
            target.attention_arch = AttentionArch.MLA
        target.is_multimodal, target.model_is_mrope = kind == "multimodal", kind == "mrope"
        try:
            check_target(read_head(str(HEAD)), target, None, None)
        except PEagleError as error:
            return str(error)
        return "accepted"

    assert words in in_fork(run)


def test_another_sglang_is_refused_by_the_engine() -> None:
    from sgl_peagle import host

    original = host.SUPPORTED_VERSIONS
    host.SUPPORTED_VERSIONS = ("0.4.0",)
    try:
        refused("SGLang 0.5.23", "supported: 0.4.0", "pip install sglang==0.4.0")
    finally:
        host.SUPPORTED_VERSIONS = original


def test_a_missing_host_symbol_is_refused_by_the_engine() -> None:
    from sgl_peagle import host

    original = host.HOST_SYMBOLS
    host.HOST_SYMBOLS = (*original, host.HostSymbol("managers.scheduler", "Scheduler.fly", ("high",)))
    host.host_mismatches.cache_clear()
    try:
        refused("expected Scheduler.fly(high), found nothing of that name")
    finally:
        host.HOST_SYMBOLS = original
        host.host_mismatches.cache_clear()


def test_an_unknown_algorithm_keeps_sglangs_own_error() -> None:
    with pytest.raises(EngineFailed, match="Unknown speculative algorithm name: PEEGLE"):
        with_engine(lambda engine: None, **peagle(5) | {"speculative_algorithm": "PEEGLE"})


def test_a_plugin_failure_is_not_a_mere_log_line() -> None:
    """When registering fails, asking for PEAGLE raises the reason instead of "unknown algorithm"."""
    import sgl_peagle.algorithm
    import sgl_peagle.plugin

    def broken() -> None:
        raise RuntimeError("registry of another shape")

    original = sgl_peagle.algorithm.register
    sgl_peagle.algorithm.register = broken
    try:
        with pytest.raises(EngineFailed) as error:
            with_engine(lambda engine: None, **peagle(5))
    finally:
        sgl_peagle.algorithm.register = original
    message = str(error.value).split("--- log ---")[0]
    assert "sgl-peagle could not register" in message and "registry of another shape" in message


def test_lora_is_refused() -> None:
    """SGLang refuses LoRA with a plugin's algorithm itself, before the plugin is asked."""
    with pytest.raises(EngineFailed) as error:
        with_engine(lambda engine: None, **peagle(5), enable_lora=True, max_lora_rank=8, lora_target_modules=["q_proj"])
    assert "lora" in str(error.value).split("--- log ---")[0].lower()
