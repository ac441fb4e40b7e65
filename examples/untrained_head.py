"""A deterministic, untrained P-EAGLE head for any LLaMA-style target: it serves, and its drafts are noise.

It shows that everything runs where no trained head is at hand. Its acceptance length is about 1.0.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

LAYERS = 2


def write(target: Path, folder: Path, *, mask_token_id: int, seed: int = 0) -> Path:
    """Write a head for the target in folder ``target`` (its config.json is read) into ``folder``; returns it."""
    config = json.loads((target / "config.json").read_text())
    width, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or width // heads
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.02).bfloat16()

    tensors = {
        "fc.weight": noise(width, 3 * width),
        "mask_hidden": torch.randn(1, 1, 3 * width, generator=generator).bfloat16(),
        "norm.weight": torch.ones(width).bfloat16(),
        "midlayer.hidden_norm.weight": torch.ones(width).bfloat16(),
    }
    for layer in range(LAYERS):
        prefix = "midlayer." if layer == 0 else f"layers.{layer}."
        fan_in = 2 * width if layer == 0 else width
        tensors |= {
            prefix + "self_attn.q_proj.weight": noise(heads * head_dim, fan_in),
            prefix + "self_attn.k_proj.weight": noise(kv_heads * head_dim, fan_in),
            prefix + "self_attn.v_proj.weight": noise(kv_heads * head_dim, fan_in),
            prefix + "self_attn.o_proj.weight": noise(width, heads * head_dim),
            prefix + "mlp.gate_proj.weight": noise(inner, width),
            prefix + "mlp.up_proj.weight": noise(inner, width),
            prefix + "mlp.down_proj.weight": noise(width, inner),
            prefix + "input_layernorm.weight": torch.ones(width).bfloat16(),
            prefix + "post_attention_layernorm.weight": torch.ones(width).bfloat16(),
        }
    kept = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size", "rms_norm_eps")
    head_config = {key: config[key] for key in kept} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": width,
        "head_dim": head_dim,
        "num_hidden_layers": LAYERS,
        "max_position_embeddings": config["max_position_embeddings"],
        "rope_theta": config["rope_theta"],
        "tie_word_embeddings": False,
        "parallel_drafting": True,
        "mask_token_id": mask_token_id,
        "num_depths": 3,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(head_config, indent=2))
    return folder
