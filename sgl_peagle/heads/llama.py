"""The keys that every format shares: a LLaMA-style decoder's sizes, RoPE, norms, mask token id and aux layers."""

from __future__ import annotations

from typing import Any, Optional

from sgl_peagle.errors import PEagleError
from sgl_peagle.heads.config import MASK_ID_ENV, RopeConfig
from sgl_peagle.heads.keys import Keys

#: Where a mask token id may stand, in the order of precedence that vLLM uses.
MASK_ID_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")

#: Far above any drafter; guards against building tables for a mistyped number.
_MOST_LAYERS = 256

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_ROPE_PARAMETERS = {
    "default": "",
    "linear": "factor",
    "llama3": "factor low_freq_factor high_freq_factor original_max_position_embeddings",
    "yarn": "factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale mscale_all_dim "
    "truncate extrapolation_factor attn_factor",
}


def decoder_fields(keys: Keys, model_types: tuple[str, ...]) -> dict[str, Any]:
    """The decoder's part of a :class:`~sgl_peagle.heads.config.PEagleHeadConfig`.

    Args:
        keys: The object with the decoder's keys (top level, or speculators' ``transformer_layer_config``).
        model_types: Values of ``model_type`` that this format knows; ``qwen3`` means q/k norms.

    Raises:
        PEagleError: A key that is missing, malformed, or asks for what the drafter does not compute.
    """
    model_type = keys.text("model_type", model_types[0])
    if model_type not in model_types:
        keys.refuse(
            f"model_type is {model_type!r}",
            "the drafter has LLaMA-style blocks; other types differ in norms or attention",
            f"use a head with model_type {' or '.join(map(repr, model_types))}",
        )
    if keys.text("hidden_act", "silu") != "silu":
        keys.refuse(f"hidden_act is {keys.raw['hidden_act']!r}", "the drafter's MLP is SwiGLU", "use a head with silu")
    if keys.flag("mlp_bias"):
        keys.refuse("mlp_bias is true", "the drafter's MLP has no biases", "use a head without MLP biases")
    if keys.number("partial_rotary_factor", 1.0) != 1:
        keys.refuse("partial_rotary_factor is not 1", "the drafter rotates whole heads", "use a head with full RoPE")
    num_layers = keys.required("num_hidden_layers")
    if num_layers > _MOST_LAYERS:
        keys.refuse(f"num_hidden_layers is {num_layers}", "a drafter has a few layers", "correct num_hidden_layers")
    _refuse_sliding_window(keys, num_layers)
    hidden, heads = keys.required("hidden_size"), keys.required("num_attention_heads")
    head_dim = keys.integer("head_dim") or hidden // heads
    if head_dim < 1:
        keys.refuse(f"hidden_size {hidden} is smaller than num_attention_heads {heads}", "heads have no size", "correct one")
    return {
        "hidden_size": hidden,
        "intermediate_size": keys.required("intermediate_size"),
        "num_layers": num_layers,
        "num_heads": heads,
        "num_kv_heads": keys.integer("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "vocab_size": keys.required("vocab_size"),
        "rms_norm_eps": keys.number("rms_norm_eps", 1e-6),
        "max_position_embeddings": keys.required("max_position_embeddings"),
        "rope": rope(keys),
        "attention_bias": keys.flag("attention_bias"),
        "qk_norm": model_type == "qwen3",
    }


def _refuse_sliding_window(keys: Keys, num_layers: int) -> None:
    layer_types = keys.texts("layer_types")
    window, switch = keys.integer("sliding_window", least=0), keys.take("use_sliding_window")
    use_window = keys.flag("use_sliding_window")
    unknown = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
    if unknown:
        keys.refuse(f"layer_types names {', '.join(unknown)}", "the drafter has full attention", "use such a head")
    if layer_types and len(layer_types) != num_layers:
        keys.refuse(
            f"layer_types lists {len(layer_types)} layers, num_hidden_layers is {num_layers}",
            "each layer has one type",
            "correct one of them",
        )
    if "sliding_attention" in layer_types or use_window or (window and not layer_types and switch is None):
        keys.refuse(
            "the head uses sliding-window attention",
            "the drafter attends to the whole context; drafts would differ from training beyond the window",
            "use a head with full attention",
        )


def rope(keys: Keys) -> RopeConfig:
    """RoPE in either spelling: rope_theta + rope_scaling, or transformers 5's rope_parameters.

    Raises:
        PEagleError: An unknown type or parameter, or two bases.
    """
    new, old = keys.nested("rope_parameters"), keys.nested("rope_scaling")
    nested = new if new is not None and new.raw else old
    if new is not None and old is not None and new.raw and old.raw and _plain(new.raw) != _plain(old.raw):
        keys.refuse("rope_parameters and rope_scaling differ", "positions would be encoded with one of them", "remove one")
    top_theta = keys.number("rope_theta", 0.0) or None
    if nested is None:
        return RopeConfig("default", top_theta or 10000.0)
    theta = nested.number("rope_theta", 0.0) or None
    if theta is not None and top_theta is not None and theta != top_theta:
        keys.refuse(
            f"rope_theta is {top_theta} at top level and {theta} in the RoPE parameters",
            "positions would be encoded with one of them",
            "remove the wrong one",
        )
    new_type, old_type = nested.text("rope_type"), nested.text("type")
    rope_type = new_type or old_type or "default"
    if rope_type not in _ROPE_TYPES:
        keys.refuse(f"RoPE type {rope_type!r}", f"the drafter knows {', '.join(_ROPE_TYPES)}", "use a head with one of these")
    if nested.number("partial_rotary_factor", 1.0) != 1:
        nested.refuse("partial_rotary_factor is not 1", "the drafter rotates whole heads", "use a head with full RoPE")
    params = {}
    for name in _ROPE_PARAMETERS[rope_type].split():
        value = nested.take(name)
        if value is not None:
            params[name] = nested.flag(name) if name == "truncate" else _same_number(nested, name)
    if rope_type in ("linear", "llama3") and len(params) < len(_ROPE_PARAMETERS[rope_type].split()):
        missing = sorted(set(_ROPE_PARAMETERS[rope_type].split()) - set(params))
        nested.refuse(f"{', '.join(missing)} missing", f"RoPE type {rope_type} needs it", "add it as trained with")
    nested.finish()
    return RopeConfig(rope_type, theta or top_theta or 10000.0, tuple(sorted(params.items())))


def _plain(raw: Any) -> dict[str, Any]:
    """RoPE parameters without the base and with one spelling of the type."""
    kind = raw.get("rope_type") or raw.get("type") or "default"
    return {k: v for k, v in raw.items() if k not in ("rope_theta", "type", "rope_type")} | {"rope_type": kind}


def _same_number(keys: Keys, name: str) -> Any:
    keys.number(name, 1.0)  # checks only: an integer stays an integer
    return keys.raw[name]


def mask_token_id(keys: Keys, given: Optional[int]) -> int:
    """The mask token id: the config's by the order of precedence, else the one the user gave.

    Args:
        keys: The top level of the config.
        given: From ``--mask-token-id`` or the environment variable, or None.

    Raises:
        PEagleError: None at all, or two that differ.
    """
    dflash = keys.nested("dflash_config")
    found = dflash.integer("mask_token_id", least=0) if dflash else None
    if dflash:
        dflash.finish()
    for key in MASK_ID_KEYS:
        value = keys.integer(key, least=0)
        found = value if found is None else found
    if found is None and given is None:
        keys.refuse(
            f"no mask token id (looked for dflash_config.mask_token_id, {', '.join(MASK_ID_KEYS)})",
            "mask rows need the embedding of the id that the head was trained with; guessing it ruins acceptance",
            f"find the id in the training command, then: sgl-peagle convert HEAD OUT --to peagle --mask-token-id ID "
            f"(or set {MASK_ID_ENV}=ID for the server)",
        )
    if found is not None and given is not None and found != given:
        keys.refuse(
            f"the mask token id is {found}, and {given} was given",
            "the head was trained with one of them",
            f"leave out --mask-token-id and {MASK_ID_ENV}: the head's own is used",
        )
    return given if found is None else found  # type: ignore[return-value]


def aux_layer_ids(keys: Keys, *, top_counts: Optional[str]) -> Optional[tuple[int, ...]]:
    """Ascending capture points, or None for the default.

    Two lists occur. The nested ``eagle_config`` one is SGLang's and counts layers (id i = output of layer i). What a
    list at top level counts depends on the format.

    Args:
        keys: The top level of the config.
        top_counts: ``"points"`` (id i = output of layer i-1), or None where the format does not define it.

    Raises:
        PEagleError: Lists that contradict each other, repeat an id, or whose convention is unknown.
    """
    nested = keys.nested("eagle_config")
    layers = None
    if nested is not None:
        layers = nested.integers("eagle_aux_hidden_state_layer_ids")
        if not nested.flag("use_aux_hidden_state", True):
            nested.refuse(
                "use_aux_hidden_state is false",
                "a P-EAGLE head reads aux hidden states of several target layers",
                "use a head trained on aux hidden states",
            )
        nested.finish()
    top = keys.integers("eagle_aux_hidden_state_layer_ids")
    from_layers = None if layers is None else tuple(i + 1 for i in layers)
    if top is not None and top_counts is None and top not in (from_layers, layers):
        keys.refuse(
            f"eagle_aux_hidden_state_layer_ids {list(top)} at top level",
            "this format does not say whether such a list counts layers or capture points, and off by one ruins drafts",
            'write eagle_config: {"eagle_aux_hidden_state_layer_ids": [...]} with layer numbers (id i = output of layer '
            "i), or leave both out if the head was trained on the default layers",
        )
    ids = from_layers if top is None or top_counts is None else top
    if ids is None:
        return None
    if top is not None and top_counts == "points" and from_layers is not None and from_layers != ids:
        keys.refuse(
            f"eagle_aux_hidden_state_layer_ids {list(top)} contradicts eagle_config's {list(layers or ())}",
            "the top-level list counts capture points (id i = output of layer i-1), the nested one layers",
            "remove the wrong one",
        )
    if not ids or len(set(ids)) != len(ids) or min(ids) < 0:
        keys.refuse(
            f"aux layer ids {list(ids)} are empty, repeat or are negative",
            "each id is one captured hidden state",
            "list every capture point once",
        )
    return tuple(sorted(ids))  # engines concatenate in layer order, whatever the list's


def head_fields(keys: Keys, ids: Optional[tuple[int, ...]], given_mask_id: Optional[int]) -> dict[str, Any]:
    """The fields of :class:`PEagleHeadConfig` beyond the decoder's that the flat formats name alike.

    Args:
        ids: The head's capture points, or None for the default.
        given_mask_id: The user's mask token id, for files that record none.
    """
    return {
        "aux_layer_ids": ids,
        "num_aux": count_aux(keys, ids),
        "mask_token_id": mask_token_id(keys, given_mask_id),
        "norm_before_residual": keys.flag("norm_before_residual"),
        "norm_before_fc": keys.flag("norm_before_fc"),
        "fc_norm": keys.flag("fc_norm"),
        "tie_word_embeddings": keys.flag("tie_word_embeddings"),
    }


def count_aux(keys: Keys, ids: Optional[tuple[int, ...]]) -> int:
    """A, the number of aux hidden states: three unless the config says otherwise.

    Raises:
        PEagleError: ``num_aux_hidden_states`` and the list differ.
    """
    stated = keys.integer("num_aux_hidden_states")
    if ids is not None and stated is not None and stated != len(ids):
        raise PEagleError(
            f"{keys.source}: num_aux_hidden_states is {stated} but {len(ids)} aux layer ids are listed",
            "the width of fc follows from one of them",
            "correct num_aux_hidden_states",
        )
    if ids is None and stated is not None and stated != 3:
        raise PEagleError(
            f"{keys.source}: num_aux_hidden_states is {stated} and no aux layer ids are listed",
            "the default layers are three",
            "add eagle_aux_hidden_state_layer_ids as the head was trained with",
        )
    return len(ids) if ids else 3
