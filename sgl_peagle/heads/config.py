"""``config.json`` of a P-EAGLE head in the vLLM/Amazon format, as one frozen object.

Every key is used, listed as irrelevant with the reason, or refused by name: a misspelt or unsupported key must
not silently change what a head computes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Mapping, Optional

from sgl_peagle.errors import PEagleError

#: Keys named here (comma separated) are accepted and ignored, at the user's own risk.
IGNORE_KEYS_ENV = "SGL_PEAGLE_IGNORE_CONFIG_KEYS"

#: Where a mask token id may stand, in the order of precedence that vLLM uses.
MASK_ID_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")

_USED = {
    "architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "draft_vocab_size", "rms_norm_eps", "hidden_act",
    "max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "attention_bias", "mlp_bias",
    "norm_before_residual", "norm_before_fc", "fc_norm", "target_hidden_size", "num_aux_hidden_states",
    "eagle_aux_hidden_state_layer_ids", "eagle_config", "dflash_config", "parallel_drafting", "num_depths",
    "tie_word_embeddings", "layer_types", "sliding_window", "use_sliding_window", "partial_rotary_factor",
    *MASK_ID_KEYS,
}  # fmt: skip

#: Known keys that cannot change a draft.
_IRRELEVANT = {
    key: reason
    for reason, keys in {
        "text generation belongs to the target": "bos_token_id eos_token_id pad_token_id use_cache "
        "generation_config max_length min_length do_sample temperature top_k top_p",
        "the dtype is the server's --dtype": "torch_dtype dtype",
        "provenance": "_name_or_path transformers_version name_or_path auto_map tokenizer_class "
        "training_commit data_manifest cod_ratio cod_floor down_sample_ratio down_sample_ratio_min",
        "training only": "initializer_range attention_dropout pretraining_tp hidden_dropout gradient_checkpointing",
        "no sliding window is used without layer_types or use_sliding_window": "max_window_layers",
        "feeds an autoregressive drafter's next step, which a parallel drafter does not have": "norm_output",
        "transformers' own output switches": "return_dict output_hidden_states output_attentions "
        "chunk_size_feed_forward is_encoder_decoder id2label label2id problem_type is_decoder "
        "add_cross_attention cross_attention_hidden_size torchscript",
    }.items()
    for key in keys.split()
}

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: kind, base, and the kind's own numbers as sorted pairs."""

    rope_type: str
    theta: float
    params: tuple[tuple[str, Any], ...] = ()

    def host_scaling(self) -> Optional[dict[str, Any]]:
        """The ``rope_scaling`` dictionary that SGLang's ``get_rope`` takes; None for plain RoPE."""
        if self.rope_type == "default":
            return None
        return {"rope_type": self.rope_type, **dict(self.params)}


@dataclass(frozen=True)
class PEagleHeadConfig:
    """What a P-EAGLE head is. Layer ids are capture points: id i is the output of target layer i-1.

    Attributes:
        hidden_size: D, width of the drafter.
        target_hidden_size: H, width of the target.
        aux_layer_ids: Ascending capture points, or None for the default ``(2, L//2, L-3)``.
        num_aux: A, number of aux hidden states.
        draft_vocab_size: Rows of the LM head.
        mask_token_id: Id whose embedding the mask rows get.
        k_trained: Depths the head was trained for, None when the config does not say.
    """

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    aux_layer_ids: Optional[tuple[int, ...]]
    num_aux: int
    mask_token_id: int
    attention_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    tie_word_embeddings: bool = False
    k_trained: Optional[int] = None

    @property
    def aux_width(self) -> int:
        """A * H, width of the concatenated target hidden states."""
        return self.num_aux * self.target_hidden_size


