"""One attention backend for every forward mode on CPU, written for clarity.

A forward processes one *window* of rows per request: the prompt chunk (extend), one token (decode), the drafted
chain (target verify) or the drafter's rows (draft extend).  Row ``j`` of a window sees

* the request's *prefix*, read from the KV cache through ``req_to_token``, and
* rows ``0..j`` of the window, taken from the K/V tensors handed to the call, **not** from the cache.

The second point makes windows work whose rows share a cache slot: P-EAGLE's mask rows are all written to the
padding slot 0 and must still be seen by later rows.  SGLang's Triton backend behaves the same way on GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sgl_peagle.backends import window_from_cache


@dataclass
class Window:
    """The rows of one request in a forward, and the cached tokens before them."""

    first_row: int
    num_rows: int
    prefix_slots: Tensor  # int64 [prefix length]: KV slots, oldest token first
    # What the layers of one forward share, keyed by (sliding window, layer reads the sliding-window pool).
    visible: dict[tuple[int, bool], tuple[Tensor, Optional[Tensor]]] = field(default_factory=dict)

    @property
    def end_row(self) -> int:
        return self.first_row + self.num_rows


class ReferenceAttnBackend(TorchNativeAttnBackend):
    """Dense-window attention for decode, extend, target verify and draft extend."""

    def __init__(self, model_runner: Any):
        super().__init__(model_runner)
        self.windows: list[Window] = []
        # A test hook: behave like fa3, which reads the window back from the cache.
        self.reads_window_from_cache = window_from_cache()

    # ----- once per forward -------------------------------------------------------------------------------------

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)  # swa_out_cache_loc
        prefix_lens, num_rows = _window_shapes(forward_batch)
        self.plan_windows(forward_batch.req_pool_indices, prefix_lens, num_rows)

    def plan_windows(self, req_pool_indices: Tensor, prefix_lens: list[int], num_rows: list[int]) -> None:
        """Look up the prefix slots of every request.

        Args:
            req_pool_indices: ``[bs]`` rows of ``req_to_token``.
            prefix_lens, num_rows: cached tokens and window rows of each request.
        """
        req_to_token = self.req_to_token_pool.req_to_token
        self.windows = []
        first_row = 0
        for request, prefix_len, rows in zip(req_pool_indices.tolist(), prefix_lens, num_rows):
            # A copy: later updates of the table must not reach this forward.
            slots = req_to_token[request, :prefix_len].to(torch.int64, copy=True)
            self.windows.append(Window(first_row, rows, slots))
            first_row += rows

    # ----- once per layer ---------------------------------------------------------------------------------------

    def forward_extend(
        self,
        q: Tensor,
        k: Optional[Tensor],
        v: Optional[Tensor],
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        if not _is_decoder(layer):
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def forward_decode(
        self,
        q: Tensor,
        k: Optional[Tensor],
        v: Optional[Tensor],
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        if not _is_decoder(layer):
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def _forward(
        self,
        q: Tensor,
        k: Optional[Tensor],
        v: Optional[Tensor],
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
        sinks: Optional[Tensor] = None,
        **unsupported: Any,
    ) -> Tensor:
        """Attend one layer.

        Args:
            q: ``[rows, q_heads * qk_dim]``.
            k, v: ``[rows, kv_heads, qk_dim or v_dim]``, or None for a layer that shares another layer's cache.
            save_kv_cache: write k and v to ``forward_batch.out_cache_loc`` (row order; slots may repeat).
            sinks: optional ``[q_heads]`` logits of a virtual key with value zero.

        Returns:
            ``[rows, q_heads * v_dim]`` in q's dtype.
        """
        if unsupported:
            raise NotImplementedError(
                f"The reference CPU attention backend does not know the arguments {sorted(unsupported)}, which this "
                "model passes to its attention layers. It serves dense decoder attention (Llama, Qwen and the like)."
            )

        if k is not None:
            k = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
            v = v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
            if save_kv_cache:
                self.token_to_kv_pool.set_kv_buffer(
                    layer, KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc), k, v
                )
        k_cache = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        v_cache = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        in_swa_pool = self._in_swa_pool(layer)
        if k is None or self.reads_window_from_cache:
            # The window's rows are written already, by this layer or by the one that owns the shared cache.
            written = self.swa_out_cache_loc if in_swa_pool else forward_batch.out_cache_loc
            k, v = k_cache[written], v_cache[written]
        k, v = k.to(q.dtype), v.to(q.dtype)

        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        self._check_rows(q, k)
        out = q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        for window in self.windows:
            slots, mask = self._visible(window, layer, in_swa_pool, q.dtype)
            rows = slice(window.first_row, window.end_row)
            keys, values = k[rows], v[rows]
            if slots.numel():
                keys = torch.cat([k_cache.index_select(0, slots).to(q.dtype), keys])
                values = torch.cat([v_cache.index_select(0, slots).to(q.dtype), values])
            out[rows] = attend(q[rows], keys, values, mask, layer.scaling, layer.logit_cap, sinks)
        covered = self.windows[-1].end_row if self.windows else 0
        out[covered:] = 0  # padding rows behind the last request
        return out

    def _in_swa_pool(self, layer: RadixAttention) -> bool:
        """Whether the layer's cache is the smaller sliding-window pool, which numbers its slots differently."""
        return self.use_sliding_window_kv_pool and self.token_to_kv_pool.layers_mapping[layer.layer_id][1]

    def _visible(
        self, window: Window, layer: RadixAttention, in_swa_pool: bool, dtype: torch.dtype
    ) -> tuple[Tensor, Optional[Tensor]]:
        """Prefix slots to read and additive mask ``[rows, slots + rows]`` (None: everything is visible)."""
        key = (layer.sliding_window_size, in_swa_pool)
        if key not in window.visible:
            slots = window.prefix_slots
            if layer.sliding_window_size > -1:
                # Tokens further back are outside the window of even the first row, and may have been freed.
                slots = slots[max(0, slots.numel() - layer.sliding_window_size) :]
            if in_swa_pool:
                slots = self.token_to_kv_pool.translate_loc_from_full_to_swa(slots)
            mask = window_mask(slots.numel(), window.num_rows, layer.sliding_window_size, dtype)
            window.visible[key] = (slots, mask)
        return window.visible[key]

    def _check_rows(self, q: Tensor, k: Tensor) -> None:
        planned = self.windows[-1].end_row if self.windows else 0
        if q.shape[0] < planned or k.shape[0] < planned:
            raise RuntimeError(
                f"Attention got {q.shape[0]} query and {k.shape[0]} key rows for a forward planned with {planned}. "
                "init_forward_metadata was not called for this forward, or its seq_lens / extend_seq_lens are wrong."
            )


