"""One vLLM-format head written by hand in every other format, so that the readers are not judged by our own writers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

#: Formats as tests name them; "compact" is the peagle format with the MASK row only.
ALL = ("vllm", "speculators", "specforge", "nemo", "peagle", "compact")


def write_as(source: Path, folder: Path, name: str, **changes: Any) -> Path:
    """Write the vLLM-format head ``source`` in another format.

    Args:
        source: Folder of the head.
        folder: Where to write.
        name: One of :data:`ALL`.
        changes: Top-level keys to set in the new config.json, None to remove.
    """
    config = json.loads((source / "config.json").read_text())
    tensors = {_plain(key): value for key, value in load_file(source / "model.safetensors").items()}
    tensors = {_file_name(key, name): value for key, value in tensors.items()}
    if name == "compact":
        table = tensors.pop("embed_tokens.weight")
        tensors["embed_mask_row"] = table[config["mask_token_id"]].clone()
    raw = {key: value for key, value in (_configs(config)[name] | changes).items() if value is not None}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def with_target_rows(source: Path, folder: Path, target: Path) -> Path:
    """A copy of a head whose embedding is the target's except for the MASK row (so a compact form is exact)."""
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    table = load_file(target / "model.safetensors")["model.embed_tokens.weight"].to(torch.bfloat16).clone()
    table[config["mask_token_id"]] = tensors["embed_tokens.weight"][config["mask_token_id"]]
    tensors["embed_tokens.weight"] = table
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _plain(name: str) -> str:
    return name.replace("midlayer.", "layers.0.")


def _file_name(name: str, to: str) -> str:
    if to == "vllm":
        return name.replace("layers.0.", "midlayer.")
    if to == "nemo" and name.split(".")[0] not in ("lm_head", "d2t", "t2d", "mask_hidden"):
        return "model." + name
    return name


def _configs(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    sizes = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size"
    decoder = {key: config[key] for key in (*sizes.split(), "rms_norm_eps", "max_position_embeddings") if key in config}
    for key in ("rope_theta", "rope_scaling", "rope_parameters", "attention_bias"):
        if key in config:
            decoder[key] = config[key]
    ids, mask = config.get("eagle_aux_hidden_state_layer_ids"), config["mask_token_id"]
    flags = {key: config.get(key, False) for key in ("norm_before_residual", "norm_before_fc", "fc_norm")}
    draft_vocab = config.get("draft_vocab_size", config["vocab_size"])
    layers = None if ids is None else {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in ids]}
    flat = decoder | flags | {"draft_vocab_size": draft_vocab, "target_hidden_size": config.get("target_hidden_size")}
    k = config.get("num_depths")
    return {
        "vllm": config,
        "speculators": {
            "architectures": ["PEagleDraftModel"],
            "auto_map": {"": "config.PEagleSpeculatorConfig"},
            "speculators_model_type": "peagle",
            "speculators_version": "0.9.0",
            "transformer_layer_config": decoder | {"model_type": "llama", "hidden_act": "silu", "pad_token_id": None},
            "draft_vocab_size": draft_vocab,
            "eagle_aux_hidden_state_layer_ids": ids,
            "mask_token_id": mask,
            "embed_requires_grad": True,
            "norm_output": False,
            "tie_word_embeddings": False,
            "speculators_config": {
                "algorithm": "peagle",
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": k, "verifier_accept_k": 1}
                ],
                "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "tiny/target"},
            },
            **flags,
        },
        "specforge": {"architectures": ["PEagleDraftModel"], "model_type": "llama", "eagle_config": layers, **flat},
        "nemo": {
            "architectures": ["LlamaEagle3DraftModel"],
            "model_type": "llama",
            "parallel_drafting": True,
            "mask_token_id": mask,
            "num_depths": k,
            "eagle_config": layers,
            **flat,
        },
        "peagle": {
            "architectures": ["PEagleLlamaForCausalLM"],
            "model_type": "peagle",
            "format_version": 1,
            "mask_token_id": mask,
            "k_trained": k,
            "num_aux_hidden_states": 3 if ids is None else len(ids),
            "eagle_config": layers,
            **flat,
            "target_hidden_size": config.get("target_hidden_size", config["hidden_size"]),
        },
        "compact": {
            "architectures": ["PEagleLlamaForCausalLM"],
            "model_type": "peagle",
            "format_version": 1,
            "mask_token_id": mask,
            "k_trained": k,
            "embed_from_target": True,
            "eagle_config": layers,
            **flat,
            "target_hidden_size": config.get("target_hidden_size", config["hidden_size"]),
        },
    }
