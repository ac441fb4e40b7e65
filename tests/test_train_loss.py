"""The chunked loss against plain autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sgl_peagle.train.losses import argmax_rows, target_loss


@pytest.mark.parametrize("kind", ["kl", "ce"])
@pytest.mark.parametrize("chunk", [3, 7, 100])
def test_value_and_gradient(kind: str, chunk: int) -> None:
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(17, 8, generator=random).requires_grad_()
    teacher, lm_head = torch.randn(9, 8, generator=random), torch.randn(31, 8, generator=random)
    index, weight = torch.randint(9, (17,), generator=random), torch.rand(17, generator=random)
    loss, stats = target_loss(hidden, teacher, index, weight, lm_head, kind=kind, chunk=chunk)
    (2 * loss).backward()
    plain = hidden.detach().clone().requires_grad_()
    own, target = plain @ lm_head.T, (teacher @ lm_head.T)[index]
    if kind == "kl":
        each = F.kl_div(own.log_softmax(-1), target.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    else:
        each = F.cross_entropy(own, target.argmax(-1), reduction="none")
    want = (each * weight).sum()
    (2 * want).backward()
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(stats.loss, each.detach())
    torch.testing.assert_close(hidden.grad, plain.grad, atol=1e-6, rtol=1e-5)
    assert torch.equal(stats.hit, own.argmax(-1) == target.argmax(-1))
    assert torch.equal(argmax_rows(hidden, lm_head, chunk), own.argmax(-1))


def test_weights_that_depend_on_the_drafts() -> None:
    """Factors of the argmaxes act like weights that were known before."""
    random = torch.Generator().manual_seed(1)
    hidden = torch.randn(17, 8, generator=random).requires_grad_()
    teacher, lm_head = torch.randn(9, 8, generator=random), torch.randn(31, 8, generator=random)
    index, weight = torch.randint(9, (17,), generator=random), torch.rand(17, generator=random)
    factors = (hidden @ lm_head.T).argmax(-1) / 31
    loss, stats = target_loss(hidden, teacher, index, weight, lm_head, chunk=5, reweigh=lambda guesses: guesses / 31)
    loss.backward()
    plain = hidden.detach().clone().requires_grad_()
    want, unweighted = target_loss(plain, teacher, index, weight * factors, lm_head, chunk=5)
    want.backward()
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(hidden.grad, plain.grad)
    assert torch.equal(stats.loss, unweighted.loss) and len(set(factors.tolist())) > 5
