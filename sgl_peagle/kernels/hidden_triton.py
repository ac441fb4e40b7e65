"""Kernel 2: gather projected hidden states and broadcast h_shared, in one pass over the output.

Each program writes one piece of one row, and reads either its source row or h_shared, never both: a row is written
once, so there is no order of scatter and overwrite to get wrong.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: Elements per program and its warps: 16 bytes per thread and load in half precision. ``bench/gpu_kernels.py``
#: compares a few choices.
BLOCK, NUM_WARPS = 1024, 4


# Rows of one table are not all aligned alike; without this an odd batch would compile a second variant mid-traffic.
@triton.jit(do_not_specialize_on_alignment=["hidden_rows"])
def _window_hidden_kernel(projected, hidden_rows, shared, out, D: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < D
    source = tl.load(hidden_rows + row).to(tl.int64)
    if source < 0:
        value = tl.load(shared + column, mask=inside, other=0.0).to(out.dtype.element_ty)
    else:
        value = tl.load(projected + source * D + column, mask=inside, other=0.0).to(out.dtype.element_ty)
    tl.store(out + row * D + column, value, mask=inside)


def window_hidden(
    projected: torch.Tensor,
    hidden_rows: torch.Tensor,
    shared_hidden: torch.Tensor,
    *,
    block: int = BLOCK,
    num_warps: int = NUM_WARPS,
) -> torch.Tensor:
    """See :func:`sgl_peagle.kernels.hidden.window_hidden`; ``block`` and ``num_warps`` shape a program."""
    width = projected.shape[1]
    out = torch.empty((hidden_rows.shape[0], width), dtype=projected.dtype, device=projected.device)
    block = min(block, triton.next_power_of_2(width))
    _window_hidden_kernel[(hidden_rows.shape[0], triton.cdiv(width, block))](
        projected.contiguous(),
        hidden_rows.contiguous(),
        shared_hidden.contiguous(),
        out,
        D=width,
        BLOCK=block,
        num_warps=num_warps,
    )
    return out
