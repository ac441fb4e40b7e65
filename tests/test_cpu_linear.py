"""Packed linear layers of the CPU platform."""

from __future__ import annotations

import contextlib

import pytest
import torch

from sgl_peagle.cpu import linear as packed


@pytest.mark.parametrize("rows", [(1,), (8,), (2, 3), (70,)])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_linear_equals_the_plain_one(rows: tuple[int, ...], bias: bool) -> None:
    weight, x = torch.nn.Parameter(torch.randn(300, 256), requires_grad=False), torch.randn(*rows, 256)
    b = torch.randn(300) if bias else None
    with torch.inference_mode():
        y = packed.linear(x, weight, b)
    assert hasattr(weight, "_peagle_packed") and y.shape == (*rows, 300)
    assert torch.allclose(y, torch.nn.functional.linear(x, weight, b), atol=1e-4)


def test_a_changed_weight_is_packed_again_once_told() -> None:
    weight, x = torch.nn.Parameter(torch.randn(300, 256), requires_grad=False), torch.randn(2, 256)
    packed.linear(x, weight)
    weight.data.copy_(torch.randn(300, 256))  # what weight loaders do; no version counter sees it
    packed.forget_packed_weights()
    assert torch.allclose(packed.linear(x, weight), x @ weight.T, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_weights_are_left_to_torch(dtype: torch.dtype) -> None:
    weight, x = torch.randn(300, 256).to(dtype), torch.randn(2, 256).to(dtype)
    assert torch.equal(packed.linear(x, weight), torch.nn.functional.linear(x, weight))
    assert not hasattr(weight, "_peagle_packed")


def test_every_way_to_change_weights_unpacks() -> None:
    from harness import in_fork

    def unpacking() -> dict[str, bool]:
        from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager as Manager

        from sgl_peagle import cpu

        cpu.install()
        ways = [name for name in vars(Manager) if name.startswith("update_weights_from_")]
        seen = {}
        for name in (*ways, "resume_memory_occupation", "check_weights"):
            before = packed._generation
            with contextlib.suppress(AttributeError):  # it fails at once, and unpacks all the same
                getattr(Manager, name)(None, None)
            seen[name] = packed._generation == before + 1
        return seen

    seen = in_fork(unpacking)
    assert len(seen) == 6 and all(seen.values()), seen
