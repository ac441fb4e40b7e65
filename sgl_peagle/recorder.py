"""A debug hook: write down what the drafter did, so that a test can compare it with the oracle.

With ``SGL_PEAGLE_RECORD=FOLDER`` every scheduler process appends to ``FOLDER/rounds-<pid>.jsonl`` one object per
request and drafter forward. It reads tensors back to the host in every round; it is for tests, not for serving.

    {"rid", "kind": "prefill" | "chunk" | "decode", "tokens": committed length n+1 with the bonus token,
     "bonus", "accepted": [token ids of this round, bonus last], "drafts": [k ids], "fallback": bool,
     "prefix": cached prompt tokens and "free": free KV slots (prefill only),
     "batch": requests in the forward and "graph": drafted by a CUDA graph replay (decode only)}

``SGL_PEAGLE_RECORD_KV=1`` adds the drafter's KV of the committed positions to ``FOLDER/kv-<pid>-<n>.pt``, named by
the object's ``kv`` field: a list over the drafter's layers, then the target's, of (k, v), each [positions, kv heads,
head_dim], float32.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, Sequence

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.utils import GenerationBatchResult

RECORD_ENV = "SGL_PEAGLE_RECORD"
RECORD_KV_ENV = "SGL_PEAGLE_RECORD_KV"


class Recorder:
    """Writes rounds to a folder; without a folder every call returns at once."""

    def __init__(self, folder: Optional[Path], with_kv: bool = False) -> None:
        self._with_kv, self._count = with_kv, 0
        self._folder = folder
        self._file = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / f"rounds-{os.getpid()}.jsonl").open("a", encoding="utf-8")

    @classmethod
    def from_environment(cls) -> "Recorder":
        """The recorder that ``SGL_PEAGLE_RECORD`` asks for."""
        folder = os.environ.get(RECORD_ENV)
        return cls(Path(folder) if folder else None, os.environ.get(RECORD_KV_ENV) == "1")

    def prefill(
        self,
        batch: "ScheduleBatch",
        bonus: "torch.Tensor",
        drafts: "torch.Tensor",
        finishing: list[bool],
        with_masks: bool,
        runners: Sequence[Any],
    ) -> None:
        """One prefill batch. bonus [bs], drafts [bs, k]; ``runners``: the drafter's and the target's model runner."""
        if self._file is None:
            return
        for i, (req, done) in enumerate(zip(batch.reqs, finishing)):
            length = int(batch.seq_lens[i])
            entry = {"rid": req.rid, "kind": "prefill" if done else "chunk", "tokens": length + 1}
            entry |= {"bonus": int(bonus[i]), "accepted": [int(bonus[i])], "drafts": drafts[i].tolist()}
            entry |= {"fallback": done and not with_masks, "prefix": int(batch.prefix_lens[i])}
            entry["free"] = batch.token_to_kv_pool_allocator.available_size()
            self._write(entry, batch, i, length, runners)

    def decode(
        self,
        batch: "ScheduleBatch",
        result: "GenerationBatchResult",
        drafts: "torch.Tensor",
        runners: Sequence[Any],
        *,
        graph: bool = False,
    ) -> None:
        """One decode round: the accepted tokens, and the drafts [bs, k] for the next round."""
        if self._file is None:
            return
        width = result.next_token_ids.shape[0] // len(batch.reqs)
        predicted = result.next_token_ids.view(-1, width)
        for i, req in enumerate(batch.reqs):
            a, before = int(result.accept_lens[i]), int(batch.seq_lens[i])
            accepted = predicted[i, :a].tolist()
            entry = {"rid": req.rid, "kind": "decode", "tokens": before + a + 1, "bonus": accepted[-1]}
            entry |= {"accepted": accepted, "drafts": drafts[i].tolist(), "fallback": False}
            entry |= {"batch": len(batch.reqs), "graph": graph}
            self._write(entry, batch, i, before + a, runners)

    def _write(
        self, entry: dict[str, Any], batch: "ScheduleBatch", i: int, length: int, runners: Sequence[Any]
    ) -> None:
        if self._with_kv:
            import torch

            self._count += 1
            entry["kv"] = f"kv-{os.getpid()}-{self._count}.pt"
            row = batch.req_to_token_pool.req_to_token[int(batch.req_pool_indices[i]), :length].long()
            kv = []
            for runner in runners:
                pool = runner.token_to_kv_pool
                for layer in range(pool.start_layer, pool.start_layer + pool.layer_num):
                    keys, values = pool.get_key_buffer(layer)[row], pool.get_value_buffer(layer)[row]
                    kv.append((keys.float().cpu(), values.float().cpu()))
            torch.save(kv, self._folder / entry["kv"])
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()
