"""The radix cache with PEAGLE: a warm prefix changes nothing but the work saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import flush, with_engine
from pair import TARGET, greedy, prompts, read_rounds
from test_engine import OVERLAP, generate, peagle

NEW = 24


@pytest.mark.parametrize("page", [1, 4, 16])
def test_acceptance_is_the_same_cold_and_warm_at_every_offset(page: int) -> None:
    """A hit that ends anywhere within a page: same output, same number of rounds."""
    long = max(prompts(24), key=len)
    base = 20
    assert len(long) >= base + 16
    cut = [list(long[: base + offset]) for offset in range(16)]
    params = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}

    def use(engine: Any) -> tuple[list[Any], list[Any]]:
        def run(prompt: list[int]) -> Any:
            o = engine.generate(input_ids=prompt, sampling_params=params)
            return list(o["output_ids"]), o["meta_info"]["spec_verify_ct"], o["meta_info"]["cached_tokens"]

        cold = []
        for prompt in cut:
            flush(engine)
            cold.append(run(prompt))
        flush(engine)
        run(list(long))
        return cold, [run(prompt) for prompt in cut]

    cold, warm = with_engine(use, **peagle(5, page_size=page))
    for prompt, (cold_ids, cold_rounds, cold_hit), (warm_ids, warm_rounds, warm_hit) in zip(cut, cold, warm):
        assert tuple(cold_ids) == greedy(tuple(prompt), NEW) == tuple(warm_ids)
        assert cold_rounds == warm_rounds, f"prompt of {len(prompt)}: {cold_rounds} cold, {warm_rounds} warm"
        assert cold_hit == 0 and warm_hit >= (len(prompt) - 1) // page * page - page


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
def test_shared_pages_are_never_written(overlap: bool, tmp_path: Path) -> None:
    """Many requests on one prefix leave the prefix's KV, the target's and the drafter's, bit for bit as it was."""
    shared = list(max(prompts(24), key=len))
    prefix = len(shared) // 4 * 4 - 4
    tails = [list(p)[:6] for p in prompts(12)]
    env = {"SGL_PEAGLE_RECORD": str(tmp_path), "SGL_PEAGLE_RECORD_KV": "1"} | (OVERLAP if overlap else {})

    def use(engine: Any) -> list[tuple[str, list[int]]]:
        first = generate(engine, [[shared]], 4)
        return first + generate(engine, [[shared + tail for tail in tails]], NEW) + generate(engine, [[shared]], 4)

    outputs = with_engine(use, env=env, **peagle(5, page_size=4, max_running_requests=16))
    rounds = read_rounds(tmp_path)
    ends = [[r for r in rounds if r["rid"] == outputs[i][0]] for i in (0, -1)]
    before, after = (torch.load(tmp_path / end[0]["kv"]) for end in ends)
    assert ends[1][0]["prefix"] >= prefix, "the prefix was not served from the cache"
    assert len(before) == 2 + 8  # layers of the head and of the target
    for (k, v), (later_k, later_v) in zip(before, after, strict=True):
        assert torch.isfinite(k).all() and torch.isfinite(v).all()
        assert torch.equal(k[:prefix], later_k[:prefix]) and torch.equal(v[:prefix], later_v[:prefix])


@pytest.mark.parametrize("page", [1, 16])
def test_prefix_reuse_is_that_of_the_target_alone(page: int) -> None:
    """A replay of conversations that share prefixes: the share of cached prompt tokens, within 2 points."""
    text = [token for p in prompts(40) for token in p]
    replay = []
    for base in (text[:101], text[50:177], text[90:243], text[150:390]):
        replay += [base] + [base + list(p)[:10] * turn for turn in (1, 2) for p in prompts(24)[12:18]]

    def use(engine: Any) -> float:
        params = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
        metas = [engine.generate(input_ids=p, sampling_params=params)["meta_info"] for p in replay]
        return sum(m["cached_tokens"] for m in metas) / sum(m["prompt_tokens"] for m in metas)

    alone = with_engine(use, model_path=str(TARGET), page_size=page)
    with_peagle = with_engine(use, **peagle(5, page_size=page))
    assert alone > 0.5
    assert abs(alone - with_peagle) <= 0.02, (alone, with_peagle)
