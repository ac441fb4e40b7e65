"""float32 linear layers on a CPU through oneDNN with packed weights.

``torch.nn.functional.linear`` packs the weight anew in every call of two rows or more, so that verifying K + 1 tokens
costs several times a decode step although both read the same weights. oneDNN's own linear op takes a weight that was
packed once (what torch's inductor does when it freezes a model), and eight rows cost little more than one.
"""

from __future__ import annotations

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

#: Weights with fewer values are left alone: packing gains nothing there.
SMALLEST = 1 << 16

#: Rows that the packed layout is chosen for; other numbers work as well.
_ROWS_HINT = 8

_generation = 0


def forget_packed_weights() -> None:
    """Pack every weight again at its next use. Must be called whenever weights were changed in place."""
    global _generation
    _generation += 1


def linear(x: Tensor, weight: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    """``x @ weight.T + bias``, with the weight packed at its first use (a second copy of it in memory).

    Args:
        x: [..., in] float32.
        weight: [out, in] float32; the packed copy is kept as an attribute of this tensor.
        bias: [out] or None.

    Returns:
        [..., out] float32. Anything but plain float32 CPU tensors takes torch's own path.
    """
    if not _packable(x, weight):
        return F.linear(x, weight, bias)
    key = (_generation, weight.data_ptr(), weight.shape)
    kept = getattr(weight, "_peagle_packed", None)
    if kept is None or kept[0] != key:
        with torch.no_grad():
            kept = (key, torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS_HINT))
        weight._peagle_packed = kept  # type: ignore[attr-defined]
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return torch.ops.mkldnn._linear_pointwise(rows, kept[1], bias, "none", [], "").view(*x.shape[:-1], -1)


def _packable(x: Tensor, weight: Tensor) -> bool:
    return (
        torch.backends.mkldnn.is_available()
        and weight.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and weight.dim() == 2
        and weight.numel() >= SMALLEST
        and weight.is_contiguous()
        and x.numel() > 0
    )
