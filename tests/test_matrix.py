"""The long matrix (`make test-full`): every way requests meet, against the same engine without speculation.

One list of requests of all kinds is served by a plain engine once and by a PEAGLE engine for every K, page size
and scheduling mode, in batches of 1, 3, 8 and 16. Outputs, texts and finish reasons must be equal, and every
recorded round must equal the oracle's.
"""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import Any

import pytest
from conftest import TALLY
from harness import flush, import_sglang, with_engine
from pair import TARGET, compare, greedy, prompts, read_rounds, tokenizer
from test_engine import CACHE_WINDOW, OVERLAP, generate, peagle

Request = tuple[tuple[int, ...], dict[str, Any]]


@functools.lru_cache(maxsize=1)
def requests() -> list[Request]:
    """All kinds: lengths 1.., natural ends, stop tokens and strings inside an accepted run, one-token prompts."""
    chosen = prompts(24)
    listed: list[Request] = []
    for i, prompt in enumerate(chosen):
        listed.append((prompt, {"max_new_tokens": 1 + 7 * i % 40, "ignore_eos": True}))
    for i, prompt in enumerate(chosen[:12]):
        text = greedy(prompt, 40)
        listed.append((prompt, {"max_new_tokens": 40, "stop_token_ids": [text[3 + i]]}))
    for i, prompt in enumerate(chosen[12:]):
        # Not across the end token: where a stop string and the end token are accepted in one round, SGLang lets
        # the string win, whatever the algorithm.
        text = tuple(t for t in greedy(prompt, 40) if t not in tokenizer().all_special_ids)
        piece = tokenizer().decode(text[5 + i : 8 + i])
        listed.append((prompt, {"max_new_tokens": 40, "stop": [piece]}))
    listed += [(prompt, {"max_new_tokens": 60}) for prompt in chosen[:8]]  # to the natural end
    return listed


def serve(engine: Any, batch_sizes: tuple[int, ...]) -> list[tuple[str, list[int], str, Any]]:
    """(request id, output ids, text, finish reason) of every request, for each batch size in turn."""
    done = []
    for size in batch_sizes:
        for start in range(0, len(requests()), size):
            part = requests()[start : start + size]
            outputs = engine.generate(
                input_ids=[list(prompt) for prompt, _ in part],
                sampling_params=[{"temperature": 0} | params for _, params in part],
            )
            for o in outputs:
                done.append((o["meta_info"]["id"], list(o["output_ids"]), o["text"], o["meta_info"]["finish_reason"]))
    return done


@functools.lru_cache(maxsize=1)
def plain() -> list[tuple[list[int], str, Any]]:
    """The same requests without speculation."""
    served = with_engine(lambda e: serve(e, (16,)), model_path=str(TARGET), max_running_requests=16, timeout=300)
    return [(ids, text, reason) for _, ids, text, reason in served]


def check_against_plain(served: list[tuple[str, list[int], str, Any]], record: Path, k: int) -> None:
    expected = plain()
    texts = {}
    for n, (rid, ids, text, reason) in enumerate(served):
        prompt, params = requests()[n % len(expected)]
        assert (ids, text, reason) == expected[n % len(expected)], f"request {n % len(expected)} {params}"
        texts[rid] = prompt + tuple(ids)
    TALLY["generations"] += len(served)
    result = compare(read_rounds(record), texts, k)
    assert not result.differences, "\n".join(result.differences[:5])


