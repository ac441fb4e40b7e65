"""The loss against the target's distribution over the full vocabulary, in chunks of rows.

Logits of all rows of a batch would be tens of gigabytes. Because the LM head is frozen, a chunk's gradient with respect to
the rows' hidden states is all that is needed of its logits: it is computed beside the loss, and the logits are dropped.
The teacher's logits are recomputed for each row: gathering them from the rows of other depths that share a position
would move more bytes than the product costs.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

#: ``kl``: KL(target || head); ``ce``: cross entropy with the target's argmax.
KINDS = ("kl", "ce")

#: Rows per chunk: a float32 copy of 4096 rows of 49k logits has 0.8 GB.
CHUNK = 4096


#: From the argmaxes of all rows [M] int64 to factors of their weights [M] float32.
Reweigh = Callable[[Tensor], Tensor]


class RowStats(NamedTuple):
    """Per row, detached: the unweighted loss [M] float32, and whether the argmaxes of head and target agree [M] bool."""

    loss: Tensor
    hit: Tensor


def chunk_loss(
    hidden: Tensor, teacher: Tensor, weight: Tensor, lm_head: Tensor, kind: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, argmaxes and gradient of one chunk.

    Args:
        hidden: [C, D], final-normed.
        teacher: [C, H], the target's final-normed hidden states.
        weight: [C] float32, already divided by the batch's total.
        lm_head: [V, D], the target's, in the dtype of ``hidden``.
        kind: One of :data:`KINDS`.

    Returns:
        Loss [C] float32, argmax [C] int64 of head and of target, d(sum of weight * loss) / d(hidden) [C, D] in the dtype of
        ``hidden``.
    """
    own, target = F.linear(hidden, lm_head), F.linear(teacher, lm_head)
    guess, best = own.argmax(-1), target.argmax(-1)
    own = F.log_softmax(own, dim=-1, dtype=torch.float32)
    if kind == "ce":
        loss = F.nll_loss(own, best, reduction="none")
        gradient = own.exp()
        gradient.scatter_add_(1, best[:, None], torch.full_like(best[:, None], -1, dtype=torch.float32))
    else:
        target = F.log_softmax(target, dim=-1, dtype=torch.float32)
        share = target.exp()
        loss = torch.linalg.vecdot(share, target - own)
        gradient = own.exp() - share
    return loss, guess, best, (gradient * weight[:, None]).to(hidden.dtype) @ lm_head


@functools.lru_cache(maxsize=1)
def _compiled() -> Callable[..., Any]:
    return torch.compile(chunk_loss)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, teacher: Tensor, index: Tensor, weight: Tensor, lm_head: Tensor, kind: str,
        chunk: int, function: Callable[..., Any], reweigh: Optional[Reweigh],
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        rows = len(hidden)
        losses = torch.empty(rows, dtype=torch.float32, device=hidden.device)
        guesses, best = (torch.empty(rows, dtype=torch.int64, device=hidden.device) for _ in range(2))
        gradient = torch.empty_like(hidden)
        for begin in range(0, rows, chunk):
            part = slice(begin, begin + chunk)
            result = function(hidden[part], teacher[index[part]].to(hidden.dtype), weight[part], lm_head, kind)
            losses[part], guesses[part], best[part], gradient[part] = result
        if reweigh is not None:  # a row's gradient is linear in its weight, so no logits are needed again
            factors = reweigh(guesses)
            gradient *= factors[:, None].to(gradient.dtype)
            weight = weight * factors
        hits = guesses == best
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(losses, hits)
        return (losses * weight).sum(), losses, hits

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
        (gradient,) = ctx.saved_tensors
        return (gradient * grad.to(gradient.dtype), *(None,) * 8)


def target_loss(
    hidden: Tensor,
    teacher: Tensor,
    index: Tensor,
    weight: Tensor,
    lm_head: Tensor,
    *,
    kind: str = "kl",
    chunk: int = CHUNK,
    compiled: bool = False,
    reweigh: Optional[Reweigh] = None,
) -> tuple[Tensor, RowStats]:
    """Weighted sum of the rows' losses.

    Args:
        hidden: [M, D], final-normed (carries the gradient).
        teacher: [N, H], the target's final-normed hidden states of all positions.
        index: [M] int64, each row's teacher.
        weight: [M] float32. Divided by the weight of the *whole* batch before, or the implicit weights of the depths and
            segments change.
        lm_head: [V, D], frozen.
        kind: One of :data:`KINDS`.
        chunk: Rows whose logits exist at once.
        compiled: Fuse the passes over a chunk's logits with torch.compile.
        reweigh: Factors of the weights that depend on what the head would draft.

    Returns:
        The loss, a float32 scalar, and what is known of each row.
    """
    function = _compiled() if compiled else chunk_loss
    loss, each, hit = _ChunkedLoss.apply(hidden, teacher, index, weight, lm_head, kind, chunk, function, reweigh)
    return loss, RowStats(each, hit)


@torch.no_grad()
def argmax_rows(hidden: Tensor, lm_head: Tensor, chunk: int = 2 * CHUNK) -> Tensor:
    """Argmax of the logits of final-normed rows [M, D], [M] int64."""
    parts = [F.linear(part, lm_head).argmax(-1) for part in hidden.split(chunk)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=hidden.device)
