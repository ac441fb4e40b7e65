"""One drafter forward per round: after prefill, and after every verify.

A round: ``draft`` hands last round's K tokens to the verify step; SGLang verifies; ``_draft_extend_for_decode``
runs accepted rows, bonus row and masks through the drafter and leaves the next K tokens in the relay.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Optional

import torch
from sglang.srt.environ import envs
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_parallel, get_spec, max_prefill_buffer_tokens
from sglang.srt.speculative.base_spec_worker import EagleDraftWorkerBase
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.eagle_utils import _eagle_prefill_tail_tokens
from sglang.srt.speculative.eagle_worker_common import build_eagle_verify_input, prepare_for_draft_extend
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
from sglang.srt.speculative.spec_utils import draft_pp_context, draft_tp_context
from sglang.srt.utils.common import get_available_gpu_memory, log_info_on_rank0

from sgl_peagle import layout
from sgl_peagle.backends import device_kind, drafter_backend
from sgl_peagle.counters import Counters
from sgl_peagle.errors import PEagleError
from sgl_peagle.graph import PEagleCudaGraphRunner, WindowBackendFactory, WindowTritonBackend
from sgl_peagle.kernels.expand import DrafterRows, expand_decode, expand_prefill
from sgl_peagle.model import PEagleDraftExtendInput, PEagleLlamaForCausalLM
from sgl_peagle.recorder import Recorder

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.utils import GenerationBatchResult

logger = logging.getLogger(__name__)


class PEagleDraftWorker(EagleDraftWorker):
    """EAGLE's draft worker with one parallel forward in place of K sequential ones."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.k: int = self.speculative_num_steps
        self.backend = drafter_backend(get_spec().speculative_draft_attention_backend, device_kind(self.device))
        self.mask_token_id = self.model.head.config.mask_token_id
        exports = self.server_args.enable_metrics and get_parallel().tp_rank == 0
        name = self.server_args.served_model_name or self.server_args.model_path
        self.counters = Counters(self.k, {"model_name": name} if exports else None)
        self.recorder = Recorder.from_environment()

    @property
    def model(self) -> PEagleLlamaForCausalLM:
        """The drafter model."""
        return self.draft_runner.model

    @property
    def _runners(self) -> tuple[Any, Any]:
        return self.draft_runner, self.target_worker.model_runner

    # -- start-up -----------------------------------------------------------------------------------------

    def init_token_map(self) -> None:
        """The head's own map is applied in the model, so the host has none to apply."""
        self.hot_token_id = None

    def init_lm_head(self) -> None:
        """Keep the head's embedding and LM head (they were trained); share the target's only where it has none."""
        model = self.model
        if not (model.head.has("embed_tokens.weight") and model.head.has("lm_head.weight")):
            self._check_shareable()
            model.attach_target(*self._resolve_shared_embed_and_head())
        if model.head.has("d2t") and not model.weights_loaded:
            raise PEagleError(
                f"{model.head.folder}: d2t was not loaded",
                "this load format fills the parameters without reading the head, so every draft would be mapped wrongly",
                "pass --speculative-draft-load-format auto",
            )
        if model.hot_token_id is not None:
            model.hot_token_id = model.hot_token_id.to(self.device)
        model.project_shared_hidden()

    def _check_shareable(self) -> None:
        """The target's embedding and LM head can stand in for the head's only where they are plain matrices."""
        target = self.target_worker.model_runner.model
        weight = getattr(getattr(target, "lm_head", None), "weight", None)
        if weight is None or weight.dtype.itemsize < 2:
            raise PEagleError(
                f"{self.model.head.folder} brings no embedding or no LM head, and the target's LM head is quantized",
                "the drafter computes with plain weights",
                "use a head that brings both, or a target whose LM head is not quantized",
            )

    def init_attention_backend(self) -> None:
        """Only the extend backend: there is no sequence of draft decode steps."""
        factory = WindowBackendFactory(self.draft_runner, self.k)
        self.draft_attn_backend = None
        self.draft_runner.draft_attn_backend = None
        self.draft_extend_attn_backend = factory.create_draft_extend_backend()
        if self.draft_extend_attn_backend is not None:
            self.draft_runner.attn_backend = self.draft_extend_attn_backend
        translator = self.draft_runner.kv_index_translator
        if translator.is_translating:
            translator.bind_and_verify_backends([self.draft_extend_attn_backend])
        self._check_captured_layers()

    def _check_captured_layers(self) -> None:
        """The target must capture exactly the head's layers; a wrong one only shows as bad drafts."""
        from sgl_peagle.aux_layers import capture_points

        config = self.target_worker.model_config
        expected = list(capture_points(self.model.head.config.aux_layer_ids, config.hf_text_config.num_hidden_layers))
        inner = getattr(self.target_worker.model_runner.model, "model", None)
        captured = getattr(inner, "layers_to_capture", None)
        if captured is not None and list(captured) != expected:
            raise PEagleError(
                f"the target captures the inputs of layers {list(captured)}, the head was trained on {expected}",
                "SGLang's model class translates layer ids differently from what this release knows",
                "report the target's architecture; serve it without speculation until then",
            )

    def init_cuda_graphs(self) -> None:
        """No draft-prefill graph: the prefill batch carries ragged mask rows."""
        with draft_pp_context(), draft_tp_context(self.parallel_layout):
            EagleDraftWorkerBase.init_cuda_graphs(self)
        if (canary := self.draft_runner.canary_manager) is not None:
            canary.mark_init_finished()

    def _capture_cuda_graphs(self) -> None:
        """One graph per batch size for the decode window, where the drafter's backend can replay it."""
        self.cuda_graph_runner = None  # there are no draft decode steps
        self.cuda_graph_runner_for_draft_extend = None
        if not str(self.device).startswith("cuda") or check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED):
            return
        if envs.SGLANG_DISABLE_DRAFT_EXTEND_CUDA_GRAPH.get():
            return
        if not (self.backend.graphs and isinstance(self.draft_extend_attn_backend, WindowTritonBackend)):
            logger.warning(
                "PEAGLE drafter runs without CUDA graphs: drafter attention backend %s is not captured by this "
                "release (%s is)", self.backend.name, "triton",
            )  # fmt: skip
            return
        before, start = get_available_gpu_memory(self.device, self.gpu_id), time.perf_counter()
        log_info_on_rank0(
            logger,
            f"Capture PEAGLE drafter CUDA graph begin. num_tokens_per_req={layout.window_width(self.k)}, "
            f"avail mem={before:.2f} GB",
        )
        self.cuda_graph_runner_for_draft_extend = PEagleCudaGraphRunner(self)
        after, seconds = get_available_gpu_memory(self.device, self.gpu_id), time.perf_counter() - start
        for usage, value in (
            (self._specialized_graph_memory_usage, before - after),
            (self._specialized_graph_time_usage, seconds),
        ):
            usage["draft_extend"] = usage.get("draft_extend", 0.0) + value
        log_info_on_rank0(
            logger,
            f"Capture PEAGLE drafter CUDA graph end. elapsed={seconds:.2f} s, mem usage={before - after:.2f} GB, "
            f"avail mem={after:.2f} GB, bs={self.cuda_graph_runner_for_draft_extend.capture_bs}.",
        )

    # -- a round ------------------------------------------------------------------------------------------

    def draft(self, batch: "ScheduleBatch", *, with_topology: bool = False) -> Any:
        """The verify input of this round: the bonus token and the K tokens drafted at the end of the last one.

        Raises:
            PEagleError: ``with_topology`` (pipeline parallelism) was asked for.
        """
        if with_topology:
            raise PEagleError("drafting with topology", "it is for pipeline parallelism", "serve with --pp-size 1")
        draft_input: EagleDraftInput = batch.spec_info
        idle = batch.forward_mode.is_idle()
        tokens = None if idle else draft_input.topk_index
        parents, scores = (None, None) if idle else self._chain(tokens.shape[0])
        return build_eagle_verify_input(
            batch,
            draft_input,
            parents,
            scores,
            tokens,
            None,
            target_worker=self.target_worker,
            topk=1,
            num_steps=self.k,
            num_draft_tokens=self.speculative_num_draft_tokens,
            tree_mask_mode=self.tree_mask_mode,
            device=self.device,
        )

    def _chain(self, bs: int) -> tuple[torch.Tensor, torch.Tensor]:
        """SGLang's constant description of a chain of K drafts, for ``bs`` requests."""
        if bs > self._topk1_parents_prealloc.shape[0]:
            parents, scores = self._topk1_parents_prealloc, self._topk1_score_indices_prealloc
            return parents[:1].repeat(bs, 1), scores[:1].repeat(bs, 1)
        return self._topk1_parents_prealloc[:bs], self._topk1_score_indices_prealloc[:bs]

    def _draft_extend_for_prefill(
        self,
        batch: "ScheduleBatch",
        target_hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
        mm_input_embeds: Optional[torch.Tensor] = None,
        kv_loc_plan: Any = None,
    ) -> EagleDraftInput:
        """Fill the drafter's KV of the prompt rows and draft the first K tokens.

        ``kv_loc_plan`` is the target's; the drafter's rows are more, so they plan their own.
        """
        if batch.forward_mode.is_idle():
            empty = torch.empty((0, self.k), dtype=torch.int64, device=self.device)
            return self._next_draft_input(empty, next_token_ids)
        finishing = [req is not batch.chunked_req for req in batch.reqs]
        masks = [layout.prefill_masks(self.k, done) for done in finishing]
        drafts_with_masks = self.backend.reads_window_densely and self._fits_eager_buffers(batch, sum(masks))
        if not drafts_with_masks:
            masks = [0] * len(masks)
        rows = expand_prefill(
            batch.input_ids,
            _eagle_prefill_tail_tokens(batch, next_token_ids),
            batch.out_cache_loc,
            extend_lens=batch.extend_lens,
            prefix_lens=batch.prefix_lens,
            num_masks=masks,
            k=self.k,
            mask_token_id=self.mask_token_id,
        )
        forward_batch = self._prefill_forward_batch(batch, rows, target_hidden_states, masks)
        tokens = self._run(forward_batch, len(masks))
        if not drafts_with_masks:
            # Only the bonus row was sampled. The MASK id fills the chain: the target never chooses it.
            tokens[:, 1:] = self.mask_token_id
            self.counters.skipped(sum(finishing))
        self.recorder.prefill(batch, next_token_ids, tokens, finishing, drafts_with_masks, self._runners)
        return self._next_draft_input(tokens, next_token_ids)

    def _fits_eager_buffers(self, batch: "ScheduleBatch", num_masks: int) -> bool:
        """Whether SGLang's eager input buffers hold the prompt rows and the masks behind them."""
        capacity = max(self.draft_runner.max_total_num_tokens, max_prefill_buffer_tokens())
        return batch.extend_num_tokens + num_masks <= capacity

    def _prefill_forward_batch(
        self, batch: "ScheduleBatch", rows: DrafterRows, target_hidden_states: torch.Tensor, masks: list[int]
    ) -> ForwardBatch:
        """A draft-extend batch over prompt rows and masks. SGLang undoes the changes to ``batch`` afterwards."""
        batch.input_ids = rows.input_ids
        batch.out_cache_loc = rows.cache_locs
        batch.extend_lens = [n + m for n, m in zip(batch.extend_lens, masks)]
        batch.extend_num_tokens = sum(batch.extend_lens)
        batch.forward_mode = ForwardMode.DRAFT_EXTEND_V2
        batch.spec_info = PEagleDraftExtendInput(
            hidden_states=target_hidden_states,
            hidden_rows=rows.hidden_rows,
            select_index=rows.sampled_rows,
            num_tokens_per_req=1,
            num_tokens_for_logprob_per_req=1,
        )
        forward_batch = ForwardBatch.init_new(
            batch, self.draft_runner, capture_hidden_mode=CaptureHiddenMode.NULL, return_hidden_states_before_norm=False
        )
        forward_batch.return_logprob = False
        # A request may replace the target's input embeddings; the drafter sees its token ids, at other rows.
        forward_batch.input_embeds = forward_batch.replace_embeds = forward_batch.replace_positions = None
        if any(masks):
            forward_batch.seq_lens = forward_batch.extend_prefix_lens + forward_batch.extend_seq_lens
            forward_batch.seq_lens = forward_batch.seq_lens.to(batch.seq_lens.dtype)
            if forward_batch.seq_lens_cpu is not None:
                forward_batch.seq_lens_cpu = forward_batch.seq_lens_cpu + torch.tensor(masks)
                forward_batch.seq_lens_sum = int(forward_batch.seq_lens_cpu.sum())
        return forward_batch

    def _draft_extend_for_decode(
        self, batch: "ScheduleBatch", batch_result: "GenerationBatchResult", *, kv_loc_plan: Any = None
    ) -> None:
        """Run the 2K-row window of every request and leave the next K drafts in ``batch_result``.

        ``batch.seq_lens`` is still the length before the verify. ``kv_loc_plan`` covers the verify rows only, so
        the window plans its own slots.
        """
        next_input: EagleDraftInput = batch_result.next_draft_input
        bs = batch.seq_lens.shape[0]
        if batch.forward_mode.is_idle() or bs == 0:
            self._fill(next_input, torch.empty((0, self.k), dtype=torch.int64, device=self.device))
            return
        rows = expand_decode(
            batch_result.next_token_ids,
            batch_result.accept_lens,
            batch.seq_lens,
            batch.req_pool_indices,
            self.req_to_token_pool.req_to_token,
            k=self.k,
            mask_token_id=self.mask_token_id,
            private_mask_slots=not self.backend.reads_window_densely,
        )
        batch.out_cache_loc = rows.cache_locs
        spec_info = PEagleDraftExtendInput(
            hidden_states=batch_result.logits_output.hidden_states,
            hidden_rows=rows.hidden_rows,
            select_index=rows.sampled_rows,
            num_correct_drafts=batch_result.accept_lens - 1,
            num_accept_tokens=batch_result.accept_lens,
            num_tokens_per_req=layout.window_width(self.k),
            num_tokens_for_logprob_per_req=self.k,
        )
        forward_batch = prepare_for_draft_extend(
            spec_info,
            batch,
            rows.input_ids,
            layout.window_width(self.k),
            self.draft_runner,
            self.cuda_graph_runner_for_draft_extend,
            return_hidden_states_before_norm=False,
            kv_loc_plan=None,
        )
        graph = self.cuda_graph_runner_for_draft_extend
        replays = graph is not None and graph.can_run_graph(forward_batch)
        tokens = graph.execute(forward_batch) if replays else self._run(forward_batch, bs)
        self.recorder.decode(batch, batch_result, tokens, self._runners, graph=replays)
        self._fill(next_input, tokens)

    def _run(self, forward_batch: ForwardBatch, bs: int) -> torch.Tensor:
        """One eager drafter forward; [bs, k] int64 target ids."""
        return self.draft_runner.forward(forward_batch).logits_output.next_token_logits.view(bs, self.k)

    def _next_draft_input(self, tokens: torch.Tensor, bonus_tokens: torch.Tensor) -> EagleDraftInput:
        draft_input = EagleDraftInput(
            bonus_tokens=bonus_tokens, num_tokens_per_req=1, num_tokens_for_logprob_per_req=1
        )
        self._fill(draft_input, tokens)
        return draft_input

    def _fill(self, draft_input: EagleDraftInput, tokens: torch.Tensor) -> None:
        """Put K columns into the relay. SGLang sizes its buffers from the first payload, so every one has K."""
        draft_input.topk_index = tokens
        draft_input.topk_p = torch.ones_like(tokens, dtype=torch.float32)
        draft_input.hidden_states = None
