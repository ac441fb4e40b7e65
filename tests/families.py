"""Tiny random targets of real families, with 4-layer random heads: SGLang's own model code around the drafter.

Random weights make drafts that are (nearly) never accepted; what these pairs show is that verification leaves the
output alone and that the drafts are the oracle's, in models with experts, sliding windows, sinks and query-key norms.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from heads_for_tests import random_head

VOCABULARY, HIDDEN, MASK_ID = 512, 128, 3
WINDOW = 32
FAMILIES = ("llama", "gpt_oss", "qwen3", "qwen3_moe")
AUX_POINTS = (2, 4, 5)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024, "tie_word_embeddings": False,
    "initializer_range": 0.1, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "rms_norm_eps": 1e-6,
}  # fmt: skip


def _config(family: str) -> Any:
    import transformers

    if family == "llama":
        return transformers.LlamaConfig(**_COMMON, intermediate_size=192)
    if family == "qwen3":
        return transformers.Qwen3Config(**_COMMON, intermediate_size=192)
    if family == "qwen3_moe":
        return transformers.Qwen3MoeConfig(
            **_COMMON, intermediate_size=192, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2,
            norm_topk_prob=True, decoder_sparse_step=1,
        )  # fmt: skip
    return transformers.GptOssConfig(
        **_COMMON, intermediate_size=128, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 4,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip


def make_target(family: str, folder: Path) -> Path:
    """A random target in float32, every parameter drawn, sinks and biases included."""
    from transformers import AutoModelForCausalLM

    generator = torch.Generator().manual_seed(FAMILIES.index(family))
    model = AutoModelForCausalLM.from_config(_config(family), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            value = 1 + 0.1 * noise if name.endswith("norm.weight") else 0.1 * noise
            # SGLang keeps sinks in bfloat16.
            parameter.copy_(value.bfloat16() if name.endswith("sinks") else value)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config.setdefault("rope_theta", config.get("rope_parameters", {}).get("rope_theta", 10000.0))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_head(folder: Path) -> Path:
    """A random 4-layer head for any of the targets."""
    return random_head(
        folder, num_hidden_layers=4, head_dim=64, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=1024, mask_token_id=MASK_ID, eagle_aux_hidden_state_layer_ids=list(AUX_POINTS),
    )  # fmt: skip


def prompts() -> list[tuple[int, ...]]:
    """Nine prompts of 1 to 150 tokens: most of them longer than the sliding window."""
    chooser = random.Random(0)
    return [
        tuple(chooser.randrange(4, VOCABULARY) for _ in range(length)) for length in (1, 7, 31, 32, 33, 64, 90, 128, 150)
    ]
