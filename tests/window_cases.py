"""The window attention kernel against its reference: random batches, part of ``kernel_cases.py``.

The interpreter's ``tl.dot`` multiplies bfloat16 as the integers that hold it, so bfloat16 runs on a GPU only.
Everything a launch is compiled for is fixed per case and only lengths and values change with the seed: more seeds
cost no more compilations.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass

import torch

from sgl_peagle.kernels import window_attention, window_attention_triton

TOLERANCE = {torch.float32: 3e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SLOTS, LONGEST = 1500, 700


@dataclass(frozen=True)
class Case:
    """One shape. ``cache`` None: the type of q. ``splits`` None: as planned for the device, ``steps`` included."""

    bs: int
    k: int
    group: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    splits: int | None = None
    steps: int = 1  # fewest steps of a split
    cache: torch.dtype | None = None
    logit_cap: float = 0.0
    fused: bool = False  # q, k and v are slices of one tensor, as a projection leaves them


def cases(device: str) -> list[Case]:
    """Every k with each head dimension; batch sizes, groups, splits, types and options take turns."""
    low = (torch.bfloat16, torch.float16) if device == "cuda" else (torch.float16, torch.float16)
    found = []
    for i in range(30):
        k, head_dim = i % 10 + 1, (64, 80, 128)[i // 10]
        group, dtype = (4, 1, 8, 3, 2)[(i + i // 10) % 5], (*low, torch.float32)[(i + i // 10) % 3]
        cache = FP8[i // 4 % 2] if i % 4 == 1 else None
        # A wide batch has one kv head, so that an interpreted case takes a second.
        bs, kv_heads = (i % 9 + 1, 1) if i % 3 else (i % 3 + 1, 3)
        splits, steps, cap = i * 3 % 8 + 1, i // 3 % 3 + 1, 20.0 if i % 5 == 2 else 0.0
        found.append(Case(bs, k, group, kv_heads, head_dim, dtype, splits, steps, cache, cap, fused=i % 2 == 0))
    found += [Case(2, 7, 4, 2, 128, low[0]), Case(1, 3, 4, 2, 96, low[0]), Case(2, 16, 4, 1, 128, low[1])]
    if device == "cuda":
        found += [Case(bs, k, 4, 8, 128, low[0]) for k in (3, 7) for bs in (1, 8, 64)]
        found += [Case(8, 7, 4, 8, 128, low[0], cache=FP8[0]), Case(8, 5, 2, 4, 256, low[0])]
        found += [Case(33, 5, 8, 8, 64, low[0])]
    return found


def check(case: Case, device: str, seed: int) -> None:
    """Raises AssertionError if the kernel and the reference differ, or a value is read that no row may see."""
    name = f"{case} seed {seed}"
    torch.manual_seed(seed)
    chooser, width, heads = random.Random(name), 2 * case.k, case.group * case.kv_heads
    rows, cache = case.bs * width, case.cache or case.dtype
    fused = torch.randn(rows, heads + 2 * case.kv_heads, case.head_dim).to(case.dtype).to(device)
    q, k, v = fused.split([heads, case.kv_heads, case.kv_heads], dim=1)
    if not case.fused:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    lengths = [chooser.choice((0, 1, 64, 128, chooser.randint(0, LONGEST))) for _ in range(case.bs)]
    lengths[chooser.randrange(case.bs)] = chooser.randint(LONGEST // 2, LONGEST)
    indptr = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    # What no prefix names must not be read: slot 0 (padding) and the others hold NaN, the list's tail slot -1.
    slots = torch.randint(1, SLOTS, (sum(lengths),))
    indices = torch.cat([slots, torch.full((9,), -1)])
    buffers = []
    for _ in range(2):
        values = torch.full((SLOTS + 8, case.kv_heads, case.head_dim), float("nan"))
        values[8 + slots] = torch.randn(len(slots), case.kv_heads, case.head_dim)
        buffers.append(values.to(cache).to(device)[8:])
    arguments = (q, k, v, *buffers, indptr.to(device), indices.to(device))
    scales = (0.7, 1.6) if case.cache else (1.0, 1.0)
    options = {
        "width": width, "scaling": case.head_dim**-0.5, "logit_cap": case.logit_cap, "k_scale": scales[0],
        "v_scale": scales[1],
    }  # fmt: skip
    assert not window_attention.stock_reason(
        q, k, v, *buffers, width=width, requests=case.bs, causal=True, custom_mask=None, row_counts=[width] * case.bs
    )
    launch = None
    if case.splits is not None:
        plan = (case.bs, width, heads, case.kv_heads, case.head_dim, q.element_size(), 132)
        launch = window_attention.plan_launch(*plan)
        launch = dataclasses.replace(launch, splits=case.splits, min_chunk=case.steps * launch.block_n)
    have, want = (torch.full((rows, heads, case.head_dim), float("nan"), dtype=case.dtype, device=device) for _ in "hw")
    window_attention_triton.window_attention(*arguments, have, launch=launch, **options)
    window_attention.window_attention_reference(*arguments, want, **options)
    tolerance = TOLERANCE[case.dtype]
    error = ((have.float() - want.float()).abs() / (1 + want.float().abs())).max().item()
    assert error <= tolerance, f"{name}, prefixes {lengths}: {error} > {tolerance}"


def check_replays(seeds: int) -> None:
    """On a GPU: one captured launch per batch size serves all prefix lengths that its buffers get afterwards."""
    width, heads, kv_heads, dim, dtype = 14, 32, 8, 128, torch.bfloat16
    for bs in (1, 8, 64):
        q, k, v = (torch.randn(bs * width, n, dim, device="cuda", dtype=dtype) for n in (heads, kv_heads, kv_heads))
        buffers = [torch.randn(SLOTS, kv_heads, dim, device="cuda", dtype=dtype) for _ in "kv"]
        indptr = torch.arange(bs + 1, device="cuda", dtype=torch.int32)
        indices = torch.zeros(bs * LONGEST * 4, device="cuda", dtype=torch.int64)
        out = torch.empty_like(q)
        arguments, options = (q, k, v, *buffers, indptr, indices), {"width": width, "scaling": dim**-0.5}

        def launch() -> None:
            window_attention.window_attention(*arguments, out, **options)

        launch()  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        for seed in range(seeds):
            chooser = random.Random(f"{bs}-{seed}")
            lengths = [chooser.choice((0, 1, chooser.randint(0, 4 * LONGEST))) for _ in range(bs)]
            indptr.copy_(torch.tensor([0, *lengths]).cumsum(0))
            indices.random_(0, SLOTS)
            q.normal_()
            out.fill_(float("nan"))
            graph.replay()
            want = window_attention.window_attention_reference(*arguments, torch.empty_like(q), **options)
            error = ((out - want).float().abs() / (1 + want.float().abs())).max().item()
            assert error <= TOLERANCE[dtype], f"replay of {bs} windows, prefixes {lengths}: {error}"
