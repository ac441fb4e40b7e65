"""K, page size and aux layers: decided once, contradictions refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sgl_peagle.aux_layers import capture_points, to_sglang
from sgl_peagle.errors import PEagleError
from sgl_peagle.settings import DEFAULT_K, draft_tokens_per_round


def args(steps=None, tokens=None, topk=None) -> SimpleNamespace:
    return SimpleNamespace(
        speculative_num_steps=steps, speculative_num_draft_tokens=tokens, speculative_eagle_topk=topk
    )


def test_k_from_flags_then_head_then_default() -> None:
    assert draft_tokens_per_round(args(steps=5), 8) == 5
    assert draft_tokens_per_round(args(tokens=6), 8) == 5
    assert draft_tokens_per_round(args(steps=5, tokens=6, topk=1), None) == 5
    assert draft_tokens_per_round(args(), 8) == 8
    assert draft_tokens_per_round(args(), None) == DEFAULT_K == 7


@pytest.mark.parametrize("given", [args(steps=5, tokens=5), args(topk=2), args(steps=0), args(tokens=1)], ids=str)
def test_contradictory_k_is_refused(given: SimpleNamespace) -> None:
    with pytest.raises(PEagleError) as error:
        draft_tokens_per_round(given, None)
    assert "--speculative" in error.value.what or "K=" in error.value.what


def test_capture_points_in_sglang_terms() -> None:
    assert capture_points(None, 32) == (2, 16, 29)
    assert capture_points((2, 10, 18, 26, 34), 36) == (2, 10, 18, 26, 34)
    assert to_sglang((2, 16, 29), "LlamaForCausalLM", 32) == [1, 15, 28]
    # gpt_oss adds 1 to its ids, except when the largest is the layer count.
    assert to_sglang((2, 12, 21), "GptOssForCausalLM", 24) == [1, 11, 20]
    assert to_sglang((2, 12, 24), "GptOssForCausalLM", 24) == [2, 12, 24]
    with pytest.raises(PEagleError, match="last layer"):
        to_sglang((2, 16, 32), "LlamaForCausalLM", 32)
    with pytest.raises(PEagleError, match="beyond"):
        capture_points((2, 40), 32)
    with pytest.raises(PEagleError, match="distinct"):
        capture_points(None, 4)
