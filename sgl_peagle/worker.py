"""The PEAGLE worker: SGLang's EAGLE worker around the parallel drafter."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.runtime_context import get_device, get_parallel, get_schedule, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import get_plan_stream

from sgl_peagle.draft_worker import PEagleDraftWorker

if TYPE_CHECKING:
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)


class PEagleWorker(EAGLEWorkerV2):
    """Prefill, verify, relay, radix cache and metrics are the parent's.

    ``__init__`` repeats the parent's short body, because that names its draft worker class directly; adaptive
    speculation and pipeline stages without a drafter are refused at start-up.
    """

    def __init__(self, server_args: "ServerArgs", gpu_id: int, nccl_port: int, target_worker: "TpModelWorker") -> None:
        BaseSpecWorker.__init__(self)
        spec = get_spec()
        self.server_args = server_args
        self.topk = spec.speculative_eagle_topk
        self.speculative_num_steps = spec.speculative_num_steps
        self.speculative_num_draft_tokens = spec.speculative_num_draft_tokens
        self.gpu_id = gpu_id
        self.device = get_device().device
        self._target_worker = target_worker
        self.page_size = get_schedule().page_size
        self.speculative_algorithm = SpeculativeAlgorithm.from_string(spec.speculative_algorithm)
        self.enable_dp_spec_prefill_coordination = False
        self._hosts_draft = get_parallel().pp_group.is_last_rank
        self.adaptive_controller = None
        self._draft_worker = PEagleDraftWorker(server_args, gpu_id, nccl_port, target_worker)
        self.num_new_pages_per_topk = torch.empty((), dtype=torch.int64, device=self.device)
        self.extend_lens = torch.empty((), dtype=torch.int64, device=self.device)
        self.plan_stream, self.plan_stream_ctx = get_plan_stream(self.device)

    def weight_update_runners(self) -> list[tuple[str, Any]]:
        """Runtime weight updates reach the target only: a head belongs to the weights it was trained on.

        SGLang offers them to the drafter, too, with the target's tensor names.
        """
        logger.warning("PEAGLE: the weight update changes the target only; the head keeps its weights")
        return []

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        """Count acceptance once SGLang has the numbers on the host (no synchronisation of our own)."""
        super().on_verify_complete_cpu(num_correct_drafts_per_req, batch_size)
        self._draft_worker.counters.verified(num_correct_drafts_per_req)
