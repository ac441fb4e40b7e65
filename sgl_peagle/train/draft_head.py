"""Heads as plain torch, for measuring: P-EAGLE and EAGLE-3 rollouts of many anchors at once.

Both kinds run their *context rows* (token x_{p+1} with hidden g_p at position p) once per text; that stream does not
depend on where a round begins. Behind an anchor a come its own rows, which see the context rows 0 … a and each other:
K-1 MASK rows at once (P-EAGLE), or one row after the other that reads the last draft and the last output (EAGLE-3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Mapping, Optional

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from sgl_peagle.errors import PEagleError
from sgl_peagle.heads.config import PEagleHeadConfig
from sgl_peagle.heads.formats.vllm import ARCHITECTURE, VllmFormat
from sgl_peagle.heads.keys import read_json_object
from sgl_peagle.heads.names import expected_shapes
from sgl_peagle.heads.reader import read_head, weight_files

#: Most attention scores (floats) of one chunk of anchors.
_SCORES = {"cpu": 1 << 24, "cuda": 1 << 28}
#: Rows of logits at a time.
_LOGIT_ROWS = 4096

KV = tuple[Tensor, Tensor]


@dataclass
class Context:
    """The context rows of one text: per layer keys and values [n, kv_heads, d], and the last outputs [n, D]."""

    kv: list[KV]
    output: Tensor


class DraftHead:
    """A head on a device.

    Attributes:
        method: ``peagle`` or ``eagle3``.
        config: What it is; of an EAGLE-3 head, ``mask_token_id`` means nothing.
        name: Its folder's name.
    """

    def __init__(
        self, config: PEagleHeadConfig, tensors: Mapping[str, Tensor], embedding: Tensor, lm_head: Tensor, *,
        method: str, name: str, device: torch.device, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.method, self.config, self.name = method, config, name
        own = {key: t.to(device, dtype if t.is_floating_point() else t.dtype) for key, t in tensors.items()}
        self._w = own
        self._embedding = own.get("embed_tokens.weight", embedding.to(device, dtype))
        if "embed_mask_row" in own:
            self._embedding = self._embedding.clone()
            self._embedding[config.mask_token_id] = own["embed_mask_row"].flatten()
        self._lm_head = own.get("lm_head.weight", lm_head.to(device, dtype))
        self._target_ids = torch.arange(config.draft_vocab_size, device=device)
        if "d2t" in own:
            self._target_ids = self._target_ids + own["d2t"].long()
        self._frequencies, self._rope_scale = _frequencies(config, device)

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._embedding.device

    @torch.no_grad()
    def drafts(self, tokens: Tensor, aux: Tensor, anchors: Tensor, k: int) -> Tensor:
        """The K drafts at each anchor.

        Args:
            tokens: int64 [n + 1], the text.
            aux: [n, A*H] (or longer), the target's states after reading each token.
            anchors: int64 [R], ascending; anchor a drafts what follows x_{a+1}.

        Returns:
            int64 [R, k], ids of the target's vocabulary.
        """
        tokens, anchors = tokens.to(self.device), anchors.to(self.device)
        rows = int(anchors[-1]) + 1
        context = self._context(tokens[1 : rows + 1], self._combine(aux[:rows].to(self.device, self._embedding.dtype)))
        first = self._argmax(context.output[anchors])
        if k == 1:
            return first[:, None]
        per_anchor = rows * self.config.num_heads * (k - 1)
        size = max(1, _SCORES[self.device.type] // per_anchor)
        chunks = [
            self._rollout(context, anchors[i : i + size], first[i : i + size], k) for i in range(0, len(anchors), size)
        ]
        return torch.cat([first[:, None], torch.cat(chunks)], dim=1)

    # -- rollouts -----------------------------------------------------------------------------------------------------

    def _rollout(self, context: Context, anchors: Tensor, first: Tensor, k: int) -> Tensor:
        """Drafts 2 … k of some anchors, [C, k - 1]."""
        if self.method == "peagle":
            count = len(anchors)
            shared = self._combine(self._w["mask_hidden"].reshape(1, -1))
            masks = torch.full((count, k - 1), self.config.mask_token_id, device=self.device)
            output, _ = self._own_rows(context, anchors, masks, shared.expand(count, k - 1, -1), None)
            return self._argmax(output.flatten(0, 1)).view(count, k - 1)
        found, own, token, hidden = [], None, first, context.output[anchors]
        for _ in range(k - 1):
            output, own = self._own_rows(context, anchors, token[:, None], hidden[:, None], own)
            hidden = output[:, 0]
            token = self._argmax(hidden)
            found.append(token)
        return torch.stack(found, dim=1)

    def _own_rows(
        self, context: Context, anchors: Tensor, tokens: Tensor, hidden: Tensor, own: Optional[list[KV]]
    ) -> tuple[Tensor, list[KV]]:
        """New rows behind the context rows of their anchors and their own earlier rows.

        Args:
            tokens, hidden: [C, R] and [C, R, D] of the new rows.
            own: Per layer, keys and values [C, E, kv_heads, d] of the E earlier own rows.

        Returns:
            Outputs [C, R, D] before the final norm, and ``own`` with the new rows.
        """
        before = 0 if own is None else own[0][0].shape[1]
        count, new = tokens.shape
        positions = anchors[:, None] + 1 + before + torch.arange(new, device=self.device)
        visible = torch.arange(len(context.output), device=self.device) <= anchors[:, None]  # [C, n]
        causal = torch.ones(new, before + new, dtype=torch.bool, device=self.device).tril(before)
        seen = torch.cat([visible[:, None].expand(-1, new, -1), causal.expand(count, -1, -1)], dim=2)  # [C, R, n+E+R]
        grown: list[KV] = []

        def attend(layer: int, q: Tensor, key: Tensor, value: Tensor) -> Tensor:
            """q [C, R, heads, d] over the context's rows and the own ones."""
            if own is not None:
                key, value = torch.cat([own[layer][0], key], dim=1), torch.cat([own[layer][1], value], dim=1)
            grown.append((key, value))
            ck, cv = context.kv[layer]
            groups = ck.shape[1]
            q = q.view(count, new, groups, -1, q.shape[-1])
            scores = torch.cat(
                [torch.einsum("crghd,ngd->crghn", q, ck), torch.einsum("crghd,cegd->crghe", q, key)], dim=-1
            ).float()
            scores = (scores * q.shape[-1] ** -0.5).masked_fill(~seen[:, :, None, None], -math.inf)
            weights = scores.softmax(-1).to(q.dtype)
            n = len(ck)
            mixed = torch.einsum("crghn,ngd->crghd", weights[..., :n], cv)
            mixed = mixed + torch.einsum("crghe,cegd->crghd", weights[..., n:], value)
            return mixed.flatten(2)

        return self._stack(tokens, hidden, positions, attend), grown

    def _context(self, tokens: Tensor, hidden: Tensor) -> Context:
        """The causal stream of the context rows: tokens [n], hidden [n, D]."""
        kv: list[KV] = []

        def attend(_layer: int, q: Tensor, key: Tensor, value: Tensor) -> Tensor:
            kv.append((key[0], value[0]))
            group = q.shape[2] // key.shape[2]
            q, key, value = (x.transpose(1, 2) for x in (q, key, value))
            key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
            return F.scaled_dot_product_attention(q, key, value, is_causal=True).transpose(1, 2).flatten(2)

        positions = torch.arange(len(tokens), device=self.device)[None]
        output = self._stack(tokens[None], hidden[None], positions, attend)
        return Context(kv, output[0])

    # -- the decoder --------------------------------------------------------------------------------------------------

    def _stack(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Any) -> Tensor:
        """All layers over rows [B, R]; returns [B, R, D] before the final norm."""
        angles = positions[..., None].double() * self._frequencies
        wide = torch.promote_types(hidden.dtype, torch.float32)  # engines rotate in float32, too
        cos, sin = ((f(angles) * self._rope_scale).to(wide)[:, :, None] for f in (torch.cos, torch.sin))
        x = hidden
        for layer in range(self.config.num_layers):
            prefix = f"layers.{layer}."
            normed = self._norm(prefix + "input_layernorm", x if layer else F.embedding(tokens, self._embedding))
            residual = x
            if layer == 0:
                inner = self._norm(prefix + "hidden_norm", x)
                normed = torch.cat([normed, inner], dim=-1)
                residual = inner if self.config.norm_before_residual else x
            q, key, value = (self._heads(prefix, name, normed) for name in ("q_proj", "k_proj", "v_proj"))
            if self.config.qk_norm:
                q, key = self._norm(prefix + "self_attn.q_norm", q), self._norm(prefix + "self_attn.k_norm", key)
            mixed = attend(layer, _rotate(q, cos, sin), _rotate(key, cos, sin), value)
            x = residual + self._linear(prefix + "self_attn.o_proj", mixed)
            inner = self._norm(prefix + "post_attention_layernorm", x)
            gated = F.silu(self._linear(prefix + "mlp.gate_proj", inner)) * self._linear(prefix + "mlp.up_proj", inner)
            x = x + self._linear(prefix + "mlp.down_proj", gated)
        return x

    def _heads(self, prefix: str, name: str, x: Tensor) -> Tensor:
        return self._linear(f"{prefix}self_attn.{name}", x).unflatten(-1, (-1, self.config.head_dim))

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self._w[name + ".weight"], self._w.get(name + ".bias"))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return _rms(x, self._w[name + ".weight"], self.config.rms_norm_eps)

    def _combine(self, aux: Tensor) -> Tensor:
        """Aux hidden states [m, A*H] to the head's width [m, D]."""
        if self.config.norm_before_fc:
            aux = self._norm("input_norm", aux)
        if self.config.fc_norm:
            parts = aux.split(self.config.target_hidden_size, dim=-1)
            aux = torch.cat([self._norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)], dim=-1)
        return self._linear("fc", aux)

    def _argmax(self, output: Tensor) -> Tensor:
        """Best target ids of rows [m, D], final norm and LM head included."""
        normed = self._norm("norm", output)
        best = [F.linear(part, self._lm_head).argmax(-1) for part in normed.split(_LOGIT_ROWS)]
        return self._target_ids[torch.cat(best)]


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float() if x.dtype != torch.float64 else x
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def _frequencies(config: PEagleHeadConfig, device: torch.device) -> tuple[Tensor, float]:
    """Radians per position [head_dim / 2] float64, and the factor on cos and sin: transformers' own formulas."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if config.rope.rope_type == "default":
        steps = torch.arange(0, config.head_dim, 2, dtype=torch.float64, device=device) / config.head_dim
        return config.rope.theta**-steps, 1.0
    llama = LlamaConfig(
        hidden_size=config.hidden_size, num_attention_heads=config.num_heads, head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings, rope_parameters=config.rope.parameters(),
    )  # fmt: skip
    inverse, scale = ROPE_INIT_FUNCTIONS[config.rope.rope_type](llama, "cpu")
    return inverse.to(device, torch.float64), float(scale)


# -- reading ----------------------------------------------------------------------------------------------------------


def load(folder: Path, embedding: Tensor, lm_head: Tensor, device: torch.device, dtype: torch.dtype) -> DraftHead:
    """Read a P-EAGLE head (any format this package reads) or an EAGLE-3 head (the one that has no ``mask_hidden``).

    Args:
        embedding, lm_head: The target's, for what the head leaves to it.

    Raises:
        PEagleError: Not a head, or one that does not fit its config.
    """
    files = weight_files(folder)
    names = {name for file in files for name in _names(file)}
    if any(name.endswith("mask_hidden") for name in names):
        head = read_head(str(folder))
        tensors = {head.canonical(n): t for file in files for n, t in load_file(file).items()}
        config, method = head.config, "peagle"
    else:
        config, tensors = _read_eagle3(folder, files)
        method = "eagle3"
    return DraftHead(config, tensors, embedding, lm_head, method=method, name=folder.name, device=device, dtype=dtype)


def _names(file: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as handle:
        return list(handle.keys())


def _read_eagle3(folder: Path, files: list[Path]) -> tuple[PEagleHeadConfig, dict[str, Tensor]]:
    """An EAGLE-3 head in SGLang's form: ``midlayer.*``, aux layers in ``eagle_config``."""
    where, raw = folder / "config.json", dict(read_json_object(folder / "config.json"))
    if raw.get("architectures") != [ARCHITECTURE]:
        raise PEagleError(
            f"{where}: architectures is {raw.get('architectures')} and there is no mask_hidden",
            f"an EAGLE-3 head says [{ARCHITECTURE!r}], a P-EAGLE head has mask_hidden",
            "give the folder of a head",
        )
    if raw.pop("norm_output", False):
        raise PEagleError(
            f"{where}: norm_output is true", "the hidden state fed back is taken before the norm here", "use an EAGLE-3 head"
        )
    for key in ("training", "parallel_drafting", "draft_vocab_size"):  # null: the LM head is the target's
        if key != "draft_vocab_size" or raw.get(key) is None:
            raw.pop(key, None)
    form = VllmFormat()
    config = replace(form.parse(raw, str(where), 0), k_trained=None)
    tensors = {form.canonical(n): t for file in files for n, t in load_file(file).items()}
    for name, shapes in expected_shapes(config).items():
        if name != "mask_hidden" and (name not in tensors or tuple(tensors[name].shape) not in shapes):
            found = list(tensors[name].shape) if name in tensors else "missing"
            raise PEagleError(
                f"{folder}: {name} is {found}",
                f"config.json asks for {' or '.join(str(list(shape)) for shape in shapes)}",
                "use the weights that belong to the config",
            )
    return config, tensors
