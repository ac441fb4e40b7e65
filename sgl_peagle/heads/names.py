"""The tensors a config asks for, by canonical name, and their shapes (no format's own names here)."""

from __future__ import annotations

from sgl_peagle.heads.config import PEagleHeadConfig

Shapes = dict[str, tuple[tuple[int, ...], ...]]


def expected_shapes(config: PEagleHeadConfig) -> Shapes:
    """Canonical name -> allowed shapes, of every tensor that must be there."""
    d, width = config.hidden_size, config.aux_width
    shapes: Shapes = {
        "fc.weight": ((d, width),),
        "mask_hidden": ((1, 1, width), (1, width), (width,)),
        "norm.weight": ((d,),),
    }
    if config.norm_before_fc:
        shapes["input_norm.weight"] = ((width,),)
    if config.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": ((config.target_hidden_size,),) for i in range(config.num_aux)}
    if config.embed_from_target:
        shapes["embed_mask_row"] = ((d,),)
    for layer in range(config.num_layers):
        shapes |= _layer_shapes(config, layer)
    return shapes


def optional_shapes(config: PEagleHeadConfig) -> Shapes:
    """Canonical name -> allowed shapes, of tensors that a head may leave out."""
    d = config.hidden_size
    embedding: Shapes = {} if config.embed_from_target else {"embed_tokens.weight": ((config.vocab_size, d),)}
    return {
        **embedding,  # else the target's
        "lm_head.weight": ((config.draft_vocab_size, d),),  # else the target's
        "fc.bias": ((d,),),  # no config key says whether it is there
        "d2t": ((config.draft_vocab_size,),),  # else the identity
        "t2d": ((config.vocab_size,),),  # follows from d2t
    }


def _layer_shapes(config: PEagleHeadConfig, layer: int) -> Shapes:
    d, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    width = 2 * d if layer == 0 else d  # layer 0 reads [embedding ; hidden]
    prefix = f"layers.{layer}."
    shapes: Shapes = {
        prefix + "input_layernorm.weight": ((d,),),
        prefix + "post_attention_layernorm.weight": ((d,),),
        prefix + "self_attn.q_proj.weight": ((q, width),),
        prefix + "self_attn.k_proj.weight": ((kv, width),),
        prefix + "self_attn.v_proj.weight": ((kv, width),),
        prefix + "self_attn.o_proj.weight": ((d, q),),
        prefix + "mlp.gate_proj.weight": ((inner, d),),
        prefix + "mlp.up_proj.weight": ((inner, d),),
        prefix + "mlp.down_proj.weight": ((d, inner),),
    }
    if config.qk_norm:
        shapes |= {f"{prefix}self_attn.{name}.weight": ((config.head_dim,),) for name in ("q_norm", "k_norm")}
    if layer == 0:
        shapes[prefix + "hidden_norm.weight"] = ((d,),)
    if config.attention_bias:
        sizes = {"q_proj": q, "k_proj": kv, "v_proj": kv, "o_proj": d}
        shapes |= {f"{prefix}self_attn.{name}.bias": ((size,),) for name, size in sizes.items()}
    return shapes
