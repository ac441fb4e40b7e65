"""SGLang's engine with a scheduler that is fast for many short requests of a small model.

Three things limit a small target, none of them its own arithmetic; each has its remedy here or in the engine's options:

* A batch that mixes greedy and sampled requests counts as "needs top-k" (temperature 0 is top-k 1), and SGLang then
  sorts the whole vocabulary for every request. :func:`_sampler` takes the argmax of ``logits / T + Gumbel noise``,
  without noise in greedy rows: the same distributions without a sort.
* After each step, the scheduler's Python handles every request by itself. :func:`_decoded` gives a request that goes on
  its token and nothing else; only a request that ends takes SGLang's way.
* Requests end one by one, so that nearly every step is followed by the prefill of a few new ones, which costs as much
  as the step. That is SGLang's option ``min_free_slots_delay``.

Everything is installed in the scheduler's process only, and only for requests like ours: ids in, ids out, temperature,
stop ids. Nothing of a serving engine is touched.
"""

from __future__ import annotations

import os
from typing import Any

from sgl_peagle.errors import PEagleError

#: Environment variable that, if not empty, leaves SGLang's scheduler as it is.
STOCK = "SGL_PEAGLE_STOCK_ENGINE"


def start_engine(**options: Any) -> Any:
    """``sglang.Engine`` whose scheduler runs :func:`run_scheduler`; SGLang's own if :data:`STOCK` is set."""
    # Requests that are not streamed would still be reported every 50 tokens.
    os.environ.setdefault("SGLANG_FORCE_STREAM_INTERVAL", "1000000")
    from sglang.srt.entrypoints.engine import Engine

    if os.environ.get(STOCK):
        return Engine(**options)

    class OfflineEngine(Engine):  # type: ignore[misc]
        run_scheduler_process_func = staticmethod(run_scheduler)

    return OfflineEngine(**options)


def run_scheduler(*arguments: Any, **named: Any) -> Any:
    """The scheduler's process: install, then SGLang's own function."""
    install()
    from sglang.srt.managers.scheduler import run_scheduler_process

    return run_scheduler_process(*arguments, **named)


def install() -> None:
    """Put the sampler and the result handling in place of SGLang's in this process.

    Raises:
        PEagleError: This SGLang has no such places.
    """
    try:
        from sglang.srt.layers.sampler import Sampler, register_sampler_backend
        from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor

        original = SchedulerBatchResultProcessor.process_batch_result_decode
    except (ImportError, AttributeError) as error:
        raise PEagleError(
            f"this SGLang cannot be used for making data: {error}",
            "its scheduler is sped up in places that this release does not have",
            "see `sgl-peagle doctor` for the supported release, or use --backend transformers",
        ) from error
    register_sampler_backend("pytorch", lambda: _sampler(Sampler)())

    def decoded(self: Any, batch: Any, result: Any) -> None:
        if _is_plain(batch, result):
            _decoded(self, batch, result)
        else:
            original(self, batch, result)

    SchedulerBatchResultProcessor.process_batch_result_decode = decoded


def sample(logits: Any, temperatures: Any, top_ks: Any) -> Any:
    """One id per row: the argmax where ``top_ks`` is 1, else a draw from softmax(logits / temperature).

    Args:
        logits: Float tensor [rows, vocabulary], overwritten.
        temperatures: [rows, 1]; 1 in greedy rows.
        top_ks: [rows].
    """
    import torch

    # -log of an exponential variable is a Gumbel one; argmax(logits + Gumbel noise) is a draw from their softmax.
    noise = torch.empty_like(logits, dtype=torch.float32).exponential_()
    noise = noise.clamp_min_(torch.finfo(torch.float32).tiny).log_()
    sampled = (top_ks > 1).to(torch.float32).view(-1, 1)
    scores = logits.float().div_(temperatures).addcmul_(noise, sampled, value=-1.0)
    return scores.argmax(dim=-1).to(torch.int32)


def _sampler(base: type) -> type:
    """A subclass of SGLang's sampler that does not sort where no top-p, min-p or real top-k is asked for."""

    class RowSampler(base):  # type: ignore[misc, valid-type]
        def forward(
            self, logits_output: Any, sampling_info: Any, return_logprob: bool, top_logprobs_nums: Any,
            token_ids_logprobs: Any, positions: Any, **named: Any,
        ) -> Any:  # fmt: skip
            info = sampling_info
            other = info.need_top_p_sampling or info.need_min_p_sampling or info.sampling_seed is not None
            if info.is_all_greedy or return_logprob or other or info.sampling_mask_batch_indices is not None:
                return super().forward(
                    logits_output, info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions, **named
                )
            logits = self._preprocess_logits(logits_output.next_token_logits, info)
            ids = sample(logits, info.temperatures, info.top_ks)
            self._sync_token_ids_across_tp(ids, info)
            return ids

    return RowSampler


def _is_plain(batch: Any, result: Any) -> bool:
    """Whether nothing but token ids is to be kept of a step."""
    return (
        batch.spec_algorithm.is_none()
        and not batch.return_logprob
        and not batch.has_grammar
        and not getattr(batch, "return_hidden_states", False)
        and result.auxiliary_host_output is None
        and result.routed_experts_output is None
        and result.indexer_topk_output is None
        and batch.mamba_track_mask_cpu is None
    )


def _decoded(self: Any, batch: Any, result: Any) -> None:
    """``process_batch_result_decode`` for plain batches: the same outcome, with little work per request that goes on."""
    if result.copy_done is not None:
        result.copy_done.synchronize()
    ids = result.next_token_ids
    ids = ids if isinstance(ids, list) else ids.tolist()
    self.metrics_reporter.num_generated_tokens += len(ids)
    self.token_to_kv_pool_allocator.free_group_begin()
    ended = []
    for i, (req, token) in enumerate(zip(batch.reqs, ids)):
        if req.finished_reason is not None or req.is_retracted:
            continue  # it ended a step ago, when this step was under way already
        output, sampling = req.output_ids, req.sampling_params
        output.append(token)
        stops = sampling.stop_token_ids
        if (
            len(output) < sampling.max_new_tokens
            and not (stops and token in stops)
            and not (req.eos_token_ids and token in req.eos_token_ids)
            and req.to_finish is None
            and token >= 0
            and (req.vocab_size is None or token < req.vocab_size)
        ):
            continue
        req.update_finish_state(1)
        self._handle_finish_state_updated_req(req, batch, result, i, result.logits_output)
        ended.append(req)
    if ended:
        self.output_streamer.stream_output(ended, False)
    self.token_to_kv_pool_allocator.free_group_end()
    self.metrics_reporter.forward_ct_decode = (self.metrics_reporter.forward_ct_decode + 1) % (1 << 30)
    self.metrics_reporter.report_decode_stats(
        result.can_run_cuda_graph, running_batch=batch, num_generated_tokens=len(ids)
    )