GRID = [(k, page) for k in range(1, 11) for page in (1, 16, 64) if page > 1 or k <= 7]


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize(("k", "page"), GRID)
def test_all_kinds_of_requests(k: int, page: int, overlap: bool, tmp_path: Path) -> None:
    sizes = (1, 3, 8, 16) if page == 16 or k in (3, 7) else (3, 16)
    served = with_engine(
        lambda engine: serve(engine, sizes),
        env={"SGL_PEAGLE_RECORD": str(tmp_path)} | (OVERLAP if overlap else {}),
        timeout=580,
        **peagle(k, page_size=page, max_running_requests=16, max_total_tokens=8192),
    )
    check_against_plain(served, tmp_path, k)


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
def test_all_kinds_of_requests_quickly(overlap: bool, tmp_path: Path) -> None:
    """The part of the matrix that runs in `make test`."""
    served = with_engine(
        lambda engine: serve(engine, (3,) if overlap else (16,)),
        env={"SGL_PEAGLE_RECORD": str(tmp_path)} | (OVERLAP if overlap else {}),
        timeout=300,
        **peagle(5, max_running_requests=16, max_total_tokens=8192),
    )
    check_against_plain(served, tmp_path, 5)


@pytest.mark.slow
@pytest.mark.parametrize("k", [4, 7])
def test_chunk_edges_at_every_offset(k: int, tmp_path: Path) -> None:
    """Chunks of 1..14 tokens over prompts of 1..14 tokens: the masks always stand behind the last chunk."""
    long = next(p for p in prompts(24) if len(p) >= 14)
    cut = [long[:n] for n in range(1, 15)]
    for chunk in range(1, 15):
        record = tmp_path / str(chunk)
        outputs = with_engine(
            lambda engine: generate(engine, [[list(p)] for p in cut], 12),
            env={"SGL_PEAGLE_RECORD": str(record)},
            **peagle(k, page_size=1, chunked_prefill_size=chunk, disable_radix_cache=True),
        )
        texts = {rid: p + tuple(ids) for p, (rid, ids) in zip(cut, outputs, strict=True)}
        assert [tuple(ids) for _, ids in outputs] == [greedy(p, 12) for p in cut]
        TALLY["generations"] += len(outputs)
        result = compare(read_rounds(record), texts, k)
        assert not result.differences, "\n".join(result.differences[:5])


