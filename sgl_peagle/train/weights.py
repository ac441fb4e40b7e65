"""What is done to the weights beside their gradient: the optimiser's groups, their running mean, and putting others on."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator, Mapping, Optional

import torch
from torch import Tensor

from sgl_peagle.train.model import Head

Weights = Mapping[str, Tensor]


def make_optimizer(head: Head, lr: float, embedding_lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW over float32 weights; each group's ``peak`` is its learning rate before the schedule.

    Only matrices decay. Norms, ``mask_hidden`` and the MASK row are scales and inputs, and decay would pull the rows of a
    trained embedding that a batch does not touch away from the target's.
    """
    matrices, others, copied = [], [], []
    for name, parameter in head.named_parameters():
        if name == "embed_tokens.weight":  # it starts at a good point
            copied.append(parameter)
        else:
            (matrices if parameter.dim() == 2 else others).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": matrices, "peak": lr, "weight_decay": weight_decay},
        {"params": others, "peak": lr},
        {"params": copied, "peak": embedding_lr},
    ]
    fused = next(head.parameters()).device.type == "cuda"
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=fused)


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
