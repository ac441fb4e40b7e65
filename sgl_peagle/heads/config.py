"""What a P-EAGLE head is, whatever format its files have: one frozen object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

from sgl_peagle.errors import PEagleError

#: Keys named here (comma separated) are accepted and ignored, at the user's own risk.
IGNORE_KEYS_ENV = "SGL_PEAGLE_IGNORE_CONFIG_KEYS"

#: The mask token id of a head whose files do not record it (SpecForge); the server has no flag for it.
MASK_ID_ENV = "SGL_PEAGLE_MASK_TOKEN_ID"


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

    def parameters(self) -> dict[str, Any]:
        """transformers 5's ``rope_parameters``."""
        return {"rope_type": self.rope_type, "rope_theta": self.theta, **dict(self.params)}


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
        qk_norm: Whether queries and keys are normalised per head before RoPE (Qwen3-type heads).
        embed_from_target: Whether the head stores only the mask row of its embedding (``embed_mask_row``); all
            other rows are the target's.
        k_trained: Depths the head was trained for, None when the config does not say.
        target: Name of the target that the head was trained for, None when the config does not say.
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
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    embed_from_target: bool = False
    k_trained: Optional[int] = None
    target: Optional[str] = None

    @property
    def aux_width(self) -> int:
        """A * H, width of the concatenated target hidden states."""
        return self.num_aux * self.target_hidden_size


def check_config(config: PEagleHeadConfig, source: str) -> PEagleHeadConfig:
    """Refuse values that contradict each other, in any format.

    Raises:
        PEagleError: Naming the values.
    """

    def refuse(what: str, why: str, fix: str) -> None:
        raise PEagleError(f"{source}: {what}", why, fix)

    if config.norm_before_fc and config.fc_norm:
        refuse(
            "norm_before_fc and fc_norm are both set",
            "a head has one norm over all aux hidden states or one per aux layer, never both",
            "switch off the one that the head was not trained with",
        )
    if config.num_heads % config.num_kv_heads:
        refuse(
            f"num_attention_heads {config.num_heads} is no multiple of num_key_value_heads {config.num_kv_heads}",
            "query heads are shared out evenly among the key/value heads",
            "correct one of them",
        )
    if config.head_dim % 2:
        refuse(f"head_dim is {config.head_dim}", "RoPE rotates pairs", "correct head_dim, hidden_size or the head count")
    if not 0 <= config.mask_token_id < config.vocab_size:
        refuse(
            f"mask token id {config.mask_token_id} is outside the vocabulary of {config.vocab_size}",
            "mask rows need an embedding row",
            "correct the mask token id (mask_token_id or ptd_token_id, or the one that you gave)",
        )
    if config.draft_vocab_size > config.vocab_size:
        refuse(
            f"draft_vocab_size {config.draft_vocab_size} is larger than vocab_size {config.vocab_size}",
            "draft ids map to distinct target ids",
            "correct one of them",
        )
    return config