async def _staggered(engine: Any, aborted: set[int]) -> list[Any]:
    """Requests that join while others run; some are aborted on the way."""
    chosen = prompts(24)

    async def one(i: int) -> Any:
        await asyncio.sleep(0.03 * i)
        params = {"temperature": 0, "max_new_tokens": 10 + (5 * i) % 50, "ignore_eos": True}
        if i in aborted:
            params["max_new_tokens"] = 400
        return await engine.async_generate(input_ids=list(chosen[i]), sampling_params=params, rid=f"r{i}")

    async def cut(i: int) -> None:
        await asyncio.sleep(0.03 * i + 0.25)
        engine.tokenizer_manager.abort_request(rid=f"r{i}")

    outputs = await asyncio.gather(*(one(i) for i in range(24)), *(cut(i) for i in aborted))
    return outputs[:24]


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize(("k", "page"), [(3, 1), (7, 16)])
def test_joining_leaving_and_aborted_requests(k: int, page: int, overlap: bool, tmp_path: Path) -> None:
    aborted = {5, 11, 17}

    def use(engine: Any) -> list[Any]:
        generate(engine, [[list(prompts(1)[0])]], 4)
        flush(engine)
        outputs = engine.loop.run_until_complete(_staggered(engine, aborted))
        flush(engine)
        generate(engine, [[list(prompts(1)[0])]], 4)
        return [(o["output_ids"], o["meta_info"]["finish_reason"]["type"]) for o in outputs]

    outputs = with_engine(
        use, env={"SGL_PEAGLE_RECORD": str(tmp_path)} | (OVERLAP if overlap else {}), **peagle(k, page_size=page)
    )
    texts = {}
    for i, (prompt, (ids, reason)) in enumerate(zip(prompts(24), outputs, strict=True)):
        assert reason == ("abort" if i in aborted else "length"), i
        wanted = greedy(prompt, 10 + (5 * i) % 50 if i not in aborted else len(ids))
        assert tuple(ids) == wanted[: len(ids)] and (i in aborted or len(ids) == len(wanted))
        texts[f"r{i}"] = prompt + tuple(ids)
    assert all(len(outputs[i][0]) < 400 for i in aborted), "no request was cut short"
    TALLY["generations"] += len(outputs)
    rounds = read_rounds(tmp_path)
    result = compare(rounds, texts, k)
    assert not result.differences, "\n".join(result.differences[:5])
    free = [entry["free"] for entry in rounds if entry["kind"] == "prefill"]
    assert free[0] == free[-1], "slots were lost"


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize(("k", "page", "env"), [(3, 1, {}), (7, 16, {}), (5, 1, CACHE_WINDOW)], ids=["3-1", "7-16", "cache"])
def test_retraction_under_a_tight_pool(k: int, page: int, env: dict[str, str], overlap: bool, tmp_path: Path) -> None:
    """Eight requests in a pool for about four: some are retracted and prefilled again."""
    chosen = [list(p) for p in prompts(12)[4:12]]

    def use(engine: Any) -> list[tuple[str, list[int]]]:
        generate(engine, [chosen[:1]], 4)
        flush(engine)
        outputs = generate(engine, [chosen], 90)
        flush(engine)
        generate(engine, [chosen[:1]], 4)
        return outputs

    import_sglang()
    from sglang.srt.managers import schedule_policy

    # Admit by the next few tokens only (SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION, read when SGLang is imported).
    estimation, schedule_policy.CLIP_MAX_NEW_TOKENS = schedule_policy.CLIP_MAX_NEW_TOKENS, 4
    try:
        outputs = with_engine(
            use,
            env={"SGL_PEAGLE_RECORD": str(tmp_path)} | env | (OVERLAP if overlap else {}),
            timeout=300,
            **peagle(k, page_size=page, max_total_tokens=448, schedule_conservativeness=0.05),
        )
    finally:
        schedule_policy.CLIP_MAX_NEW_TOKENS = estimation
    texts = {rid: tuple(p) + tuple(ids) for p, (rid, ids) in zip(chosen, outputs, strict=True)}
    assert [tuple(ids) for _, ids in outputs] == [greedy(tuple(p), 90) for p in chosen]
    TALLY["generations"] += len(outputs)
    rounds = read_rounds(tmp_path)
    prefills = [entry["rid"] for entry in rounds if entry["kind"] == "prefill"]
    assert any(prefills.count(rid) > 1 for rid in texts), "nothing was retracted: the pool is too large for this test"
    result = compare(rounds, texts, k)
    assert not result.differences, "\n".join(result.differences[:5])
    free = [entry["free"] for entry in rounds if entry["kind"] == "prefill"]
    assert free[0] == free[-1], "slots were lost"


def verify_rounds(engine: Any, batches: list[list[list[int]]], new_tokens: int) -> list[int]:
    """Verify rounds of every prompt: fewer rounds for the same tokens is a longer acceptance length."""
    params = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    return [
        output["meta_info"]["spec_verify_ct"]
        for batch in batches
        for output in engine.generate(input_ids=batch, sampling_params=params)
    ]


def test_acceptance_is_the_same_everywhere() -> None:
    """AL of the same prompts at every batch size, page size, chunking and cache state (within 0.02)."""
    chosen, new = [list(p) for p in prompts(16)], 48

    def alone(engine: Any) -> list[list[int]]:
        singles = verify_rounds(engine, [[p] for p in chosen], new)
        warm = verify_rounds(engine, [[p] for p in chosen], new)
        flush(engine)
        return [singles, warm, verify_rounds(engine, [chosen[:3], chosen[3:]], new)]

    runs = with_engine(alone, **peagle(5, page_size=1, max_running_requests=16))
    for changes in ({"page_size": 16}, {"page_size": 64}, {"chunked_prefill_size": 5}):
        runs += [with_engine(lambda e: verify_rounds(e, [chosen], new), **peagle(5, max_running_requests=16, **changes))]
    lengths = [len(chosen) * (new - 1) / sum(run) for run in runs]
    assert max(lengths) - min(lengths) <= 0.02, lengths