def parse_head_config(raw: Mapping[str, Any], source: str) -> PEagleHeadConfig:
    """Parse a vLLM/Amazon-format ``config.json``.

    Args:
        raw: The decoded JSON object.
        source: What to call the file in messages.

    Raises:
        PEagleError: An unknown, missing, contradictory or unsupported key.
    """
    _refuse_unknown(raw, _USED | set(_IRRELEVANT), source)
    _refuse_unsupported(raw, source)
    hidden, heads = _require(raw, "hidden_size", source), _require(raw, "num_attention_heads", source)
    vocab = _require(raw, "vocab_size", source)
    aux_ids = _aux_layer_ids(raw, source)
    num_aux = raw.get("num_aux_hidden_states") or (len(aux_ids) if aux_ids else 3)
    if aux_ids and num_aux != len(aux_ids):
        raise PEagleError(
            f"{source}: num_aux_hidden_states is {num_aux} but {len(aux_ids)} aux layer ids are listed",
            "the width of fc follows from one of them",
            "correct num_aux_hidden_states",
        )
    if raw.get("norm_before_fc") and raw.get("fc_norm"):
        raise PEagleError(
            f"{source}: norm_before_fc and fc_norm are both set",
            "a head has one norm over all aux hidden states or one per aux layer, never both",
            "switch off the one that the head was not trained with",
        )
    return PEagleHeadConfig(
        hidden_size=hidden,
        target_hidden_size=raw.get("target_hidden_size") or hidden,
        intermediate_size=_require(raw, "intermediate_size", source),
        num_layers=_require(raw, "num_hidden_layers", source),
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or hidden // heads,
        vocab_size=vocab,
        draft_vocab_size=raw.get("draft_vocab_size") or vocab,
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        max_position_embeddings=_require(raw, "max_position_embeddings", source),
        rope=_rope(raw, source),
        aux_layer_ids=aux_ids,
        num_aux=num_aux,
        mask_token_id=_mask_token_id(raw, source),
        attention_bias=bool(raw.get("attention_bias")),
        norm_before_residual=bool(raw.get("norm_before_residual")),
        norm_before_fc=bool(raw.get("norm_before_fc")),
        fc_norm=bool(raw.get("fc_norm")),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings")),
        k_trained=raw.get("num_depths"),
    )


def _require(raw: Mapping[str, Any], key: str, source: str) -> Any:
    if raw.get(key) is None:
        raise PEagleError(
            f"{source}: {key} is missing",
            "the drafter cannot be built without it",
            f"add {key} as the head was trained with, or download the head again",
        )
    return raw[key]


def _refuse_unknown(raw: Mapping[str, Any], known: set[str], source: str) -> None:
    ignored = {key.strip() for key in os.environ.get(IGNORE_KEYS_ENV, "").split(",")}
    unknown = sorted(set(raw) - known - ignored)
    if unknown:
        raise PEagleError(
            f"{source}: unknown key{'s' if len(unknown) > 1 else ''} {', '.join(unknown)}",
            "a key that is not understood may change what the head computes, which would only show as bad drafts",
            f"remove the key, or set {IGNORE_KEYS_ENV}={','.join(unknown)} if it cannot matter",
        )


def _refuse_unsupported(raw: Mapping[str, Any], source: str) -> None:
    """Refuse by name what this drafter would compute differently from the head's trainer."""

    def refuse(what: str, why: str, fix: str) -> None:
        raise PEagleError(f"{source}: {what}", why, fix)

    if raw.get("model_type", "llama") != "llama":
        refuse(
            f"model_type is {raw['model_type']!r}",
            "the drafter has LLaMA-style blocks; other types differ in norms or attention",
            "use a head with model_type 'llama'",
        )
    if raw.get("parallel_drafting") is False:
        refuse(
            "parallel_drafting is false",
            "the head was trained to draft one token at a time; drafting in parallel needs a P-EAGLE head",
            "serve it with --speculative-algorithm EAGLE3",
        )
    if raw.get("hidden_act", "silu") != "silu":
        refuse(f"hidden_act is {raw['hidden_act']!r}", "the drafter's MLP is SwiGLU", "use a head with silu")
    if raw.get("mlp_bias"):
        refuse("mlp_bias is true", "the drafter's MLP has no biases", "use a head without MLP biases")
    if raw.get("partial_rotary_factor", 1) != 1:
        refuse("partial_rotary_factor is not 1", "the drafter rotates whole heads", "use a head with full RoPE")
    windowed = "sliding_attention" in (raw.get("layer_types") or ()) or raw.get("use_sliding_window")
    if windowed or (raw.get("sliding_window") and "layer_types" not in raw and "use_sliding_window" not in raw):
        refuse(
            "the head uses sliding-window attention",
            "the drafter attends to the whole context; drafts would differ from training beyond the window",
            "use a head with full attention",
        )


