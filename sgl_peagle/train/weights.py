"""What is done to the weights beside their gradient: the optimiser's groups, their running mean, and putting others on."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator, Mapping, Optional

import torch
from torch import Tensor

from sgl_peagle.train.model import Head
from sgl_peagle.train.settings import Settings

Weights = Mapping[str, Tensor]


class Optimizers:
    """Several optimisers as one: each owns its own parameters.

    Attributes:
        parts: The optimisers.
    """

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self.parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of all parts; each group's ``peak`` is its learning rate before the schedule."""
        return [group for part in self.parts for group in part.param_groups]

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def state_dict(self) -> list[dict[str, Any]]:
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)


def make_optimizer(head: Head, settings: Settings) -> Optimizers:
    """The optimisers of a run over float32 weights.

    With ``muon``, the blocks' and ``fc``'s matrices are Muon's: their updates are orthogonalised, so its learning rate does
    not depend on the width of the head. Vectors and a trained embedding, whose rows are updated one by one, are AdamW's.

    Only matrices decay. Norms, ``mask_hidden`` and the MASK row are scales and inputs, and decay would pull the rows of a
    trained embedding that a batch does not touch away from the target's.
    """
    matrices, others, copied = [], [], []
    for name, parameter in head.named_parameters():
        if name == "embed_tokens.weight":  # it starts at a good point
            copied.append(parameter)
        else:
            (matrices if parameter.dim() == 2 else others).append(parameter)
    muon = settings.optimizer == "muon"
    decay = settings.weight_decay
    groups: list[dict[str, Any]] = [
        {"params": [] if muon else matrices, "peak": settings.lr, "weight_decay": decay},
        {"params": others, "peak": settings.lr},
        {"params": copied, "peak": settings.embedding_lr},
    ]
    fused = next(head.parameters()).device.type == "cuda"
    groups = [group for group in groups if group["params"]]
    parts: list[torch.optim.Optimizer] = []
    if muon:
        own = [{"params": matrices, "peak": settings.matrix_lr}]
        parts.append(torch.optim.Muon(own, lr=settings.matrix_lr, weight_decay=decay, momentum=0.95, nesterov=True))
    parts.append(torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=fused))
    return Optimizers(parts)


class Ema:
    """Exponential moving average of the weights.

    It forgets faster at first, ``min(decay, (1 + n) / (10 + n))`` after n steps: random weights must not linger.

    Attributes:
        weights: By parameter name.
    """

    def __init__(self, head: Head, decay: float) -> None:
        self.decay = decay
        self._parameters = dict(head.named_parameters())
        self.weights: dict[str, Tensor] = {name: p.detach().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self, steps: int) -> None:
        """Take in the weights after ``steps`` optimiser steps."""
        decay = min(self.decay, (1 + steps) / (10 + steps))
        own = [self._parameters[name] for name in self.weights]
        torch._foreach_lerp_(list(self.weights.values()), own, 1 - decay)

    @torch.no_grad()
    def restore(self, weights: Weights) -> None:
        """Go on from a checkpoint's."""
        for name, value in self.weights.items():
            value.copy_(weights[name])


@contextmanager
def wearing(head: Head, weights: Optional[Weights]) -> Iterator[None]:
    """The head with other weights for a while; None: with its own."""
    if weights is None:
        yield
        return
    parameters = dict(head.named_parameters())
    with torch.no_grad():
        own = {name: p.detach().clone() for name, p in parameters.items()}
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    try:
        yield
    finally:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(own[name])
