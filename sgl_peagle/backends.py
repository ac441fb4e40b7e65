"""Which attention backends can run the drafter, and what each one asks of the mask rows' KV slots.

| drafter backend | window K/V come from | mask slots | prefill drafts | CUDA graph | K: allocation, smallest page |
| --- | --- | --- | --- | --- | --- |
| ``triton`` | the dense tensors | padding slot | yes | yes | 1–7: K+1, 1; from 8: K+1, 2 |
| ``torch_native`` (CPU reference) | the dense tensors | padding slot | yes | no | same as triton |
| ``fa3`` | the KV cache | private | first round only (fallback) | no | 1–5: ⌈(3K+1)/2⌉, 1; from 6: same, 2 |
| others | – | – | – | – | refused by name |

The last column is computed by :func:`sgl_peagle.layout.slot_plan`; a test compares the two.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from sgl_peagle.errors import PEagleError
from sgl_peagle.layout import SlotPlan, slot_plan

#: Test hook: ``cache`` treats every backend as one that reads its window back from the KV cache, and makes the CPU
#: reference backend do so. Private mask slots and the prefill fallback can thus be tested without a GPU.
WINDOW_ENV = "SGL_PEAGLE_WINDOW"


@dataclass(frozen=True)
class DrafterBackend:
    """How one SGLang attention backend treats a drafter window.

    Attributes:
        name: SGLang's name of the backend.
        reads_window_densely: The window's own K/V are taken from the call's tensors, only the prefix from the
            cache. Then mask rows need no slots and masks can stand behind a prompt, where no slots exist.
        graphs: The decode window is captured in CUDA graphs. fa3's captured page table ends at the context length,
            while a window may reach 2K rows past it, so fa3 stays eager.
    """

    name: str
    reads_window_densely: bool
    graphs: bool = False

    def plan(self, k: int) -> SlotPlan:
        """Allocation and page size for ``k`` drafts on this backend."""
        return slot_plan(k, private_mask_slots=not self.reads_window_densely)


_BACKENDS = {
    backend.name: backend
    for backend in (
        DrafterBackend("triton", reads_window_densely=True, graphs=True),
        DrafterBackend("torch_native", reads_window_densely=True),
        DrafterBackend("fa3", reads_window_densely=False),
    )
}


def device_kind(device: object) -> str:
    """``cuda`` or ``cpu`` of a device as SGLang or torch names it (``cuda:0``)."""
    return str(device).split(":")[0]


def drafter_backend(name: str, device: str) -> DrafterBackend:
    """The capabilities of drafter backend ``name`` on ``device``.

    Raises:
        PEagleError: The backend is not known to run a P-EAGLE window.
    """
    supported = ["torch_native"] if device == "cpu" else ["triton", "fa3"]
    if name not in supported:
        raise PEagleError(
            f"drafter attention backend {name!r} on device {device!r}",
            "a drafter window holds mask rows, and it has not been shown how this backend reads their K/V",
            f"pass --speculative-draft-attention-backend {supported[0]} (supported here: {', '.join(supported)})",
        )
    if window_from_cache():
        return replace(_BACKENDS[name], reads_window_densely=False)
    return _BACKENDS[name]


def window_from_cache() -> bool:
    """Whether the test hook ``SGL_PEAGLE_WINDOW=cache`` is set."""
    return os.environ.get(WINDOW_ENV) == "cache"


def default_drafter_backend(device: str) -> str:
    """The drafter backend chosen when the user names none."""
    return "torch_native" if device == "cpu" else "triton"
