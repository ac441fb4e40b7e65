"""The drafter batch, against a plain-Python construction of it."""

from __future__ import annotations

import random

import pytest
import torch

from sgl_peagle.kernels.expand import SHARED_HIDDEN, expand_decode, expand_prefill
from sgl_peagle.kernels.hidden import window_hidden

MASK = 499


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("k", [1, 2, 3, 5, 7, 10])
def test_decode_window(k: int, private: bool) -> None:
    chooser = random.Random(k)
    for bs in (1, 2, 5):
        width, verify = 2 * k, k + 1
        accepts = [chooser.randint(1, k + 1) for _ in range(bs)]
        lengths = [chooser.randint(1, 40) for _ in range(bs)]
        table_rows = chooser.sample(range(1, 20), bs)
        table = torch.randint(1, 10_000, (20, 48 + 2 * k), dtype=torch.int32)
        predicted = torch.randint(1, 400, (bs * verify,), dtype=torch.int32)
        rows = expand_decode(
            predicted,
            torch.tensor(accepts, dtype=torch.int32),
            torch.tensor(lengths),
            torch.tensor(table_rows),
            table,
            k=k,
            mask_token_id=MASK,
            private_mask_slots=private,
        )
        ids, locs, hidden, masks, dead, sampled = [], [], [], [], [], []
        for i, (a, s) in enumerate(zip(accepts, lengths)):
            for j in range(width):
                slot = int(table[table_rows[i], s + j])
                masks.append(a <= j <= a + k - 2)
                dead.append(j > a + k - 2)
                ids.append(int(predicted[i * verify + j]) if j < a else MASK if masks[-1] else 0)
                locs.append(slot if j < a or (masks[-1] and private) else 0)
                hidden.append(i * verify + j if j < a else SHARED_HIDDEN if masks[-1] else None)
            sampled += [i * width + a - 1 + draft for draft in range(k)]
        assert rows.input_ids.tolist() == ids
        assert rows.cache_locs.tolist() == locs
        assert rows.is_mask.tolist() == masks and rows.is_dead.tolist() == dead
        got = rows.hidden_rows.tolist()
        assert all(want is None or want == have for want, have in zip(hidden, got))
        assert all(0 <= have < bs * verify for want, have in zip(hidden, got) if want is None)
        assert rows.positions.tolist() == [s + j for s in lengths for j in range(width)]
        assert rows.sampled_rows.tolist() == sampled
        assert rows.starts.tolist() == [i * width for i in range(bs)] and set(rows.lengths.tolist()) == {width}


def test_decode_window_at_the_end_of_the_request_row() -> None:
    """Dead rows past the end of req_to_token are clamped, and still go to the padding slot."""
    table = torch.arange(1, 21, dtype=torch.int32).view(2, 10)
    rows = expand_decode(
        torch.arange(1, 9), torch.tensor([2]), torch.tensor([6]), torch.tensor([1]), table, k=7, mask_token_id=MASK,
        private_mask_slots=False,
    )  # fmt: skip
    assert rows.cache_locs.tolist() == [17, 18, *[0] * 12]


@pytest.mark.parametrize("k", [1, 2, 4, 7])
def test_prefill_rows(k: int) -> None:
    chooser = random.Random(k)
    for _ in range(20):
        bs = chooser.randint(1, 4)
        lens = [chooser.choice([1, 1, 2, 5, 9]) for _ in range(bs)]
        prefixes = [chooser.randint(0, 8) for _ in range(bs)]
        masks = [chooser.choice([0, k - 1]) for _ in range(bs)]
        prompt = torch.randint(1, 400, (sum(lens),))
        tails = torch.randint(1, 400, (bs,), dtype=torch.int32)
        slots = torch.randint(1, 9999, (sum(lens),))
        rows = expand_prefill(
            prompt, tails, slots, extend_lens=lens, prefix_lens=prefixes, num_masks=masks, k=k, mask_token_id=MASK
        )
        ids, locs, hidden, positions, sampled = [], [], [], [], []
        source = 0
        for i, n in enumerate(lens):
            chunk = prompt[source : source + n].tolist()
            first_mask = len(ids) + n
            ids += [*chunk[1:], int(tails[i]), *[MASK] * masks[i]]
            locs += [*slots[source : source + n].tolist(), *[0] * masks[i]]
            hidden += [*range(source, source + n), *[SHARED_HIDDEN] * masks[i]]
            positions += [prefixes[i] + j for j in range(n + masks[i])]
            sampled += [min(first_mask - 1 + draft, len(ids) - 1) for draft in range(k)]
            source += n
        assert rows.input_ids.tolist() == ids
        assert rows.cache_locs.tolist() == locs
        assert rows.hidden_rows.tolist() == hidden
        assert rows.positions.tolist() == positions
        assert rows.sampled_rows.tolist() == sampled
        assert rows.is_mask.tolist() == [h == SHARED_HIDDEN for h in hidden] and not rows.is_dead.any()
        assert rows.lengths.tolist() == [n + m for n, m in zip(lens, masks)]


def test_masks_are_written_after_the_real_rows() -> None:
    projected = torch.arange(6.0).view(3, 2)
    shared = torch.tensor([7.0, 8.0])
    rows = torch.tensor([2, SHARED_HIDDEN, 0, SHARED_HIDDEN])
    assert window_hidden(projected, rows, shared).tolist() == [[4, 5], [7, 8], [0, 1], [7, 8]]
