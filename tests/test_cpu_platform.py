"""The reference CPU platform: activation, ops and attention backend (test_cpu_engine.py: engines on top of them)."""

from __future__ import annotations

import functools
import math
import os
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable

import pytest
import torch
from harness import import_sglang, in_fork

from sgl_peagle import cpu
from sgl_peagle.cpu import sgl_kernel_ops as ops

REPO = Path(__file__).parents[1]
needs_cpu_engine = pytest.mark.skipif(
    find_spec("sglang") is None or torch.accelerator.is_available(), reason="needs SGLang on a machine without a GPU"
)


# ----- ops against plain Python ---------------------------------------------------------------------------------

ROWS = torch.tensor([3, 1, 4])
TABLE = torch.arange(6 * 20, dtype=torch.int32).view(6, 20)


def test_assign_extend_cache_locs_reads_ranges() -> None:
    starts, ends = [2, 0, 7], [5, 0, 9]
    out = torch.full((8,), -1, dtype=torch.int64)
    ops.assign_extend_cache_locs_cpu(ROWS, TABLE, torch.tensor(starts), torch.tensor(ends), out, 20)
    expected = [int(TABLE[row, c]) for row, s, e in zip(ROWS.tolist(), starts, ends) for c in range(s, e)]
    assert out.tolist() == expected + [-1] * (8 - len(expected))


def test_assign_req_to_token_pool_writes_ranges() -> None:
    starts, ends = [2, 4, 0], [5, 4, 2]
    slots = torch.tensor([901, 902, 903, 904, 905])
    table = TABLE.clone()
    ops.assign_req_to_token_pool_cpu(ROWS, table, torch.tensor(starts), torch.tensor(ends), slots, 20)
    expected, source = TABLE.tolist(), iter(slots.tolist())
    for row, start, end in zip(ROWS.tolist(), starts, ends):
        for column in range(start, end):
            expected[row][column] = next(source)
    assert table.tolist() == expected


@pytest.mark.parametrize(("topk", "steps"), [(1, 4), (1, 1), (2, 3)])
def test_assign_draft_cache_locs_reads_behind_the_committed_tokens(topk: int, steps: int) -> None:
    seq_lens = [0, 9, 14]
    out = torch.empty(3 * topk * steps, dtype=torch.int64)
    ops.assign_draft_cache_locs_contiguous_cpu(ROWS, TABLE, torch.tensor(seq_lens), out, 20, topk, steps)
    expected = [int(TABLE[row, s + c]) for row, s in zip(ROWS.tolist(), seq_lens) for c in range(topk * steps)]
    assert out.tolist() == expected


@pytest.mark.parametrize("width", [2, 5])
def test_build_tree_describes_a_chain(width: int) -> None:
    seq_lens = [7, 0, 31]
    bs = len(seq_lens)
    mask = torch.ones(bs * width * width + 3, dtype=torch.bool)  # the host's buffer may be longer
    positions = torch.empty(bs * width, dtype=torch.int64)
    index, following, sibling = torch.full((3, bs, width), -9).unbind()
    ops.build_tree_kernel_efficient_cpu(
        torch.empty(bs, 0), torch.empty(bs, 0), torch.tensor(seq_lens), mask, positions, index, following, sibling,
        topk=1, depth=width - 1, draft_token_num=width, tree_mask_mode=1,
    )
    assert mask[: bs * width * width].tolist() == [c <= r for _ in seq_lens for r in range(width) for c in range(width)]
    assert mask[bs * width * width :].all()
    assert positions.tolist() == [length + j for length in seq_lens for j in range(width)]
    assert index.tolist() == [[i * width + j for j in range(width)] for i in range(bs)]
    assert following.tolist() == [list(range(1, width)) + [-1]] * bs
    assert sibling.tolist() == [[-1] * width] * bs


@pytest.mark.parametrize(("topk", "mode"), [(2, 1), (1, 0)])
def test_build_tree_refuses_what_it_cannot_describe(topk: int, mode: int) -> None:
    empty = torch.empty(0)
    with pytest.raises(NotImplementedError):
        ops.build_tree_kernel_efficient_cpu(empty, empty, empty, empty, empty, empty, empty, empty, topk, 2, 3, mode)


@pytest.mark.parametrize("max_depth", [5, 3])
def test_verify_accepts_the_longest_agreeing_prefix(max_depth: int) -> None:
    width, bs = 5, 64
    generator = torch.Generator().manual_seed(0)
    # Two token values make every number of right drafts likely.
    candidates, target = torch.randint(0, 2, (2, bs, width), generator=generator)
    index = torch.arange(bs * width).view(bs, width)
    predicts = torch.full((bs * width,), -5, dtype=torch.int32)
    accept_index = torch.full((bs, max_depth), -1, dtype=torch.int32)
    num_right = torch.empty(bs, dtype=torch.int32)
    ops.verify_tree_greedy_cpu(
        predicts, accept_index, num_right, candidates,
        retrive_index=index, retrive_next_token=None, retrive_next_sibling=None, target_predict=target,
    )
    for i in range(bs):
        right = 0
        while right < max_depth - 1 and int(candidates[i, right + 1]) == int(target[i, right]):
            right += 1
        assert num_right[i] == right
        assert accept_index[i].tolist() == [i * width + j if j <= right else -1 for j in range(max_depth)]
        assert predicts[i * width : (i + 1) * width].tolist() == [
            int(target[i, j]) if j <= right else -5 for j in range(width)
        ]
    assert set(num_right.tolist()) == set(range(max_depth))


def test_fill_bonus_tokens_picks_the_last_gained() -> None:
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    bonus = torch.empty(3, dtype=torch.int32)
    ops.fill_bonus_tokens_cpu(tokens, torch.tensor([1, 3, 2]), bonus, 3)
    assert bonus.tolist() == [1, 6, 8]


def test_copy_all_layer_kv_cache_moves_rows_of_every_buffer() -> None:
    buffers = [torch.randn(8, 2, 3), torch.randn(8, 5).to(torch.float16)]
    before = [buffer.clone() for buffer in buffers]
    pointers = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64)
    strides = torch.tensor([buffer[0].nbytes for buffer in buffers])
    ops.copy_all_layer_kv_cache_cpu(pointers, strides, torch.tensor([1, 2, 6]), torch.tensor([2, 1, 3]))
    for buffer, old in zip(buffers, before):
        assert torch.equal(buffer, old[[0, 2, 1, 3, 4, 5, 3, 7]])


@pytest.mark.parametrize("with_hidden", [False, True])
def test_gather_spec_extras_reads_one_row_per_request(with_hidden: bool) -> None:
    p, index, tokens = torch.rand(6, 4), torch.arange(24).view(6, 4), torch.arange(6) * 10
    hidden = torch.rand(6, 3) if with_hidden else None
    out = ops.gather_spec_extras(ROWS, p, index, tokens, hidden)
    for got, source in zip(out, (p, index, tokens, hidden)):
        if source is None:
            assert got is None
        else:
            assert got.tolist() == [source[row].tolist() for row in ROWS.tolist()]


def test_unsupported_op_says_what_to_do() -> None:
    with pytest.raises(NotImplementedError, match="speculative-eagle-topk 1"):
        ops.EXPORTS["fill_accept_out_cache_loc_cpu"](None, None, None)


# ----- activation -----------------------------------------------------------------------------------------------


def test_not_needed_without_the_cpu_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    assert not cpu.is_needed()


def test_early_setup_is_light_and_complete() -> None:
    """Import pulls in nothing; set-up pulls in no SGLang and leaves a module that passes for a package."""
    code = """
        import importlib.util, os, sys
        import sgl_peagle.cpu as cpu
        assert not {"torch", "sglang", "transformers"} & set(sys.modules), "the import is heavy"
        assert cpu.is_needed() and cpu.early_setup() is None
        assert "sglang" not in sys.modules
        from sgl_kernel import verify_tree_greedy_cpu
        import sgl_kernel
        assert importlib.util.find_spec("sgl_kernel").name == "sgl_kernel" and sgl_kernel.__version__
        for missing in ("from sgl_kernel import silu_and_mul", "import sgl_kernel.kvcacheio"):
            try:
                exec(missing)
            except ImportError:
                continue
            raise AssertionError(missing)
        assert os.environ["TORCHDYNAMO_DISABLE"] == "1"
        assert cpu.is_needed(), "still needed when asked again"
    """
    env = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPO)}
    env.pop("TORCHDYNAMO_DISABLE", None)
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, env=env)


# ----- attention against a dense reference ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def sglang_imported() -> None:
    """SGLang in this process, on the reference kernels; what the tests run on it they run in forks."""
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    cpu.early_setup()
    import_sglang()


def runs_in_fork(test: Callable[..., None]) -> Callable[..., None]:
    """Run the body of a test in a fork, so that what it does to SGLang stays there."""

    @needs_cpu_engine
    @pytest.mark.usefixtures("sglang_imported")
    @functools.wraps(test)
    def run(**kwargs: Any) -> None:
        in_fork(lambda: test(**kwargs))

    return run