def _mask_token_id(raw: Mapping[str, Any], source: str) -> int:
    found = (raw.get("dflash_config") or {}).get("mask_token_id")
    for key in MASK_ID_KEYS:
        found = raw.get(key) if found is None else found
    if found is None:
        raise PEagleError(
            f"{source}: no mask token id (looked for dflash_config.mask_token_id, {', '.join(MASK_ID_KEYS)})",
            "mask rows need the embedding of the id that the head was trained with; guessing it ruins acceptance",
            "add mask_token_id to config.json, with the value used in training",
        )
    return int(found)


def _aux_layer_ids(raw: Mapping[str, Any], source: str) -> Optional[tuple[int, ...]]:
    """Capture points. The top-level list counts capture points (vLLM); the nested one layers (SGLang)."""
    nested_config = dict(raw.get("eagle_config") or {})
    nested = nested_config.pop("eagle_aux_hidden_state_layer_ids", None)
    if nested_config.pop("use_aux_hidden_state", True) is False:
        raise PEagleError(
            f"{source}: eagle_config.use_aux_hidden_state is false",
            "a P-EAGLE head reads aux hidden states of several target layers",
            "use a head trained on aux hidden states",
        )
    _refuse_unknown(nested_config, set(), f"{source}, eagle_config")
    top = raw.get("eagle_aux_hidden_state_layer_ids")
    from_nested = None if nested is None else tuple(i + 1 for i in nested)
    ids = from_nested if top is None else tuple(top)
    if ids is None:
        return None
    if top is not None and from_nested is not None and from_nested != ids:
        raise PEagleError(
            f"{source}: eagle_aux_hidden_state_layer_ids {list(top)} contradicts eagle_config's {list(nested)}",
            "the top-level list counts capture points (id i = output of layer i-1), the nested one layers",
            "remove the wrong one",
        )
    if len(set(ids)) != len(ids) or min(ids, default=0) < 0:
        raise PEagleError(
            f"{source}: aux layer ids {list(ids)} repeat or are negative",
            "each id is one captured hidden state",
            "list every capture point once",
        )
    return tuple(sorted(ids))  # engines concatenate in layer order, whatever the list's


def _rope(raw: Mapping[str, Any], source: str) -> RopeConfig:
    """RoPE in either spelling: rope_theta + rope_scaling, or transformers 5's rope_parameters."""
    params = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = params.pop("rope_theta", None)
    top_theta = raw.get("rope_theta")
    if theta is not None and top_theta is not None and float(theta) != float(top_theta):
        raise PEagleError(
            f"{source}: rope_theta is {top_theta} at top level and {theta} in rope_parameters",
            "positions would be encoded with one of them",
            "remove the wrong one",
        )
    rope_type, old_type = params.pop("rope_type", None), params.pop("type", None)
    rope_type = rope_type or old_type or "default"
    if rope_type not in _ROPE_TYPES:
        raise PEagleError(
            f"{source}: RoPE type {rope_type!r}",
            f"the drafter knows {', '.join(_ROPE_TYPES)}",
            "use a head with one of these",
        )
    final_theta = theta if theta is not None else top_theta
    return RopeConfig(rope_type, float(final_theta or 10000.0), tuple(sorted(params.items())))
