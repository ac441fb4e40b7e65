"""The frozen target, run in the training step: its states of a small model are cheaper to recompute than to store."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from sgl_peagle.aux_layers import capture_points
from sgl_peagle.errors import PEagleError
from sgl_peagle.train.device import prepare


class States(NamedTuple):
    """What the target knows after reading each token of [B, L] tokens, flat.

    Attributes:
        aux: [B * L, A*H], the captured layers side by side.
        last: [B * L, H], final-normed: what its LM head reads.
    """

    aux: Tensor
    last: Tensor


class Target:
    """A transformers causal LM, frozen.

    Args:
        path_or_id: Folder or hub id.
        device: Where it runs.
        dtype: bfloat16 on a GPU; float32 on a CPU.
        aux_layer_ids: Capture points (id i = transformers' ``hidden_states[i]``), or None for ``(2, L//2, L-3)``.

    Raises:
        PEagleError: No such model, or capture points it does not have.
    """

    def __init__(
        self, path_or_id: str, device: torch.device, dtype: torch.dtype, aux_layer_ids: Optional[Sequence[int]] = None
    ) -> None:
        from transformers import AutoModelForCausalLM

        prepare(device)
        try:
            model = AutoModelForCausalLM.from_pretrained(path_or_id, dtype=dtype)
        except (OSError, ValueError) as error:
            raise PEagleError(
                f"no target at {path_or_id!r}: {str(error).splitlines()[0]}",
                "a head is trained on its target's hidden states",
                "give a folder or hub id that transformers loads as a causal LM",
            ) from error
        self.path_or_id = path_or_id
        self.model: Any = model.eval().requires_grad_(False).to(device)
        self.config: Any = model.config.get_text_config()
        layers = self.config.num_hidden_layers
        self.aux_layer_ids = capture_points(aux_layer_ids, layers)
        if self.aux_layer_ids[-1] >= layers:
            raise PEagleError(
                f"aux layer id {layers} is the output of the last of {layers} layers",
                "transformers returns that one after the final norm, and heads are fed un-normed states",
                f"capture at {layers - 1} or before",
            )
        self.embedding: Tensor = model.get_input_embeddings().weight.detach()
        self.lm_head: Tensor = model.get_output_embeddings().weight.detach()
        norm = getattr(model.base_model, "norm", None)
        if norm is None or self.lm_head.shape[1] != self.config.hidden_size:
            raise PEagleError(
                f"{path_or_id}: {type(model).__name__} has no final norm called 'norm' before its LM head",
                "the head ends like its target: norm, then the target's LM head",
                "train for a LLaMA-style target",
            )
        self.norm: Tensor = norm.weight.detach()

    @torch.no_grad()
    def read(self, tokens: Tensor) -> States:
        """States of ``tokens`` [B, L], padded on the right (attention is causal, so padding changes nothing)."""
        out = self.model.base_model(input_ids=tokens, use_cache=False, output_hidden_states=True)
        aux = torch.cat([out.hidden_states[i] for i in self.aux_layer_ids], dim=-1)
        return States(aux.flatten(0, 1), out.last_hidden_state.flatten(0, 1))

    def sha256(self) -> str:
        """Hash of the weights, as loaded: a checkpoint belongs to one target."""
        digest = hashlib.sha256()
        for name, value in sorted(self.model.state_dict().items()):
            digest.update(name.encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    @property
    def public_name(self) -> Optional[str]:
        """The hub id; None for a local folder, whose path means nothing elsewhere."""
        return None if Path(self.path_or_id).expanduser().exists() else self.path_or_id
