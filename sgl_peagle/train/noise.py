"""Noise on the target's hidden states, against learning a small corpus by heart.

Every channel gets uniform noise of so many times its own scale. It is drawn per document from (seed, epoch, sample), once per
step and before the sequence is cut: neither a resumption, nor the partition, nor who shares the batch changes it. CPU and GPU
draw other numbers.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sgl_peagle.train.batches import Batch
from sgl_peagle.train.target import States

#: Keeps these draws apart from those of orders and rows.
_NOISE = 3


@torch.no_grad()
def with_noise(states: States, batch: Batch, amount: float, scale: Tensor, seed: int, epoch: int) -> States:
    """States with noise in ``aux``; ``last``, the teacher, is as it was.

    Args:
        states: The target's, of ``batch.tokens``.
        batch: Whose documents they are.
        amount: Half the width, in units of ``scale``.
        scale: [A*H], each channel's.
        seed, epoch: Of the run.
    """
    if amount == 0:
        return states
    aux = states.aux.view(*batch.tokens.shape, -1).clone()
    random = torch.Generator(device=aux.device)
    for i, sample in enumerate(batch.samples.tolist()):
        n = int(batch.positions[i])
        random.manual_seed(_mixed(seed, epoch, sample))
        drawn = torch.rand(n, aux.shape[-1], generator=random, device=aux.device, dtype=torch.float32)
        aux[i, :n] += ((2 * drawn - 1) * (amount * scale)).to(aux.dtype)
    return States(aux.flatten(0, 1), states.last)


def _mixed(seed: int, epoch: int, sample: int) -> int:
    state = np.random.SeedSequence([seed, _NOISE, epoch, sample]).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))
