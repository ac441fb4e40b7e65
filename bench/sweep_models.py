"""Model folders for the sweep: targets of a config alone (dummy weights), heads with random weights.

Speed depends on shapes, not on weights, so a target is a ``config.json`` that SGLang fills with dummy weights. Heads get
real files of random values: PEAGLE reads them strictly, and both heads need a valid ``d2t``, which dummy loading would
leave out. They hold no embedding; the target's is shared (a lookup: its size does not show in a pass).
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Drafter layers of the two published kinds of head.
LAYERS = {"eagle3": 1, "peagle": 4}

#: Draft vocabulary by name; ``full`` is the target's.
DRAFT_VOCAB = {"32k": 32_000, "full": 0}

#: Depth that the P-EAGLE head's config states (published heads: up to 10).
K_TRAINED = 10

_LLAMA3_ROPE = {
    "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A target and the inner size of its heads.

    Attributes:
        target: The target's config.json.
        head_inner: ``intermediate_size`` of both heads.
        draft_vocab: Sizes of the draft vocabularies, by name.
        env: Environment that an engine of this target needs.
        engine: Engine arguments that this target needs.
    """

    target: dict[str, Any]
    head_inner: int
    draft_vocab: dict[str, int]
    env: dict[str, str]
    engine: dict[str, Any]


def _llama(**fields: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "initializer_range": 0.02, "use_cache": True, "attention_dropout": 0.0,
    } | fields  # fmt: skip


def _gpt_oss(layers: int, experts: int, mxfp4: bool) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True, "attention_dropout": 0.0,
        "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
        "initial_context_length": 4096, "initializer_range": 0.02, "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2), "max_position_embeddings": 131072,
        "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": layers, "num_key_value_heads": 8,
        "num_local_experts": experts, "output_router_logits": False, "pad_token_id": 199999, "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
        "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 201088,
    }  # fmt: skip
    if mxfp4:
        config["quantization_config"] = {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
            ],
        }  # fmt: skip
    return config


_LLAMA_8B = _llama(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=128256, max_position_embeddings=131072, rope_theta=500000.0, rope_scaling=_LLAMA3_ROPE,
    bos_token_id=128000, eos_token_id=128001,
)  # fmt: skip

# Tokens are all alike under simulated acceptance, and would all go to the same experts; SGLang can spread them.
_MOE_ENV = {"SGLANG_SIMULATE_UNIFORM_EXPERTS": "1"}

SHAPES: dict[str, Shape] = {
    "llama-3.1-8b": Shape(_LLAMA_8B, 14336, DRAFT_VOCAB, {}, {}),
    # The released checkpoint's own format.
    "gpt-oss-20b": Shape(_gpt_oss(24, 32, mxfp4=True), 14336, DRAFT_VOCAB, _MOE_ENV, {}),
    # The same in bfloat16 (42 GB), should the quantized experts not start with dummy weights.
    "gpt-oss-20b-bf16": Shape(_gpt_oss(24, 32, mxfp4=False), 14336, DRAFT_VOCAB, _MOE_ENV, {"moe_runner_backend": "triton"}),
    # For rehearsals on a CPU.
    "toy": Shape(
        _llama(
            hidden_size=128, intermediate_size=256, num_hidden_layers=8, num_attention_heads=2, num_key_value_heads=1,
            head_dim=64, vocab_size=1024, max_position_embeddings=4096, rope_theta=10000.0, bos_token_id=1, eos_token_id=2,
        ),
        256, {"32k": 512, "full": 0}, {}, {},
    ),
}  # fmt: skip


def draft_vocab_size(shape: Shape, vocab: str) -> int:
    """Tokens in the draft vocabulary of that name."""
    return shape.draft_vocab[vocab] or shape.target["vocab_size"]


def head_shapes(shape: Shape, method: str, vocab: str) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every weight of a head, in the vLLM format, which EAGLE-3 shares."""
    target = shape.target
    d, inner = target["hidden_size"], shape.head_inner
    head_dim = target.get("head_dim") or d // target["num_attention_heads"]
    q, kv = target["num_attention_heads"] * head_dim, target["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (d, 3 * d), "norm.weight": (d,), "midlayer.hidden_norm.weight": (d,),
        "lm_head.weight": (draft_vocab_size(shape, vocab), d),
    }  # fmt: skip
    if method == "peagle":
        shapes["mask_hidden"] = (1, 1, 3 * d)
    for layer in range(LAYERS[method]):
        prefix, width = ("midlayer.", 2 * d) if layer == 0 else (f"layers.{layer}.", d)
        shapes |= {
            prefix + "input_layernorm.weight": (d,), prefix + "post_attention_layernorm.weight": (d,),
            prefix + "self_attn.q_proj.weight": (q, width), prefix + "self_attn.k_proj.weight": (kv, width),
            prefix + "self_attn.v_proj.weight": (kv, width), prefix + "self_attn.o_proj.weight": (d, q),
            prefix + "mlp.gate_proj.weight": (inner, d), prefix + "mlp.up_proj.weight": (inner, d),
            prefix + "mlp.down_proj.weight": (d, inner),
        }  # fmt: skip
    return shapes


def head_bytes(shape: Shape, method: str, vocab: str) -> int:
    """Bytes of bfloat16 weights that one drafter forward reads."""
    total = 0
    for dims in head_shapes(shape, method, vocab).values():
        count = 1
        for dim in dims:
            count *= dim
        total += 2 * count
    return total


def head_config(shape: Shape, method: str, vocab: str) -> dict[str, Any]:
    """The head's config.json."""
    target = shape.target
    d = target["hidden_size"]
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": d,
        "intermediate_size": shape.head_inner, "num_hidden_layers": LAYERS[method],
        "num_attention_heads": target["num_attention_heads"], "num_key_value_heads": target["num_key_value_heads"],
        "head_dim": target.get("head_dim") or d // target["num_attention_heads"], "vocab_size": target["vocab_size"],
        "draft_vocab_size": draft_vocab_size(shape, vocab), "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "attention_bias": False, "max_position_embeddings": target["max_position_embeddings"],
        "rope_theta": float(target["rope_theta"]), "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    if method == "peagle":
        mask_id = target["vocab_size"] - 8
        config |= {"parallel_drafting": True, "mask_token_id": mask_id, "ptd_token_id": mask_id, "num_depths": K_TRAINED}
    return config


def write_target(shape: Shape, folder: Path) -> Path:
    """Write the target's folder (config.json alone); returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.target, indent=1))
    return folder


def write_head(shape: Shape, method: str, vocab: str, folder: Path) -> Path:
    """Write a head of random weights unless the folder holds it already; returns the folder."""
    import torch
    from safetensors.torch import save_file

    wanted = json.dumps(head_config(shape, method, vocab), indent=1)
    config = folder / "config.json"
    if config.is_file() and config.read_text() == wanted:  # written last, so the weights are complete
        return folder
    partial = folder.with_name(folder.name + ".part")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    noise = (torch.randn(1 << 22, generator=generator) * 0.02).bfloat16()  # repeated: drawing billions takes minutes

    def fill(dims: tuple[int, ...]) -> torch.Tensor:
        if len(dims) == 1:
            return torch.ones(dims, dtype=torch.bfloat16)
        count = torch.Size(dims).numel()
        return noise.repeat(-(-count // noise.numel()))[:count].view(dims).clone()

    tensors = {name: fill(dims) for name, dims in head_shapes(shape, method, vocab).items()}
    draft, full = draft_vocab_size(shape, vocab), shape.target["vocab_size"]
    if draft != full:
        # Draft ids spread evenly over the target's vocabulary; d2t holds the offsets.
        ids = torch.arange(draft, dtype=torch.int64) * full // draft
        tensors["d2t"] = ids - torch.arange(draft, dtype=torch.int64)
    save_file(tensors, partial / "model.safetensors", metadata={"weights": "random, for speed measurements only"})
    (partial / "config.json").write_text(wanted)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return folder
