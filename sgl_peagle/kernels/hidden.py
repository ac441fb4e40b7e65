"""Hidden states of the drafter rows: projected target hidden states, and h_shared in the mask rows."""

from __future__ import annotations

import torch


def window_hidden(
    projected: torch.Tensor, hidden_rows: torch.Tensor, shared_hidden: torch.Tensor
) -> torch.Tensor:
    """Gather projected rows to their window rows, then put h_shared into the mask rows.

    The order matters: masks are written last, so no gathered row can overwrite them.

    Args:
        projected: [N, D] target hidden states after ``fc``.
        hidden_rows: [R] int64 row of ``projected`` for each window row, ``SHARED_HIDDEN`` (-1) for a mask.
        shared_hidden: [D] h_shared after ``fc``.

    Returns:
        [R, D], the dtype of ``projected``.
    """
    if projected.is_cuda:
        from sgl_peagle.kernels import hidden_triton

        return hidden_triton.window_hidden(projected, hidden_rows, shared_hidden)
    return window_hidden_reference(projected, hidden_rows, shared_hidden)


def window_hidden_reference(
    projected: torch.Tensor, hidden_rows: torch.Tensor, shared_hidden: torch.Tensor
) -> torch.Tensor:
    """Plain torch; see :func:`window_hidden`."""
    rows = projected[hidden_rows.clamp(min=0)]
    return torch.where((hidden_rows < 0).unsqueeze(1), shared_hidden.to(rows.dtype), rows)
