"""The head in plain torch: LLaMA blocks over training rows. Parameter names are the tensor names of the exported file.

Layer 0 reads [norm(embedding); norm(hidden)] and adds to the un-normed hidden; later layers are ordinary. The LM head is
the target's and frozen; it is no part of the module. Letters in shapes: R rows, D width, A aux layers, H the target's width.

Weights are float32; matrix products run in ``dtype`` (bfloat16 on a GPU), the residual stream and the norms in float32.

Targets have channels hundreds of times larger than the rest. Adam's steps have one size for all weights, so one such channel
would shake the whole head. In training, ``fc`` therefore reads aux states divided by ``aux_scale``, channel by channel, and
``mask_hidden`` is kept in those units; :meth:`Head.exported` folds the scale into both. It is a power of two: exact.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Callable, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sgl_peagle.errors import PEagleError

#: How the embedding is had: the target's with a MASK row of its own, a trained copy, or the target's.
EMBEDDINGS = ("mask_row", "full", "frozen")

#: RoPE types whose angles follow from the position alone.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")

#: (layer, q [R, heads, dim], k [R, kv_heads, dim], v) -> [R, heads, dim]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of a head: ``layers``, ``num_aux`` and perhaps ``intermediate_size`` its own, the others the target's."""

    layers: int
    num_aux: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_parameters: dict[str, Any]

    @classmethod
    def of_target(cls, config: Any, layers: int, num_aux: int, intermediate_size: Optional[int] = None) -> "Shape":
        """From the target's transformers config.

        Raises:
            PEagleError: RoPE that the drafter does not compute.
        """
        rope = dict(config.rope_parameters or {})
        kind = rope.get("rope_type", "default")
        if kind not in ROPE_TYPES or rope.get("partial_rotary_factor", 1) != 1:
            raise PEagleError(
                f"the target's RoPE is {rope}",
                f"a head takes over its target's, and drafters compute {', '.join(ROPE_TYPES)} over whole heads",
                "train for a target with one of these",
            )
        heads = config.num_attention_heads
        return cls(
            layers,
            num_aux,
            config.hidden_size,
            intermediate_size or config.intermediate_size,
            heads,
            getattr(config, "num_key_value_heads", None) or heads,
            getattr(config, "head_dim", None) or config.hidden_size // heads,
            config.vocab_size,
            config.rms_norm_eps,
            config.max_position_embeddings,
            rope,
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


class Linear(nn.Linear):
    """No bias; computes in the dtype of its input."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Norm(nn.Module):
    """RMSNorm of a float32 stream, handed on in ``dtype``."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(dtype)


class Rope(nn.Module):
    """Cosines and sines by position, [positions, head_dim / 2] float32, from float64 angles."""

    def __init__(self, shape: Shape, positions: int) -> None:
        super().__init__()
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        config = LlamaConfig(
            hidden_size=shape.hidden_size,
            num_attention_heads=shape.num_heads,
            head_dim=shape.head_dim,
            max_position_embeddings=shape.max_position_embeddings,
            rope_parameters=dict(shape.rope_parameters),
        )
        rotary = LlamaRotaryEmbedding(config)
        angles = torch.arange(positions, dtype=torch.float64)[:, None] * rotary.inv_freq.double()
        scale = rotary.attention_scaling
        self.register_buffer("cos", (angles.cos() * scale).float(), persistent=False)
        self.register_buffer("sin", (angles.sin() * scale).float(), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos[positions][:, None], self.sin[positions][:, None]


def _rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = rope
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: Shape, inputs: int) -> None:
        super().__init__()
        self.dim = shape.head_dim
        self.q_proj = Linear(inputs, shape.num_heads * self.dim)
        self.k_proj = Linear(inputs, shape.num_kv_heads * self.dim)
        self.v_proj = Linear(inputs, shape.num_kv_heads * self.dim)
        self.o_proj = Linear(shape.num_heads * self.dim, shape.hidden_size)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], layer: int, attend: Attend) -> Tensor:
        q, k, v = (project(x).view(len(x), -1, self.dim) for project in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(attend(layer, _rotate(q, rope), _rotate(k, rope), v).flatten(1))


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = Linear(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape, index: int) -> None:
        super().__init__()
        width, eps = shape.hidden_size, shape.rms_norm_eps
        self.index = index
        self.input_layernorm = Norm(width, eps)
        if index == 0:
            self.hidden_norm = Norm(width, eps)
        self.self_attn = Attention(shape, 2 * width if index == 0 else width)
        self.post_attention_layernorm = Norm(width, eps)
        self.mlp = Mlp(shape)

    def forward(
        self, x: Tensor, embedded: Tensor, rope: tuple[Tensor, Tensor], attend: Attend, dtype: torch.dtype
    ) -> Tensor:
        if self.index == 0:
            read = torch.cat((self.input_layernorm(embedded, dtype), self.hidden_norm(x, dtype)), dim=-1)
        else:
            read = self.input_layernorm(x, dtype)
        x = x + self.self_attn(read, rope, self.index, attend)
        return x + self.mlp(self.post_attention_layernorm(x, dtype))


class Embedding(nn.Module):
    """The trained copy of the target's embedding (no padding index: it would freeze a row)."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, width))


class Head(nn.Module):
    """A P-EAGLE head, or with ``mask_token_id`` None an EAGLE-3 head (no MASK row, no ``mask_hidden``).

    Args:
        shape: Sizes.
        target_embedding: [V, D], the target's, frozen and shared (not copied unless ``embedding`` is ``full``).
        mask_token_id: The MASK token's id.
        embedding: One of :data:`EMBEDDINGS`.
        positions: Positions that may occur.
        dtype: Of matrix products.
    """

    def __init__(
        self,
        shape: Shape,
        target_embedding: Tensor,
        *,
        mask_token_id: Optional[int],
        embedding: str = "mask_row",
        positions: int = 2048,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.shape, self.mask_token_id, self.embedding, self.dtype = shape, mask_token_id, embedding, dtype
        width, aux_width = shape.hidden_size, shape.num_aux * shape.hidden_size
        self.register_buffer("target_embedding", target_embedding.detach(), persistent=False)
        if embedding == "full":
            self.embed_tokens = Embedding(shape.vocab_size, width)
        elif embedding == "mask_row":
            self.embed_mask_row = nn.Parameter(torch.zeros(width))
        self.fc = Linear(aux_width, width)
        if mask_token_id is not None:
            self.mask_hidden = nn.Parameter(torch.zeros(1, 1, aux_width))
        self.register_buffer("aux_scale", torch.ones(aux_width))
        self.layers = nn.ModuleList(Layer(shape, i) for i in range(shape.layers))
        self.norm = Norm(width, shape.rms_norm_eps)
        self.rope = Rope(shape, positions)

    @torch.no_grad()
    def start(self, aux: Tensor, target_norm: Tensor, random: torch.Generator) -> None:
        """Initial weights.

        Args:
            aux: [n, A*H] real aux states of assistant positions: they give ``aux_scale``, and ``mask_hidden`` starts with
                their mean and spread, channel by channel, as it stands in for them (at unit scale in their
                place it would be a whisper).
            target_norm: [D], the target's final norm: the frozen LM head expects its scale.
            random: A CPU generator.
        """
        aux = aux.float().cpu()
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2 and not name.startswith("embed_tokens"):
                parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.02)
        rms = aux.square().mean(0).sqrt()
        self.aux_scale.copy_(2.0 ** rms.clamp_min(1e-3 * float(rms.median()) + 1e-12).log2().round())
        aux = aux / self.aux_scale.cpu()
        self.fc.weight.copy_(torch.randn(self.fc.weight.shape, generator=random) / aux.shape[1] ** 0.5)
        self.norm.weight.copy_(target_norm)
        if self.mask_token_id is None:
            if self.embedding == "full":
                self.embed_tokens.weight.copy_(self.target_embedding)
            return
        spread = torch.randn(aux.shape[1], generator=random) * aux.std(0)
        self.mask_hidden.copy_((aux.mean(0) + spread).view_as(self.mask_hidden))
        row = torch.randn(self.shape.hidden_size, generator=random)
        if self.embedding == "full":
            self.embed_tokens.weight.copy_(self.target_embedding)
            self.embed_tokens.weight[self.mask_token_id] = row.to(self.embed_tokens.weight)
        elif self.embedding == "mask_row":
            self.embed_mask_row.copy_(row)

    def embed(self, tokens: Tensor) -> Tensor:
        """[R, D] of ``tokens`` [R] int64."""
        if self.embedding == "full":
            return F.embedding(tokens, self.embed_tokens.weight)
        rows = F.embedding(tokens, self.target_embedding).float()
        if self.embedding == "frozen" or self.mask_token_id is None:
            return rows
        return torch.where((tokens == self.mask_token_id)[:, None], self.embed_mask_row, rows)

    def project(self, aux: Tensor) -> Tensor:
        """Aux states [R, A*H] as hidden states [R, D] float32."""
        return self.fc((aux / self.aux_scale).to(self.dtype)).float()

    def hidden_rows(self, aux: Tensor, masks: int) -> Tensor:
        """Hidden states of all rows [R, D]: the projected ``aux`` of the depth-0 rows, then ``masks`` times h_shared."""
        if masks == 0:
            return self.project(aux)
        shared = self.fc(self.mask_hidden[0].to(self.dtype)).float()
        return torch.cat((self.project(aux), shared.expand(masks, -1)))

    def forward(self, embedded: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Rows through all layers.

        Args:
            embedded: [R, D], from :meth:`embed`.
            hidden: [R, D] float32.
            positions: [R] int64.
            attend: Attention.

        Returns:
            [R, D] float32, before the final norm: what EAGLE-3 feeds back.
        """
        rope = self.rope(positions)
        for layer in self.layers:
            hidden = layer(hidden, embedded, rope, attend, self.dtype)
        return hidden

    def final(self, hidden: Tensor) -> Tensor:
        """What the LM head reads, [R, D] in ``dtype``."""
        return self.norm(hidden, self.dtype)

    @torch.no_grad()
    def exported(self) -> dict[str, Tensor]:
        """Tensors of the exported file by name, float32: with ``aux_scale`` folded in."""
        tensors = {name: parameter.detach() for name, parameter in self.named_parameters()}
        tensors["fc.weight"] = tensors["fc.weight"] / self.aux_scale
        if self.mask_token_id is not None:
            tensors["mask_hidden"] = tensors["mask_hidden"] * self.aux_scale
        return tensors
