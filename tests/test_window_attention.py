"""Which attention a drafter forward takes, and what the real backend hands to it: eager, captured and replayed.

The kernel itself is compared with its reference in ``test_kernels.py``; here CPU tensors take the reference.
"""

from __future__ import annotations

import inspect
import random
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd
from sglang.srt.layers.attention.triton_backend import ForwardMetadata
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_peagle import graph
from sgl_peagle.graph import WindowTritonBackend
from sgl_peagle.kernels.window_attention import (
    MAX_SPLITS,
    plan_launch,
    stock_reason,
    window_attention,
    window_attention_reference,
)

WIDTH, HEADS, KV_HEADS, DIM, SLOTS, CONTEXT, MAX_BS = 6, 4, 2, 16, 200, 64, 8


# -- launches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", range(1, 17))
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 16])
def test_tiles_hold_every_row_of_a_group(k: int, group: int) -> None:
    launch = plan_launch(3, 2 * k, 8 * group, 8, 128, 2, 132)
    rows, held = 2 * k * group, launch.block_m * launch.m_blocks
    assert launch.block_m in (16, 32, 64) and held >= rows > held - launch.block_m
    assert launch.min_chunk % launch.block_n == 0


def test_splits_fill_the_gpu_and_depend_on_shapes_only() -> None:
    splits = {bs: plan_launch(bs, 14, 32, 8, 128, 2, 132).splits for bs in (1, 2, 8, 16, 64, 512)}
    assert splits[1] == MAX_SPLITS and splits[64] == splits[512] == 1
    assert all(bs * 8 * n >= 2 * 132 for bs, n in splits.items() if bs > 1)
    assert list(splits.values()) == sorted(splits.values(), reverse=True)


@pytest.mark.parametrize(("head_dim", "itemsize"), [(64, 2), (80, 2), (128, 2), (256, 2), (128, 4), (256, 4)])
def test_two_stages_of_k_and_v_leave_room_for_a_second_program(head_dim: int, itemsize: int) -> None:
    block_n = plan_launch(1, 14, 32, 8, head_dim, itemsize, 132).block_n
    assert block_n >= 16 and 2 * 2 * block_n * max(head_dim, 128) * itemsize <= 100_000


# -- selection --------------------------------------------------------------------------------------------------------


def call(**changes: Any) -> dict[str, Any]:
    """A window of two requests that the kernel takes."""
    arguments: dict[str, Any] = {
        "q": torch.zeros(12, HEADS, DIM), "k": torch.zeros(12, KV_HEADS, DIM), "v": torch.zeros(12, KV_HEADS, DIM),
        "k_buffer": torch.zeros(9, KV_HEADS, DIM), "v_buffer": torch.zeros(9, KV_HEADS, DIM),
        "width": WIDTH, "requests": 2, "causal": True, "custom_mask": None, "row_counts": [WIDTH] * 2,
    }  # fmt: skip
    return arguments | changes


def test_windows_take_the_kernel() -> None:
    assert stock_reason(**call()) is None
    assert stock_reason(**call(sliding_window_size=-1, xai_temperature_len=-1, sinks=None)) is None
    fp8 = torch.zeros(9, KV_HEADS, DIM).to(torch.float8_e4m3fn)
    assert stock_reason(**call(k_buffer=fp8, v_buffer=fp8)) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"row_counts": [WIDTH, 5]}, "rows per request"),
        ({"row_counts": [300, 300]}, "rows per request"),
        ({"row_counts": [WIDTH]}, "rows per request"),
        ({"row_counts": None}, "rows per request"),
        ({"q": torch.zeros(13, HEADS, DIM)}, "padded"),
        ({"causal": False}, "not causal"),
        ({"custom_mask": torch.ones(4)}, "not causal"),
        ({"sliding_window_size": 128}, "distance"),
        ({"sliding_window_size": 0}, "distance"),
        ({"xai_temperature_len": 1024}, "distance"),
        ({"sinks": torch.zeros(4)}, "sinks"),
        ({"score_mod": print}, "sinks"),
        ({"aux_tensors": ()}, "sinks"),
        ({"k_buffer": torch.zeros(9, 4, KV_HEADS, DIM)}, "not grouped"),
        ({"q": torch.zeros(12, 5, DIM)}, "not grouped"),
        ({"v_buffer": torch.zeros(9, KV_HEADS, 2 * DIM), "v": torch.zeros(12, KV_HEADS, 2 * DIM)}, "head dimensions"),
        ({"k_buffer": torch.zeros(9, 4, DIM)}, "other heads"),
        ({"q": torch.zeros(12, DIM, HEADS).transpose(1, 2)}, "strided"),
        ({"k": torch.zeros(12, KV_HEADS, DIM).half()}, "other types"),
        ({"k_buffer": torch.zeros(9, KV_HEADS, DIM).half()}, "another type"),
        ({"k_buffer": torch.zeros(9, KV_HEADS, DIM, dtype=torch.uint8)}, "another type"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else None,
)
def test_everything_else_stays_with_sglang(changes: dict[str, Any], reason: str) -> None:
    assert reason in (stock_reason(**call(**changes)) or "")


