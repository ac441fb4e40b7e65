"""Random heads of every supported shape, written to disk for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

#: A small drafter on the tiny target (hidden 128, vocabulary 512).
BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    "parallel_drafting": True,
}


def random_head(
    folder: Path,
    *,
    drop: tuple[str, ...] = (),
    extra: dict[str, torch.Tensor] | None = None,
    seed: int = 0,
    mask_token_id: int | None = None,
    **changes: Any,
) -> Path:
    """Write a head with random weights, norms included; ``changes`` go into the config.

    Args:
        folder: Where to write.
        drop: Tensor names to leave out.
        extra: Tensors to add.
        seed: Seed of the weights.
        mask_token_id: Defaults to the tiny pair's.
        changes: Config keys to set, None to remove.
    """
    from pair import HEAD

    config = dict(BASE) | changes
    if mask_token_id is None:
        mask_token_id = json.loads((HEAD / "config.json").read_text())["mask_token_id"]
    config.setdefault("mask_token_id", mask_token_id)
    config = {key: value for key, value in config.items() if value is not None}
    g = torch.Generator().manual_seed(seed)
    d, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    h = config.get("target_hidden_size", d)
    aux = len(config.get("eagle_aux_hidden_state_layer_ids", (0, 0, 0)))
    q, kv = (config["head_dim"] * config[key] for key in ("num_attention_heads", "num_key_value_heads"))
    draft_vocab = config.get("draft_vocab_size", vocab)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g) * shape[-1] ** -0.5

    def norm(size: int) -> torch.Tensor:
        return 1 + 0.3 * torch.randn(size, generator=g)

    tensors = {
        "embed_tokens.weight": torch.randn(vocab, d, generator=g),
        "lm_head.weight": weight(draft_vocab, d),
        "fc.weight": weight(d, aux * h),
        "mask_hidden": torch.randn(1, 1, aux * h, generator=g),
        "norm.weight": norm(d),
        "midlayer.hidden_norm.weight": norm(d),
    }
    if config.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": norm(h) for i in range(aux)}
    if config.get("norm_before_fc"):
        tensors["input_norm.weight"] = norm(aux * h)
    for layer in range(config["num_hidden_layers"]):
        prefix, width = ("midlayer.", 2 * d) if layer == 0 else (f"layers.{layer}.", d)
        for name, shape in {
            "self_attn.q_proj": (q, width),
            "self_attn.k_proj": (kv, width),
            "self_attn.v_proj": (kv, width),
            "self_attn.o_proj": (d, q),
            "mlp.gate_proj": (inner, d),
            "mlp.up_proj": (inner, d),
            "mlp.down_proj": (d, inner),
        }.items():
            tensors[f"{prefix}{name}.weight"] = weight(*shape)
            if config.get("attention_bias") and "self_attn" in name:
                tensors[f"{prefix}{name}.bias"] = torch.randn(shape[0], generator=g) * 0.2
        tensors[prefix + "input_layernorm.weight"] = norm(d)
        tensors[prefix + "post_attention_layernorm.weight"] = norm(d)
    if draft_vocab != vocab:
        kept = torch.randperm(vocab, generator=g)[:draft_vocab].sort().values
        tensors["d2t"] = kept - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, kept, True)
    tensors |= extra or {}
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items() if name not in drop}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder
