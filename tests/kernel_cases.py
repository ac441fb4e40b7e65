"""The Triton kernels against their references over random shapes, for whichever device they can run on.

``python kernel_cases.py DEVICE SEEDS``. On the CPU that needs ``TRITON_INTERPRET=1`` in the environment before Triton is
imported, and on a GPU it initialises CUDA, which no forked test engine would survive; so ``test_kernels.py`` starts it
as a process of its own. ``bench/gpu_kernels.py`` calls the same functions.
"""

from __future__ import annotations

import dataclasses
import os
import random
import sys
from typing import Callable

import torch
import window_cases

from sgl_peagle.kernels import expand, expand_triton, hidden, hidden_triton, window_attention

MASK_ID = 499
INT_TYPES = (torch.int32, torch.int64)
FLOAT_TYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDTHS = (64, 96, 576, 1024, 2880, 4096)

#: (batch size, k): every k, odd and even batches, more rows than one block.
DECODE_SHAPES = [(bs, k) for k in range(1, 17) for bs in (1, 2, 3)] + [(64, 7), (33, 16), (257, 1), (130, 5)]


def compare(name: str, kernel: expand.DrafterRows, reference: expand.DrafterRows) -> None:
    """Every field has the same type and values; a dead row's hidden row only has to be the reference's too."""
    for field in dataclasses.fields(expand.DrafterRows):
        have, want = getattr(kernel, field.name), getattr(reference, field.name)
        assert have.dtype == want.dtype and have.shape == want.shape, f"{name}: {field.name} {have.dtype} {have.shape}"
        if not torch.equal(have, want):
            where = (have != want).nonzero().flatten()[:5].tolist()
            raise AssertionError(f"{name}: {field.name} differs at {where}: {have[where]} for {want[where]}")


def check_decode(bs: int, k: int, device: str, seed: int) -> None:
    """One random verify batch, both slot policies; some requests end at the end of their request row."""
    chooser = random.Random(f"{bs}-{k}-{seed}")
    width = chooser.choice((40, 64, 131))
    accepts = torch.tensor([chooser.randint(1, k + 1) for _ in range(bs)])
    if chooser.random() < 0.3:
        accepts[:] = k + 1
    lengths = torch.tensor([chooser.choice((0, 1, width - 1, chooser.randint(0, width - 1))) for _ in range(bs)])
    pool = bs + chooser.randint(1, 9)
    requests = torch.tensor(chooser.sample(range(pool), bs))
    # A table inside a wider one: rows are not contiguous with each other.
    table = torch.randint(1, 2**31 - 1, (pool, width + 5), dtype=torch.int32).to(device)[:, :width]
    predicted = torch.randint(0, 150_000, (bs * (k + 1),))
    inputs = [t.to(chooser.choice(INT_TYPES)).to(device) for t in (predicted, accepts, lengths, requests)]
    for private in (False, True):
        options = {"k": k, "mask_token_id": MASK_ID, "private_mask_slots": private}
        kernel = expand_triton.expand_decode(*inputs, table, **options)
        reference = expand.expand_decode_reference(*inputs, table, **options)
        compare(f"decode bs {bs} k {k} private {private}", kernel, reference)


def check_prefill(bs: int, k: int, device: str, seed: int, longest: int = 40) -> None:
    """One random ragged prompt batch: one-token extends, cached prefixes, unfinished chunks."""
    chooser = random.Random(f"{bs}-{k}-{seed}-prefill")
    lens = [chooser.choice((1, 1, 2, chooser.randint(1, longest))) for _ in range(bs)]
    lens[chooser.randrange(bs)] = longest
    options = {
        "extend_lens": lens,
        "prefix_lens": [chooser.choice((0, chooser.randint(0, 5000))) for _ in range(bs)],
        "num_masks": [chooser.choice((0, k - 1)) for _ in range(bs)],
        "k": k,
        "mask_token_id": MASK_ID,
    }
    inputs = [
        torch.randint(0, 150_000, (size,)).to(chooser.choice(INT_TYPES)).to(device) for size in (sum(lens), bs, sum(lens))
    ]
    kernel = expand_triton.expand_prefill(*inputs, **options)
    compare(f"prefill bs {bs} k {k} {lens}", kernel, expand.expand_prefill_reference(*inputs, **options))


