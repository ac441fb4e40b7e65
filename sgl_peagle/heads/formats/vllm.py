"""The vLLM/Amazon format: ``LlamaForCausalLMEagle3`` with ``mask_hidden``, names without prefix, layer 0 ``midlayer``."""

from __future__ import annotations

from typing import Any, Mapping, Optional

from sgl_peagle.heads import llama
from sgl_peagle.heads.config import PEagleHeadConfig, check_config
from sgl_peagle.heads.formats.base import HeadFormat, cannot_express
from sgl_peagle.heads.keys import Keys

ARCHITECTURE = "LlamaForCausalLMEagle3"


def parse_eagle3_like(
    raw: Mapping[str, Any], source: str, given_mask_id: Optional[int], *, top_counts: Optional[str]
) -> PEagleHeadConfig:
    """Parse a flat config with EAGLE-3's keys (vLLM/Amazon, SpecForge, NeMo).

    Args:
        top_counts: What a top-level list of aux layer ids counts; see :func:`~sgl_peagle.heads.llama.aux_layer_ids`.
    """
    keys = Keys(raw, source)
    keys.skip("architectures")
    fields = llama.decoder_fields(keys, ("llama",))
    if not keys.flag("parallel_drafting", True):
        keys.refuse(
            "parallel_drafting is false",
            "the head was trained to draft one token at a time; drafting in parallel needs a P-EAGLE head",
            "serve it with --speculative-algorithm EAGLE3",
        )
    ids = llama.aux_layer_ids(keys, top_counts=top_counts)
    config = PEagleHeadConfig(
        **fields,
        target_hidden_size=keys.integer("target_hidden_size") or fields["hidden_size"],
        draft_vocab_size=keys.integer("draft_vocab_size") or fields["vocab_size"],
        **llama.head_fields(keys, ids, given_mask_id),
        k_trained=keys.integer("num_depths"),
        target=keys.text("target_model_name_or_path"),
    )
    keys.finish()
    return check_config(config, source)


class VllmFormat(HeadFormat):
    """Heads of Amazon (gpt-oss, Qwen3-Coder) and everything made for vLLM's ``parallel_drafting``."""

    name, title, writable = "vllm", "vLLM/Amazon", True
    evidence = f'architectures ["{ARCHITECTURE}"]'

    def parse(self, raw: Mapping[str, Any], source: str, given_mask_id: Optional[int] = None) -> PEagleHeadConfig:
        return parse_eagle3_like(raw, source, given_mask_id, top_counts="points")

    def canonical(self, file_name: str) -> str:
        return "layers.0." + file_name.removeprefix("midlayer.") if file_name.startswith("midlayer.") else file_name

    def file_name(self, canonical: str) -> str:
        return "midlayer." + canonical.removeprefix("layers.0.") if canonical.startswith("layers.0.") else canonical

    def write(self, config: PEagleHeadConfig, dtype: str) -> dict[str, Any]:
        instead = "keep it in the peagle format (--to peagle), which PEAGLE serves"
        if config.qk_norm:
            raise cannot_express(self.title, "q/k norms (Qwen3-type heads)", instead + ", or --to speculators")
        if config.embed_from_target:
            raise cannot_express(self.title, "a mask row without an embedding", "pass --target to rebuild the embedding")
        raw: dict[str, Any] = {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            **flat_fields(config),
            "hidden_act": "silu",
            # vLLM 0.33 takes the first of these keys it finds, 0.19 knows only the last two.
            "mask_token_id": config.mask_token_id,
            "pard_token": config.mask_token_id,
            "ptd_token_id": config.mask_token_id,
            "parallel_drafting": True,
            "torch_dtype": dtype,
        }
        if config.aux_layer_ids is not None:
            raw["eagle_aux_hidden_state_layer_ids"] = list(config.aux_layer_ids)
        if config.k_trained is not None:
            raw["num_depths"] = config.k_trained
        if config.target is not None:
            raw["target_model_name_or_path"] = config.target
        return raw


def flat_fields(config: PEagleHeadConfig) -> dict[str, Any]:
    """The keys that the two flat writable formats share."""
    return {
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.target_hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope.theta,
        "rope_scaling": config.rope.host_scaling(),
        "attention_bias": config.attention_bias,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "tie_word_embeddings": config.tie_word_embeddings,
    }
