"""The format of the ``speculators`` library: ``speculators_model_type: peagle``, the decoder's keys nested.

Written from configs saved by speculators 0.9.0, which have **no** top-level ``model_type``; files that name
``speculator_model`` there are read too.
"""

from __future__ import annotations

from typing import Any, Mapping, Optional

from sgl_peagle.errors import PEagleError
from sgl_peagle.heads import llama
from sgl_peagle.heads.config import PEagleHeadConfig, check_config
from sgl_peagle.heads.formats.base import HeadFormat, cannot_express
from sgl_peagle.heads.keys import Keys

MODEL_TYPE = "speculator_model"
_DECODER = "transformer_layer_config"

#: The version whose files the writer follows.
_WRITTEN_AS = "0.9.0"


class SpeculatorsFormat(HeadFormat):
    """Heads of RedHatAI and others trained with speculators; ``qwen3`` decoders have q/k norms."""

    name, title, writable = "speculators", "speculators", True
    evidence = 'speculators_model_type "peagle"'

    def parse(self, raw: Mapping[str, Any], source: str, given_mask_id: Optional[int] = None) -> PEagleHeadConfig:
        keys = Keys(raw, source)
        keys.skip("architectures", "speculators_model_type", "speculators_version")
        if keys.text("model_type", MODEL_TYPE) != MODEL_TYPE:
            keys.refuse(
                f"model_type is {raw['model_type']!r}",
                f"speculators writes {MODEL_TYPE!r} or nothing there; the head was changed by another tool",
                "use the head as it was published",
            )
        decoder = keys.nested(_DECODER)
        if decoder is None:
            raise PEagleError(
                f"{source}: {_DECODER} is missing", "it holds the decoder's sizes", "download the head again"
            )
        decoder.skip("architectures")
        fields = llama.decoder_fields(decoder, ("llama", "qwen3"))
        decoder.skip("tie_word_embeddings")  # a copy of the target's key: speculators never ties a draft's
        decoder.finish()
        ids = llama.aux_layer_ids(keys, top_counts="points")
        target_hidden = keys.integer("target_hidden_size") or fields["hidden_size"]
        k_trained, target = _proposal(keys)
        config = PEagleHeadConfig(
            **fields,
            target_hidden_size=target_hidden,
            draft_vocab_size=keys.integer("draft_vocab_size") or fields["vocab_size"],
            **llama.head_fields(keys, ids, given_mask_id),
            k_trained=k_trained,
            target=target,
        )
        keys.finish()
        return check_config(config, source)

    def write(self, config: PEagleHeadConfig, dtype: str) -> dict[str, Any]:
        if config.embed_from_target:
            raise cannot_express(self.title, "a mask row without an embedding", "pass --target to rebuild the embedding")
        if config.target_hidden_size != config.hidden_size:
            raise cannot_express(self.title, "a drafter of another width than its target", "use --to peagle or vllm")
        decoder: dict[str, Any] = {
            "model_type": "qwen3" if config.qk_norm else "llama",
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "vocab_size": config.vocab_size,
            "rms_norm_eps": config.rms_norm_eps,
            "max_position_embeddings": config.max_position_embeddings,
            "rope_parameters": config.rope.parameters(),
            "attention_bias": config.attention_bias,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
        }
        if config.qk_norm:
            decoder |= {"layer_types": ["full_attention"] * config.num_layers, "use_sliding_window": False}
        raw: dict[str, Any] = {
            "architectures": ["PEagleDraftModel"],
            "speculators_model_type": "peagle",
            "speculators_version": _WRITTEN_AS,
            _DECODER: decoder,
            "draft_vocab_size": config.draft_vocab_size,
            "mask_token_id": config.mask_token_id,
            "norm_before_residual": config.norm_before_residual,
            "norm_before_fc": config.norm_before_fc,
            "fc_norm": config.fc_norm,
            "norm_output": False,
            "tie_word_embeddings": config.tie_word_embeddings,
            "dtype": dtype,
        }
        if config.aux_layer_ids is not None:
            raw["eagle_aux_hidden_state_layer_ids"] = list(config.aux_layer_ids)
        if config.k_trained is not None:
            raw["speculators_config"] = {
                "algorithm": "peagle",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.k_trained}],
                "verifier": {"architectures": [], "name_or_path": config.target},
            }
        return raw


def _proposal(keys: Keys) -> tuple[Optional[int], Optional[str]]:
    """(K trained, name of the target) of ``speculators_config``; both None without it."""
    nested = keys.nested("speculators_config")
    if nested is None:
        return None, None
    if nested.text("algorithm", "peagle") != "peagle":
        nested.refuse(
            f"algorithm is {nested.raw['algorithm']!r}", "speculators_model_type says peagle", "download the head again"
        )
    nested.skip("default_proposal_method")  # all methods propose the same tokens
    methods = nested.take("proposal_methods", [])
    k = None
    if methods:
        if type(methods) is not list or not isinstance(methods[0], dict):
            nested.refuse("proposal_methods is no list of objects", "K trained stands there", "download the head again")
        method = Keys(methods[0], f"{nested.source}, proposal_methods[0]")
        k = method.integer("speculative_tokens")
        # How speculators' own evaluation accepts tokens; the server verifies exactly.
        method.skip("proposal_type", "accept_tolerance", "verifier_accept_k")
        method.finish()
    verifier = nested.nested("verifier")
    target = None
    if verifier is not None:
        target = verifier.text("name_or_path")
        verifier.skip("architectures")  # the target's own config is what counts
        verifier.finish()
    nested.finish()
    return k, target
