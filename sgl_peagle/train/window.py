"""What the log says about the steps since its last line."""

from __future__ import annotations

import time
from typing import Any, Callable

import numpy as np
import torch

from sgl_peagle.train.attention import to_device
from sgl_peagle.train.batches import Batch
from sgl_peagle.train.losses import RowStats
from sgl_peagle.train.rows import Ints


class Window:
    """Sums over the steps since the last log line, on the device."""

    def __init__(self, depths: int, device: torch.device) -> None:
        self.depths, self.device = depths, device
        self._clear()

    def _clear(self) -> None:
        self._sums = torch.zeros(2, self.depths, device=self.device)
        self._counts = np.zeros(self.depths)
        self._tokens, self._since, self._rows, self._steps = 0, time.monotonic(), 0, 0

    def add(self, depths: Ints, stats: RowStats, batch: Batch) -> None:
        """Count one step's rows (nothing is read back)."""
        index = to_device(depths, self.device)
        self._sums[0].index_add_(0, index, stats.loss)
        self._sums[1].index_add_(0, index, stats.hit.float())
        self._counts += np.bincount(depths, minlength=self.depths)
        self._tokens += batch.text_tokens
        self._rows += len(depths)
        self._steps += 1

    def pause(self, call: Callable[[], None]) -> None:
        """Leave the time of a call out of the throughput."""
        begin = time.monotonic()
        call()
        self._since += time.monotonic() - begin

    def take(self) -> dict[str, Any]:
        """Means since the last call: loss, its value and the accuracy by depth, and the throughput."""
        loss, hits = self._sums.double().cpu().numpy()
        counts = np.maximum(self._counts, 1)
        seconds = max(time.monotonic() - self._since, 1e-9)
        numbers = {
            "loss": round(float(loss.sum() / counts.sum()), 5),
            "loss_by_depth": (loss / counts).round(4).tolist(),
            "accuracy": (hits / counts).round(4).tolist(),
            "tokens_per_second": round(self._tokens / seconds, 1),
            "rows_per_step": round(self._rows / max(1, self._steps)),
            "step_ms": round(seconds * 1000 / max(1, self._steps), 1),
        }
        self._clear()
        return numbers