class ReferenceMultiStepDraftBackend:
    """The per-step backends of SGLang's step-by-step EAGLE drafter.  Chains only (``topk == 1``)."""

    def __init__(self, model_runner: Any, topk: int, num_steps: int):
        if topk != 1:
            raise NotImplementedError(
                f"The reference CPU platform drafts chains only, but speculative_eagle_topk is {topk}. "
                "Set --speculative-eagle-topk 1."
            )
        self.attn_backends = [ReferenceAttnBackend(model_runner) for _ in range(num_steps - 1)]

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        # Step i processes drafted token i; the committed tokens and drafts before it are in the cache by then.
        committed = forward_batch.seq_lens.tolist()
        for step, backend in enumerate(self.attn_backends):
            backend.plan_windows(
                forward_batch.req_pool_indices, [length + step for length in committed], [1] * len(committed)
            )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Optional[Tensor],
    scaling: float,
    logit_cap: float = 0.0,
    sinks: Optional[Tensor] = None,
) -> Tensor:
    """Attention of one request.

    Args:
        q: ``[rows, q_heads, qk_dim]``.
        k, v: ``[tokens, kv_heads, qk_dim]`` and ``[tokens, kv_heads, v_dim]``.
        mask: additive ``[rows, tokens]``, or None if every row sees every token.
        logit_cap: ``cap * tanh(logit / cap)`` when positive.
        sinks: optional ``[q_heads]`` extra logits in the softmax denominator.

    Returns:
        ``[rows, q_heads * v_dim]``.
    """
    rows, q_heads, _ = q.shape
    kv_heads = k.shape[1]
    group = q_heads // kv_heads
    # Query heads of a group share a K/V head: [kv_heads, group, rows, dim] against [kv_heads, 1, tokens, dim].
    q = q.view(rows, kv_heads, group, -1).permute(1, 2, 0, 3)
    k, v = k.transpose(0, 1).unsqueeze(1), v.transpose(0, 1).unsqueeze(1)
    if logit_cap > 0 or sinks is not None:
        logits = (q @ k.transpose(-1, -2)).float() * scaling
        if logit_cap > 0:
            logits = logit_cap * torch.tanh(logits / logit_cap)
        if mask is not None:
            logits = logits + mask
        if sinks is not None:
            extra = sinks.float().view(kv_heads, group, 1, 1).expand(-1, -1, rows, 1)
            weights = torch.cat([logits, extra], dim=-1).softmax(dim=-1)[..., :-1]
        else:
            weights = logits.softmax(dim=-1)
        out = weights.to(v.dtype) @ v
    else:
        shape = (-1, group, -1, -1)
        out = scaled_dot_product_attention(q, k.expand(shape), v.expand(shape), attn_mask=mask, scale=scaling)
    return out.permute(2, 0, 1, 3).reshape(rows, -1)


