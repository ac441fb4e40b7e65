"""PEAGLE in real engines on the tiny trained pair: output equals the target's, drafts equal the oracle's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import TALLY
from harness import EngineFailed, flush, with_engine
from pair import HEAD, TARGET, Comparison, compare, greedy, prompts, read_rounds

NEW_TOKENS = 40
OVERLAP = {"SGL_PEAGLE_CPU_OVERLAP": "1"}
CACHE_WINDOW = {"SGL_PEAGLE_WINDOW": "cache"}

#: One request, then three, then eight: every batch size, and a radix cache that the first ones have warmed.
BATCHES = (slice(0, 1), slice(1, 4), slice(4, 12))


def generate(engine: Any, batches: list[list[list[int]]], new_tokens: int, **sampling: Any) -> list[tuple[str, list[int]]]:
    """(request id, output ids) of every prompt; batches one after the other."""
    params = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True} | sampling
    done = []
    for batch in batches:
        for output in engine.generate(input_ids=batch, sampling_params=params):
            done.append((output["meta_info"]["id"], list(output["output_ids"])))
    return done


def peagle(k: int, **kwargs: Any) -> dict[str, Any]:
    return {
        "model_path": str(TARGET),
        "speculative_algorithm": "PEAGLE",
        "speculative_draft_model_path": str(HEAD),
        "speculative_num_steps": k,
    } | kwargs


def check(
    record: Path, k: int, *, env: dict[str, str] | None = None, warm: bool = True, head: Path = HEAD, **kwargs: Any
) -> Comparison:
    """Run all batches, cold and warm; compare outputs with transformers and every round with the oracle."""
    chosen = prompts(12)
    batches = [[list(p) for p in chosen[part]] for part in BATCHES]
    order = list(chosen) * (2 if warm else 1)

    def use(engine: Any) -> list[tuple[str, list[int]]]:
        return generate(engine, batches * (2 if warm else 1), NEW_TOKENS)

    outputs = with_engine(use, env={"SGL_PEAGLE_RECORD": str(record)} | (env or {}), **peagle(k) | kwargs)
    texts = {}
    TALLY["generations"] += len(outputs)
    for prompt, (rid, output) in zip(order, outputs, strict=True):
        assert tuple(output) == greedy(prompt, NEW_TOKENS), f"output differs for a prompt of {len(prompt)} tokens"
        texts[rid] = prompt + tuple(output)
    result = compare(read_rounds(record), texts, k, head=head)
    assert not result.differences, "\n".join(result.differences[:5])
    assert result.rounds >= len(outputs) * NEW_TOKENS // (k + 2)
    return result


def test_target_alone_equals_transformers() -> None:
    chosen = prompts(12)
    outputs = with_engine(lambda e: generate(e, [[list(p) for p in chosen]], NEW_TOKENS), model_path=str(TARGET))
    assert [tuple(ids) for _, ids in outputs] == [greedy(p, NEW_TOKENS) for p in chosen]


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize(("k", "page"), [(1, 1), (2, 1), (3, 1), (5, 1), (7, 1), (1, 16), (2, 16), (3, 16), (5, 16), (7, 16), (10, 16)])
def test_lossless_and_drafts_equal_the_oracle(k: int, page: int, overlap: bool, tmp_path: Path) -> None:
    check(tmp_path, k, page_size=page, env=OVERLAP if overlap else None)


@pytest.mark.parametrize(("k", "page", "chunk"), [(3, 1, 3), (5, 1, 7), (2, 1, 1), (7, 16, 16)])
def test_chunked_prefill(k: int, page: int, chunk: int, tmp_path: Path) -> None:
    check(tmp_path, k, page_size=page, chunked_prefill_size=chunk)
    kinds = [entry["kind"] for entry in read_rounds(tmp_path)]
    assert "chunk" in kinds, "no prompt was long enough to be chunked"


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "overlap"])
@pytest.mark.parametrize(("k", "page"), [(1, 1), (3, 1), (5, 1), (7, 16), (10, 16)])
def test_backends_that_read_their_window_from_the_cache(k: int, page: int, overlap: bool, tmp_path: Path) -> None:
    """Private mask slots in decode rounds; at prefill only the first draft, and the rest is filler."""
    check(tmp_path, k, page_size=page, env=CACHE_WINDOW | (OVERLAP if overlap else {}))
    first = [entry for entry in read_rounds(tmp_path) if entry["kind"] == "prefill"]
    assert first and all(entry["fallback"] for entry in first)


def test_default_k_and_page_size_follow_from_the_head(tmp_path: Path) -> None:
    """K = 8 from the head's config needs pages of at least 2; the plugin chooses 16."""
    def use(engine: Any) -> tuple[int, int, int]:
        generate(engine, [[list(prompts(1)[0])]], 8)
        info = engine.get_server_info()
        return info["speculative_num_steps"], info["speculative_num_draft_tokens"], info["page_size"]

    assert with_engine(use, **peagle(0) | {"speculative_num_steps": None}) == (8, 9, 16)


