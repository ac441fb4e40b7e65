"""Settings of torch that hold for every training and evaluation process."""

from __future__ import annotations

import torch


def prepare(device: torch.device) -> None:
    """Once, before anything is computed on ``device``.

    cuDNN's attention is switched off: torch prefers it to the flash and memory-efficient kernels for some shapes, and
    it fails outright where another cuDNN than the one that torch was built for comes first on the library path.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)