def test_the_hook_takes_sglangs_arguments_in_sglangs_order() -> None:
    """``forward_extend`` passes them by position."""
    ours = list(inspect.signature(WindowTritonBackend._forward_extend_kernel).parameters)[2:]
    names = {"q": "q_extend", "k": "k_extend", "v": "v_extend", "o": "o_extend", "causal": "is_causal",
             "max_extend_len": "max_len_extend", "scaling": "sm_scale"}  # fmt: skip
    theirs = list(inspect.signature(extend_attention_fwd).parameters)
    assert [names.get(name, name) for name in ours[:-1]] == theirs[: len(ours) - 1] and ours[-1] == "options"
    used = {"logit_cap", "sliding_window_size", "xai_temperature_len", "sinks", "score_mod", "aux_tensors"}
    assert used | {"extend_seq_lens_cpu"} <= set(theirs)


# -- the real backend -------------------------------------------------------------------------------------------------


class Pool:
    """KV cache of one layer. Slot 0 is padding."""

    def __init__(self) -> None:
        self.k, self.v = torch.randn(SLOTS, KV_HEADS, DIM), torch.randn(SLOTS, KV_HEADS, DIM)
        self.stored: list[torch.Tensor] = []

    def set_kv_buffer(self, layer: Any, loc: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        self.stored.append(loc.loc)
        self.k[loc.loc], self.v[loc.loc] = k, v

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.k

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.v


class Translator:
    """SGLang's own packs the slots with a Triton kernel."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table

    def pack_read_stream(self, plan: Any, *, req_pool_indices: Any, seq_lens: Any, indptr: Any, out: Any) -> None:
        for i, (request, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist())):
            out[int(indptr[i]) : int(indptr[i]) + length] = self.table[request, :length]


class Backend(WindowTritonBackend):
    """The backend without its constructor, which needs a model runner; SGLang's kernel only says it was called."""

    def __init__(self) -> None:
        self.num_draft_tokens, self.speculative_num_steps, self.device = WIDTH, 3, "cpu"
        self.table = torch.randint(1, SLOTS, (12, CONTEXT))
        self.token_to_kv_pool, self.kv_index_translator = Pool(), Translator(self.table)
        self.sliding_window_size, self.window_kv_indptr, self.page_size = None, None, 1
        self.use_sliding_window_kv_pool = self.use_mla = self.enable_deterministic = False
        self.use_verify_shared_kv = self.use_verify_splitkv = self.use_dense_fp8_chunked_prefill = False
        self.allow_bidirectional_attention_in_extend = False
        self.dcp_size, self.max_context_len = 1, CONTEXT
        self.kv_indptr, self.qo_indptr = torch.zeros(12, dtype=torch.int32), torch.zeros(12, dtype=torch.int64)
        self.mask_indptr = torch.zeros(12, dtype=torch.int64)
        self.cuda_graph_kv_indices = torch.zeros(MAX_BS * CONTEXT, dtype=torch.int64)
        self.stock_calls = 0

    def extend_attention_fwd(self, *args: Any, **kwargs: Any) -> None:
        inspect.signature(extend_attention_fwd).bind(*args, **kwargs)
        self.stock_calls += 1
        args[3].fill_(7.0)


def batch(backend: Backend, prefixes: list[int], rows: list[int], requests: list[int]) -> SimpleNamespace:
    """What SGLang's forward batch holds of it."""
    prefix, extend = torch.tensor(prefixes), torch.tensor(rows)
    return SimpleNamespace(
        batch_size=len(rows), forward_mode=ForwardMode.DRAFT_EXTEND_V2, req_pool_indices=torch.tensor(requests),
        seq_lens=prefix + extend, seq_lens_sum=None, extend_prefix_lens=prefix, extend_prefix_lens_cpu=prefixes,
        extend_seq_lens=extend, extend_seq_lens_cpu=rows, out_cache_loc=torch.zeros(sum(rows), dtype=torch.int64),
        out_cache_loc_is_physical=True, kv_loc_plan=None, kv_loc_cols=None, encoder_lens=None, positions=None,
        spec_info=SimpleNamespace(extend_seq_lens_tensor=extend), mha_one_shot=False, attn_attend_prefix_cache=False,
    )  # fmt: skip


def layer(**options: Any) -> RadixAttention:
    return RadixAttention(HEADS, DIM, DIM**-0.5, num_kv_heads=KV_HEADS, layer_id=0, **options)


def expected(backend: Backend, prefixes: list[int], requests: list[int], q: Any, k: Any, v: Any) -> torch.Tensor:
    """From the request table, not from the metadata."""
    pool, n = backend.token_to_kv_pool, len(requests)
    slots = torch.cat([backend.table[r, :p] for r, p in zip(requests, prefixes)])
    shapes = (t.view(n * WIDTH, -1, DIM) for t in (q, k, v))
    indptr = torch.tensor([0, *prefixes]).cumsum(0)
    out = torch.empty(n * WIDTH, HEADS, DIM)
    options = {"width": WIDTH, "scaling": DIM**-0.5}
    return window_attention_reference(*shapes, pool.k, pool.v, indptr, slots, out, **options).view(n * WIDTH, -1)


def rows_of(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(count, HEADS * DIM), torch.randn(count, KV_HEADS * DIM), torch.randn(count, KV_HEADS * DIM)


def test_eager_windows_take_the_kernel_after_the_cache_is_written() -> None:
    backend, prefixes, requests = Backend(), [0, 1, 40], [3, 5, 1]
    forward_batch = batch(backend, prefixes, [WIDTH] * 3, requests)
    backend.init_forward_metadata(forward_batch)
    q, k, v = rows_of(3 * WIDTH)
    out = backend.forward_extend(q, k.view(-1, KV_HEADS, DIM), v.view(-1, KV_HEADS, DIM), layer(), forward_batch)
    assert backend.stock_calls == 0 and len(backend.token_to_kv_pool.stored) == 1
    torch.testing.assert_close(out, expected(backend, prefixes, requests, q, k, v))


def test_prompts_take_sglangs_kernel() -> None:
    for rows in ([WIDTH, 9], [9, 9], [1, 1]):
        backend = Backend()
        forward_batch = batch(backend, [4, 2], rows, [0, 1])
        forward_batch.forward_mode = ForwardMode.EXTEND
        backend.init_forward_metadata(forward_batch)
        q, k, v = rows_of(sum(rows))
        out = backend.forward_extend(q, k.view(-1, KV_HEADS, DIM), v.view(-1, KV_HEADS, DIM), layer(), forward_batch)
        assert backend.stock_calls == 1 and (out == 7).all()


def test_a_logit_cap_reaches_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(graph, "_window_attention", lambda *args, **options: seen.append(options))
    backend = Backend()
    forward_batch = batch(backend, [4, 2], [WIDTH] * 2, [0, 1])
    backend.init_forward_metadata(forward_batch)
    q, k, v = rows_of(2 * WIDTH)
    capped = layer(logit_cap=30.0)
    backend.forward_extend(q, k.view(-1, KV_HEADS, DIM), v.view(-1, KV_HEADS, DIM), capped, forward_batch)
    assert seen == [{"width": WIDTH, "scaling": DIM**-0.5, "logit_cap": 30.0, "k_scale": 1.0, "v_scale": 1.0}]


def test_captured_windows_follow_the_lengths_of_each_replay() -> None:
    """Replays change buffers, never the metadata object; padded requests have length 1 and request row 0."""
    chooser, backend, bs = random.Random(1), Backend(), 4
    captured = batch(backend, [0] * bs, [WIDTH] * bs, [0] * bs)
    # At capture SGLang's own spec_info has no extend_seq_lens_tensor, and every length is the fill value.
    captured.seq_lens, captured.spec_info = torch.ones(bs, dtype=torch.int64), SimpleNamespace()
    backend.init_forward_metadata_out_graph(captured, in_capture=True)
    metadata: ForwardMetadata = backend.forward_metadata
    assert metadata.max_extend_len == WIDTH and metadata.kv_indptr.shape == (bs + 1,)
    for real in (4, 2, 3):
        prefixes = [chooser.randint(0, CONTEXT) for _ in range(real)] + [0] * (bs - real)
        requests = chooser.sample(range(1, 12), real) + [0] * (bs - real)
        replay = batch(backend, prefixes, [WIDTH] * bs, requests)
        replay.seq_lens[real:] = 1
        backend.init_forward_metadata_out_graph(replay)
        assert backend.forward_metadata is metadata
        q, k, v = rows_of(bs * WIDTH)
        # The captured call: its batch, its metadata, the buffers as this replay left them.
        out = backend.forward_extend(q, k.view(-1, KV_HEADS, DIM), v.view(-1, KV_HEADS, DIM), layer(), captured)
        torch.testing.assert_close(out, expected(backend, prefixes, requests, q, k, v))
    assert backend.stock_calls == 0


def test_cpu_tensors_take_the_reference() -> None:
    q, k, v = (torch.randn(WIDTH, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    buffer, indptr, slots = torch.randn(9, KV_HEADS, DIM), torch.tensor([0, 3]), torch.tensor([4, 2, 7])
    options = {"width": WIDTH, "scaling": 1.0, "logit_cap": 5.0, "k_scale": 0.5, "v_scale": 2.0}
    outs = [
        function(q, k, v, buffer, buffer, indptr, slots, torch.empty_like(q), **options)
        for function in (window_attention, window_attention_reference)
    ]
    assert torch.equal(*outs)


def test_the_reference_is_causal_attention() -> None:
    """Against torch's own, over the keys of prefix and window together."""
    q, k, v = (torch.randn(WIDTH, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    k_buffer, v_buffer, slots = torch.randn(9, KV_HEADS, DIM), torch.randn(9, KV_HEADS, DIM), torch.tensor([4, 2, 7, 4])
    have = window_attention_reference(
        q, k, v, k_buffer, v_buffer, torch.tensor([0, 4]), slots, torch.empty_like(q), width=WIDTH, scaling=DIM**-0.5
    )
    keys, values = torch.cat([k_buffer[slots], k]), torch.cat([v_buffer[slots], v])
    mask = torch.ones(WIDTH, WIDTH + 4, dtype=torch.bool).tril(4)
    want = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(0, 1) for t in (q, keys, values)), attn_mask=mask, enable_gqa=True
    )
    torch.testing.assert_close(have, want.transpose(0, 1))


# -- compilation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "instruction"), [(7, "wgmma.mma_async"), (3, "mma.sync")])
def test_the_kernels_compile_for_hopper(k: int, instruction: str) -> None:
    """With matrix instructions and 16-byte copies; without either it would still be right, and slow."""
    from test_kernels import compiled

    from sgl_peagle.kernels import window_attention_triton as module

    launch = plan_launch(8, 2 * k, 32, 8, 128, 2, 132)
    pointers = dict.fromkeys(("q", "k", "v", "k_cache", "v_cache", "out"), "*bf16")
    pointers |= {"partial": "*fp32", "lse": "*fp32", "kv_indptr": "*i32", "kv_indices": "*i64"}
    numbers = dict.fromkeys(("scale", "k_scale", "v_scale"), "fp32") | {"splits": "i32", "min_chunk": "i32"}
    strides = {f"{name}_{part}": "i32" for name in ("q", "k", "v", "out") for part in ("row", "head")}
    strides |= dict.fromkeys(("kc_slot", "kc_head", "vc_slot", "vc_head"), "i32")
    shape = {"WIDTH": 2 * k, "D": 128, "BLOCK_D": 128}
    tile = {"KV_HEADS": 8, "GROUP": 4, "LOGIT_CAP": 0.0, "M_BLOCKS": launch.m_blocks, "BLOCK_M": launch.block_m}
    tile |= {"BLOCK_W": 16, "BLOCK_N": launch.block_n}
    ptx = compiled(
        module._window_kernel, pointers | numbers | strides, shape | tile, launch.num_warps, divisible=tuple(strides)
    )
    assert instruction in ptx and re.search(r"cp\.async\.cg\.shared\.global \[[^]]*\] *, *\[[^]]*\] *, *0x10", ptx)

    types = {"partial": "*fp32", "lse": "*fp32", "kv_indptr": "*i32", "out": "*bf16"}
    types |= dict.fromkeys(("splits", "min_chunk", "block_n", "out_row", "out_head"), "i32")
    constants = shape | {"HEADS": 32, "BLOCK_S": MAX_SPLITS}
    ptx = compiled(module._reduce_kernel, types, constants, 4, divisible=("out_row", "out_head"))
    assert "ld.global.v4" in ptx