def window_mask(prefix: int, rows: int, sliding_window: int, dtype: torch.dtype) -> Optional[Tensor]:
    """Additive mask ``[rows, prefix + rows]``: causal by row order, at most ``sliding_window`` tokens back.

    SGLang does not count the row itself in ``sliding_window_size``; -1 means no limit.
    """
    if rows == 1 and not -1 < sliding_window < prefix:
        return None
    query = torch.arange(prefix, prefix + rows).unsqueeze(1)
    token = torch.arange(prefix + rows)
    hidden = token > query
    if sliding_window > -1:
        hidden |= token < query - sliding_window
    return torch.zeros(rows, prefix + rows, dtype=dtype).masked_fill_(hidden, float("-inf"))


def _is_decoder(layer: RadixAttention) -> bool:
    """Whether this is causal self-attention; encoders and cross-attention stay with the stock backend."""
    return not layer.is_cross_attention and layer.attn_type == AttentionType.DECODER


def _window_shapes(forward_batch: ForwardBatch) -> tuple[list[int], list[int]]:
    """Prefix length and row count of every request."""
    mode = forward_batch.forward_mode
    if mode.is_decode_or_idle():
        # seq_lens already counts the token that is being decoded.
        seq_lens = forward_batch.seq_lens.tolist()
        return [max(0, length - 1) for length in seq_lens], [1] * len(seq_lens)
    if mode.is_target_verify():
        _refuse_trees(forward_batch.spec_info)
        # seq_lens does not count the drafted tokens.
        seq_lens = forward_batch.seq_lens.tolist()
        return seq_lens, [forward_batch.spec_info.draft_token_num] * len(seq_lens)
    return forward_batch.extend_prefix_lens.tolist(), forward_batch.extend_seq_lens.tolist()


def _refuse_trees(spec_info: Any) -> None:
    topk = getattr(spec_info, "tree_topk", 1)
    if topk != 1:
        raise NotImplementedError(
            f"The reference CPU attention backend verifies chains only, but this draft is a tree (topk {topk}): its "
            "custom mask would be ignored. Set --speculative-eagle-topk 1."
        )