def check_hidden(width: int, rows: int, dtype: torch.dtype, device: str, seed: int) -> None:
    """Random gathers with repeated, missing and mask rows; sometimes only masks, sometimes none."""
    chooser = random.Random(f"{width}-{rows}-{seed}")
    sources = chooser.randint(1, rows)
    projected = torch.randn(sources, width).to(dtype).to(device)
    shared = torch.randn(width).to(dtype).to(device)
    masks = chooser.choice((0.0, 0.4, 1.0))
    chosen = [expand.SHARED_HIDDEN if chooser.random() < masks else chooser.randrange(sources) for _ in range(rows)]
    index = torch.tensor(chosen, device=device)
    have = hidden_triton.window_hidden(projected, index, shared)
    want = hidden.window_hidden_reference(projected, index, shared)
    assert have.dtype == want.dtype and torch.equal(have, want), f"hidden {rows} x {width} {dtype}"


def check_all(device: str, seeds: int, report: Callable[[str], None] = print) -> int:
    """All shapes, ``seeds`` times; the number of comparisons.

    Raises:
        AssertionError: A kernel and its reference differ.
    """
    torch.manual_seed(0)
    names = ("expand_decode", "expand_prefill", "window_hidden", "window_attention")
    checks: dict[str, list[Callable[[], None]]] = {name: [] for name in names}
    for seed in range(seeds):
        for bs, k in DECODE_SHAPES:
            checks["expand_decode"].append(lambda bs=bs, k=k, s=seed: check_decode(bs, k, device, s))
        for k in range(1, 17):
            for bs in (1, 3):
                checks["expand_prefill"].append(lambda bs=bs, k=k, s=seed: check_prefill(bs, k, device, s))
        checks["expand_prefill"].append(lambda s=seed: check_prefill(5, 7, device, s, longest=2500))
        for width in WIDTHS:
            for dtype in FLOAT_TYPES:
                checks["window_hidden"].append(lambda w=width, d=dtype, s=seed: check_hidden(w, 23, d, device, s))
        for case in window_cases.cases(device):
            checks["window_attention"].append(lambda c=case, s=seed: window_cases.check(c, device, s))
    for name, calls in checks.items():
        for call in calls:
            call()
        report(f"{name}: {len(calls)} random batches equal the reference")
    return sum(map(len, checks.values()))


def check_no_synchronisation() -> None:
    """The calls that the worker makes never wait for the GPU (torch raises if one does)."""

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, device="cuda")

    predicted, accept, length, request, prompt = ints(1, 2, 3, 4), ints(2), ints(5), ints(1), ints(1, 2)
    table = torch.ones(2, 40, dtype=torch.int32, device="cuda")
    projected, shared = torch.randn(4, 64, device="cuda"), torch.randn(64, device="cuda")
    q, kv = (torch.randn(4, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2))
    bounds = torch.tensor((0, 1, 2), device="cuda", dtype=torch.int32)
    options = {"k": 3, "mask_token_id": MASK_ID}

    def calls() -> None:
        window = expand.expand_decode(predicted, accept, length, request, table, private_mask_slots=False, **options)
        expand.expand_prefill(prompt, accept, prompt, extend_lens=[2], prefix_lens=[0], num_masks=[2], **options)
        hidden.window_hidden(projected, window.hidden_rows, shared)
        window_attention.window_attention(q, kv, kv, kv, kv, bounds, prompt, torch.empty_like(q), width=2, scaling=1.0)

    calls()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        calls()
    finally:
        torch.cuda.set_sync_debug_mode("default")


if __name__ == "__main__":
    check_all(device=sys.argv[1], seeds=int(sys.argv[2]))
    if sys.argv[1] == "cuda":
        check_no_synchronisation()
        # Without the caching allocator (under compute-sanitizer) nothing can be allocated during a capture.
        if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") != "1":
            window_cases.check_replays(int(sys.argv[2]))
