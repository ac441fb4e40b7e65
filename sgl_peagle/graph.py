"""One CUDA graph for the whole drafter pass of a decode round.

SGLang captures its draft-extend forward for every batch size; here the captured window is ``2k`` rows a request in
place of ``k + 1``, and the graph reaches from the raw aux hidden states of the verify rows to the drafted token ids:

    aux hidden states [bs*(k+1), A*H] -> fc -> placement with h_shared -> layers -> LM head on bs*k rows -> ids [bs, k]

Static inputs beyond SGLang's own (ids, positions, slots, lengths) are the aux hidden states, the row of each of them
(``hidden_rows``) and the sampled rows (``select_index``, here k a request).

Padded requests of a replay: SGLang resets their length, request row, positions and KV slots, so they read no prefix
and write to the padding slot. The tables here keep what an earlier replay left for that place in the batch. That is in
bounds, since place ``i`` only ever refers to the aux rows and window rows of place ``i``, and no row of one request
reads another's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Optional

import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.draft_utils import DraftBackendFactory
from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import EAGLEDraftExtendCudaGraphRunner

from sgl_peagle import layout
from sgl_peagle.errors import PEagleError
from sgl_peagle.kernels.expand import SHARED_HIDDEN
from sgl_peagle.kernels.window_attention import stock_reason, window_attention
from sgl_peagle.model import PEagleDraftExtendInput

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from sgl_peagle.draft_worker import PEagleDraftWorker


#: Not for torch.compile, like the attention functions of SGLang's backend.
_window_attention = torch.compiler.disable(window_attention)


class WindowTritonBackend(TritonAttnBackend):
    """SGLang's Triton attention for a drafter that only ever runs windows of ``width`` rows a request.

    Decode windows, captured or eager, take :func:`~sgl_peagle.kernels.window_attention.window_attention`; prompts
    and whatever that kernel does not know stay with SGLang's extend kernel.

    Args:
        model_runner: The drafter's model runner.
        width: Rows per request of a captured window. SGLang takes its verify width here.
    """

    def __init__(self, model_runner: Any, width: int) -> None:
        super().__init__(model_runner, skip_prefill=False)
        self.num_draft_tokens = width

    def init_cuda_graph_state(
        self,
        max_bs: int,
        max_num_tokens: int,
        kv_indices_buf: Optional[torch.Tensor] = None,
        cuda_graph_num_kv_splits_buf: Optional[torch.Tensor] = None,
    ) -> None:
        """Buffers for ``max_bs`` prefixes, not for ``max_num_tokens`` of them.

        SGLang sizes its index and split-KV buffers for one context per row, as decode needs. A window needs one
        prefix a request and no split-KV, and with 2k rows a request the difference is gigabytes. Only the slot table
        of a sliding-window pool is per row.
        """
        rows = max_num_tokens if self.use_sliding_window_kv_pool else max_bs
        super().init_cuda_graph_state(max_bs, rows, kv_indices_buf, cuda_graph_num_kv_splits_buf)

    def _forward_extend_kernel(
        self,
        layer: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        k_buffer: torch.Tensor,
        v_buffer: torch.Tensor,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        custom_mask: Optional[torch.Tensor],
        causal: bool,
        mask_indptr: Optional[torch.Tensor],
        max_extend_len: int,
        k_scale: float,
        v_scale: float,
        scaling: float,
        **options: Any,
    ) -> None:
        """The last step of SGLang's ``forward_extend``, called once the window's K/V are stored in the cache.

        Same arguments as SGLang's ``extend_attention_fwd``. For a window only the prefix is read through
        ``kv_indptr`` and ``kv_indices``, which hold what they should in eager batches, at capture and at replay
        alike; ``page_size`` does not matter, because a slot's address is linear in its index.
        """
        features = ("sliding_window_size", "xai_temperature_len", "sinks", "score_mod", "aux_tensors")
        reason = stock_reason(
            q, k, v, k_buffer, v_buffer,
            width=self.num_draft_tokens, requests=qo_indptr.shape[0] - 1, causal=causal, custom_mask=custom_mask,
            # Exact in eager batches and at capture. A replay never gets here.
            row_counts=options.get("extend_seq_lens_cpu"),
            **{name: options[name] for name in features if name in options},
        )  # fmt: skip
        if reason is None:
            _window_attention(
                q, k, v, k_buffer, v_buffer, kv_indptr, kv_indices, o,
                width=self.num_draft_tokens, scaling=scaling, logit_cap=options.get("logit_cap", 0.0),
                k_scale=k_scale, v_scale=v_scale,
            )  # fmt: skip
            return
        super()._forward_extend_kernel(
            layer, q, k, v, o, k_buffer, v_buffer, qo_indptr, kv_indptr, kv_indices, custom_mask, causal,
            mask_indptr, max_extend_len, k_scale, v_scale, scaling, **options,
        )  # fmt: skip


class WindowBackendFactory(DraftBackendFactory):
    """SGLang's factory, with :class:`WindowTritonBackend` where it would take its Triton backend."""

    def __init__(self, model_runner: Any, k: int) -> None:
        super().__init__(model_runner, 1, k)
        self.width = layout.window_width(k)

    def _create_triton_prefill_backend(self) -> tuple[str, TritonAttnBackend]:
        return "triton", WindowTritonBackend(self.draft_model_runner, self.width)