def test_the_drafter_has_the_targets_dtype(tmp_path: Path) -> None:
    """--dtype auto: the head's own torch_dtype, here float16, must not meet the target's hidden states."""
    import json
    import shutil

    folder = tmp_path / "head"
    shutil.copytree(HEAD, folder)
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "float16", "torch_dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(config))
    prompt = list(prompts(3)[2])

    def use(engine: Any) -> int:
        return len(generate(engine, [[prompt]], 8)[0][1])

    assert with_engine(use, **peagle(3, dtype="auto", speculative_draft_model_path=str(folder))) == 8


def test_a_weight_update_changes_the_target_and_leaves_the_head(tmp_path: Path) -> None:
    """The same weights again, from disk: SGLang offers them to the drafter, too; serving goes on unchanged."""
    prompt = prompts(3)[2]

    def use(engine: Any) -> tuple[bool, list[int], int]:
        ok = engine.update_weights_from_disk(str(TARGET))[0]
        params = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
        output = engine.generate(input_ids=list(prompt), sampling_params=params)
        return ok, list(output["output_ids"]), output["meta_info"]["spec_verify_ct"]

    ok, ids, rounds = with_engine(use, **peagle(5))
    assert ok and tuple(ids) == greedy(prompt, 24) and rounds < 20


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"speculative_num_steps": 10, "page_size": 1}, ["--page-size 1", "--page-size 16"]),
        ({"speculative_num_steps": 5, "speculative_num_draft_tokens": 5}, ["contradict", "6"]),
        ({"speculative_eagle_topk": 4}, ["--speculative-eagle-topk 4", "chain"]),
        ({"speculative_draft_model_path": None}, ["--speculative-draft-model-path"]),
    ],
    ids=["page-1", "contradiction", "topk", "no-head"],
)
def test_refused_at_start(kwargs: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(EngineFailed) as error:
        with_engine(lambda engine: None, **peagle(5) | kwargs)
    message = str(error.value).split("--- log ---")[0]
    assert "PEagleError" in message and "why:" in message and "fix:" in message
    assert all(word in message for word in words), message


def test_the_pool_is_whole_again(tmp_path: Path) -> None:
    """The free count is the same before the first and after the last request, and no slot leaks on the way."""
    chosen = [list(p) for p in prompts(12)]

    def use(engine: Any) -> None:
        generate(engine, [chosen[:1]], 4)
        flush(engine)
        generate(engine, [chosen[:1], chosen, chosen[4:9]], NEW_TOKENS)
        flush(engine)
        generate(engine, [chosen[:1]], 4)

    with_engine(use, env={"SGL_PEAGLE_RECORD": str(tmp_path)} | OVERLAP, **peagle(5, max_total_tokens=1024))
    free = [entry["free"] for entry in read_rounds(tmp_path) if entry["kind"] == "prefill"]
    assert free[0] == free[1] == free[-1] and min(free) < free[0]


def test_generation_to_the_context_end_leaves_a_neighbour_alone(tmp_path: Path) -> None:
    """Without max_new_tokens a request runs to the end of the context; mask positions pass it."""
    first, second = prompts(2)
    context = 96

    def use(engine: Any) -> list[list[int]]:
        params = [
            {"temperature": 0, "ignore_eos": True, "max_new_tokens": None},
            {"temperature": 0, "ignore_eos": True, "max_new_tokens": 70 - len(second)},
        ]
        outputs = engine.generate(input_ids=[list(first), list(second)], sampling_params=params)
        return [list(o["output_ids"]) for o in outputs]

    for k, page in ((7, 1), (5, 1), (10, 16)):
        plain = with_engine(use, model_path=str(TARGET), context_length=context, page_size=page)
        fast = with_engine(use, **peagle(k, context_length=context, page_size=page))
        shared = min(len(plain[0]), len(fast[0]))
        assert shared >= context - len(first) - 2 * k - 8
        assert fast[0][:shared] == plain[0][:shared] and fast[1] == plain[1]
        assert tuple(fast[1]) == greedy(second, len(fast[1]))