class FakePool:
    """Stands in for the KV pool: one layer, float32."""

    def __init__(self, slots: int, kv_heads: int, dim: int):
        self.k, self.v = torch.randn(2, slots, kv_heads, dim).unbind()

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.k

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.v

    def set_kv_buffer(self, layer: Any, where: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        self.k[where.loc], self.v[where.loc] = k, v


def _runner(req_to_token: torch.Tensor, pool: Any) -> SimpleNamespace:
    """What a backend reads of a model runner."""
    return SimpleNamespace(
        device="cpu", req_to_token_pool=SimpleNamespace(req_to_token=req_to_token), token_to_kv_pool=pool
    )


def _dense_row(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, sinks: torch.Tensor | None
) -> list[list[float]]:
    """Attention of one query row over all the keys up to and including its own, head by head, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    out = []
    for head in range(q.shape[0]):
        kv_head = head * k.shape[1] // q.shape[0]
        logits = [float(q[head] @ key) * layer.scaling for key in k[:, kv_head]]
        if layer.logit_cap:
            logits = [layer.logit_cap * math.tanh(x / layer.logit_cap) for x in logits]
        if layer.sliding_window_size >= 0:
            first_visible = len(logits) - 1 - layer.sliding_window_size
            logits = [x if t >= first_visible else float("-inf") for t, x in enumerate(logits)]
        exps = torch.tensor(logits, dtype=torch.float64).exp()
        total = exps.sum() + (float(sinks[head].double().exp()) if sinks is not None else 0.0)
        out.append((exps @ v[:, kv_head] / total).tolist())
    return out


RAGGED = {"prefixes": [5, 0, 17], "rows": [3, 6, 1]}
EQUAL = {"prefixes": [5, 1, 17], "rows": [5, 5, 5]}
ATTENTION_CASES: dict[str, dict[str, Any]] = {
    "decode": {"mode": "DECODE", "prefixes": [6, 0, 20], "rows": [1, 1, 1]},
    "decode, one request, 9/3 heads": {"mode": "DECODE", "prefixes": [11], "rows": [1], "heads": 9, "kv_heads": 3},
    "decode, sliding window": {"mode": "DECODE", "prefixes": [6, 0, 20], "rows": [1, 1, 1], "sliding_window": 4},
    "extend": {"mode": "EXTEND", **RAGGED},
    "extend, one KV head": {"mode": "EXTEND", **RAGGED, "kv_heads": 1},
    "extend, one KV head per query head": {"mode": "EXTEND", **RAGGED, "kv_heads": 4},
    "extend, sliding window": {"mode": "EXTEND", **RAGGED, "sliding_window": 2},
    "extend, logit cap": {"mode": "EXTEND", **RAGGED, "logit_cap": 1.5},
    "extend, sinks": {"mode": "EXTEND", **RAGGED, "sinks": True},
    "extend, sinks and sliding window": {"mode": "EXTEND", **RAGGED, "sinks": True, "sliding_window": 3},
    "extend, cache not written": {"mode": "EXTEND", **RAGGED, "save_kv_cache": False},
    "extend, shared cache": {"mode": "EXTEND", **RAGGED, "shared_kv": True},
    "mixed": {"mode": "MIXED", **RAGGED},
    "target verify": {"mode": "TARGET_VERIFY", **EQUAL},
    "draft extend": {"mode": "DRAFT_EXTEND_V2", **EQUAL},
    "draft extend, mask rows in slot 0": {"mode": "DRAFT_EXTEND_V2", **EQUAL, "slot0_rows": (2, 3, 4)},
    "ragged prompts with mask rows in slot 0": {"mode": "DRAFT_EXTEND_V2", **RAGGED, "slot0_rows": (1, 2, 4, 5)},
}


@runs_in_fork
@pytest.mark.parametrize("name", ATTENTION_CASES)
def test_attention_equals_dense_softmax(name: str) -> None:
    """Run the backend once on random data, ragged prefixes and shared slots; compare every row."""
    case = ATTENTION_CASES[name]
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from sgl_peagle.cpu.attention import ReferenceAttnBackend

    torch.manual_seed(0)
    prefixes, rows = case["prefixes"], case["rows"]
    heads, kv_heads, dim = case.get("heads", 4), case.get("kv_heads", 2), 8
    layer = RadixAttention(heads, dim, 0.3, kv_heads, layer_id=0, logit_cap=case.get("logit_cap", 0.0))
    layer.sliding_window_size = case.get("sliding_window", -1)
    sinks = torch.randn(heads) if case.get("sinks") else None

    pool = FakePool(200, kv_heads, dim)
    free_slots = iter((torch.randperm(199) + 1).tolist())  # slot 0 is padding
    table = torch.zeros(9, 40, dtype=torch.int32)
    requests = torch.randperm(9)[: len(prefixes)]
    for request, prefix, n in zip(requests.tolist(), prefixes, rows):
        table[request, : prefix + n] = torch.tensor([next(free_slots) for _ in range(prefix + n)])
    written = [
        0 if j in case.get("slot0_rows", ()) else int(table[request, prefix + j])
        for request, prefix, n in zip(requests.tolist(), prefixes, rows)
        for j in range(n)
    ]
    total, mode = sum(rows), ForwardMode[case["mode"]]
    q = torch.randn(total, heads * dim)
    k, v = torch.randn(2, total, kv_heads, dim)
    seq_lens = [p if mode.is_target_verify() else p + n for p, n in zip(prefixes, rows)]
    forward_batch = SimpleNamespace(
        forward_mode=mode,
        req_pool_indices=requests,
        seq_lens=torch.tensor(seq_lens),
        extend_prefix_lens=torch.tensor(prefixes, dtype=torch.int32),
        extend_seq_lens=torch.tensor(rows, dtype=torch.int32),
        out_cache_loc=torch.tensor(written),
        spec_info=SimpleNamespace(draft_token_num=rows[0], tree_topk=1),
    )
    if case.get("shared_kv"):  # another layer wrote the window; this one hands over no K/V
        pool.k[written], pool.v[written] = k, v
    before = pool.k.clone(), pool.v.clone()

    backend = ReferenceAttnBackend(_runner(table, pool))
    backend.init_forward_metadata(forward_batch)
    kv = (None, None) if case.get("shared_kv") else (k, v)
    kwargs = {"sinks": sinks} if sinks is not None else {}
    save = case.get("save_kv_cache", True)
    out = backend.forward(q, *kv, layer, forward_batch, save_kv_cache=save, **kwargs)

    row = 0
    for request, prefix, n in zip(requests.tolist(), prefixes, rows):
        cached = table[request, :prefix].long()
        for j in range(n):
            keys = torch.cat([before[0][cached], k[row - j : row + 1]])
            values = torch.cat([before[1][cached], v[row - j : row + 1]])
            expected = _dense_row(q[row].view(heads, dim), keys, values, layer, sinks)
            torch.testing.assert_close(out[row].view(heads, dim), torch.tensor(expected), atol=2e-5, rtol=1e-4)
            if save and not case.get("shared_kv") and written[row] != 0:
                assert torch.equal(pool.k[written[row]], k[row]) and torch.equal(pool.v[written[row]], v[row])
            row += 1
    if not save:
        assert torch.equal(pool.k, before[0]) and torch.equal(pool.v, before[1])


@runs_in_fork
def test_multi_step_draft_sees_earlier_drafts() -> None:
    """Step i of the step-by-step drafter sees the committed tokens and the i drafts written before it."""
    from sgl_peagle.cpu.attention import ReferenceMultiStepDraftBackend

    table = torch.arange(60, dtype=torch.int32).view(3, 20)
    draft = ReferenceMultiStepDraftBackend(_runner(table, None), topk=1, num_steps=4)
    draft.init_forward_metadata(SimpleNamespace(req_pool_indices=torch.tensor([2, 0]), seq_lens=torch.tensor([3, 7])))
    assert len(draft.attn_backends) == 3
    for step, backend in enumerate(draft.attn_backends):
        slots = [window.prefix_slots.tolist() for window in backend.windows]
        assert slots == [list(range(40, 43 + step)), list(range(0, 7 + step))]
        assert [(window.first_row, window.num_rows) for window in backend.windows] == [(0, 1), (1, 1)]


@runs_in_fork
def test_attention_refuses_what_it_cannot_do() -> None:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from sgl_peagle.cpu.attention import ReferenceAttnBackend, ReferenceMultiStepDraftBackend

    runner = _runner(torch.zeros(2, 9, dtype=torch.int32), FakePool(9, 2, 8))
    backend = ReferenceAttnBackend(runner)
    tree = SimpleNamespace(
        forward_mode=ForwardMode.TARGET_VERIFY,
        out_cache_loc=None,
        req_pool_indices=torch.tensor([1]),
        seq_lens=torch.tensor([3]),
        spec_info=SimpleNamespace(draft_token_num=4, tree_topk=2),
    )
    with pytest.raises(NotImplementedError, match="speculative-eagle-topk 1"):
        backend.init_forward_metadata(tree)
    with pytest.raises(NotImplementedError, match="speculative-eagle-topk 1"):
        ReferenceMultiStepDraftBackend(runner, topk=2, num_steps=3)

    backend.plan_windows(torch.tensor([1]), [3], [2])
    layer = RadixAttention(4, 8, 1.0, 2, layer_id=0)
    one_row = torch.zeros(1, 32), torch.zeros(1, 2, 8), torch.zeros(1, 2, 8)
    with pytest.raises(RuntimeError, match="init_forward_metadata"):
        backend.forward_extend(*one_row, layer, SimpleNamespace(out_cache_loc=torch.tensor([1])))
    with pytest.raises(NotImplementedError, match="k_rope"):
        backend.forward_extend(*one_row, layer, SimpleNamespace(), k_rope=None)