class PEagleCudaGraphRunner(EAGLEDraftExtendCudaGraphRunner):
    """Captures and replays the drafter pass at every batch size that SGLang captures.

    Args:
        worker: The draft worker; its extend backend is a :class:`WindowTritonBackend`.
    """

    def __init__(self, worker: "PEagleDraftWorker") -> None:
        self.k = worker.k
        # The parent takes the captured width from the configuration, and captures before it returns.
        with get_spec().override(speculative_num_draft_tokens=layout.window_width(worker.k)):
            super().__init__(worker)

    def capture(self) -> None:
        """Capture all batch sizes (the parent's constructor calls this once its buffers exist)."""
        self._allocate_inputs()
        super().capture()

    def _allocate_inputs(self) -> None:
        k, width, device = self.k, self.captured_req_width, self.device
        buffers, head = self.buffers, self.eagle_worker.model.head.config
        if width != layout.window_width(k) or buffers.hidden_states.shape[1] != head.aux_width:
            raise PEagleError(
                f"SGLang prepared graphs of {width} rows and {buffers.hidden_states.shape[1]} hidden values, "
                f"the head needs {layout.window_width(k)} rows and {head.aux_width}",
                "a graph of another shape would read past its inputs",
                "report this with the head's config; --disable-cuda-graph serves without graphs",
            )
        starts = torch.arange(self.max_bs, dtype=torch.int64, device=device).unsqueeze(1) * width
        self.hidden_rows = torch.full((self.max_bs * width,), SHARED_HIDDEN, dtype=torch.int64, device=device)
        # Only real rows are projected: k+1 a request. The parent must not copy them as 2k rows a request.
        self.aux_hidden = buffers.hidden_states[: self.max_bs * layout.verify_width(k)]
        buffers.hidden_states = None
        # One row of k per request; the parent slices and fills it by request, as it does with its own single row.
        buffers.select_index = (starts + torch.arange(k, dtype=torch.int64, device=device)).contiguous()
        self.logits = self._logits_buffer()

    def _logits_buffer(self) -> Optional[torch.Tensor]:
        """SGLang's shared logits buffer where it has a row for every draft, so that graphs need no own memory."""
        shared, vocabulary = self.model_runner.graph_shared_output, self.buffers.next_token_logits_buffer.shape[1]
        rows = self.max_bs * self.k
        return shared.get_logits_buffer(vocabulary, rows=rows) if rows <= shared.max_rows else None

    def _inputs(self, bs: int) -> PEagleDraftExtendInput:
        """The static inputs of a graph for ``bs`` requests."""
        return PEagleDraftExtendInput(
            hidden_states=self.aux_hidden[: bs * layout.verify_width(self.k)],
            hidden_rows=self.hidden_rows[: bs * self.captured_req_width],
            select_index=self.buffers.select_index[:bs].view(-1),
            logits_buffer=None if self.logits is None else self.logits[: bs * self.k],
        )

    def capture_one_shape(self, size: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Capture the graph for ``size`` requests."""
        with self.eagle_worker.model.capturing(self._inputs(size)):
            super().capture_one_shape(size, forward, *args, **kwargs)

    def execute(self, forward_batch: "ForwardBatch", select_index: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Replay for ``forward_batch``, whose ``spec_info`` is a :class:`PEagleDraftExtendInput`.

        Returns:
            [bs, k] int64 draft tokens, a copy that later replays leave alone.
        """
        spec_info: PEagleDraftExtendInput = forward_batch.spec_info
        real = forward_batch.batch_size * layout.verify_width(self.k)
        # A large contiguous copy: copy_ is the copy engine's, as in the parent.
        self.aux_hidden[:real].copy_(spec_info.hidden_states[:real])
        self.hidden_rows[: spec_info.hidden_rows.shape[0]].copy_(spec_info.hidden_rows)
        rows = spec_info.select_index if select_index is None else select_index
        return super().execute(forward_batch, rows.view(-1, self.k)).hidden_states
