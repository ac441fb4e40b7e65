"""Sampled output follows the target's distribution: chi-square against the exact probabilities of short texts.

Verification samples on a CUDA GPU only (SGLang's CPU path is greedy at any temperature), so the engines run there. The
statistics are tested here: the same test must fail for a sampler that is a little wrong.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any, Sequence

import harness
import pair
import pytest
import torch
from harness import with_engine
from scipy.stats import chi2
from test_engine import peagle

#: Draws of each engine and prompt. Cells expected less than LEAST times are pooled.
DRAWS, LENGTH, LEAST = 6000, 5, 12
TEMPERATURE = 1.5


def probability(model: Any, prompt: Sequence[int], text: Sequence[int], temperature: float) -> float:
    """The target's exact probability of the continuation ``text``, from transformers in float32."""
    ids = torch.tensor([list(prompt) + list(text)])
    with torch.inference_mode():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].double() / temperature
    chosen = logits.log_softmax(-1).gather(1, torch.tensor(text)[:, None])
    return float(chosen.sum().exp())


def p_value(draws: Sequence[tuple[int, ...]], prompt: Sequence[int], temperature: float = TEMPERATURE) -> tuple[float, int]:
    """Chi-square p-value of drawn continuations under the target's distribution, and the number of cells.

    A cell is one continuation that is expected at least LEAST times; all others share one cell. Which continuations
    are cells follows from probabilities alone (all that were ever drawn and likely ones by beam search), so the
    choice does not favour what was drawn often.
    """
    model = pair.hf_model()
    cells = {text: q for text, q in _likely(model, prompt, temperature).items() if q * len(draws) >= LEAST}
    counts = Counter(draws)
    rest_expected = len(draws) * (1 - sum(cells.values()))
    rest_seen = len(draws) - sum(counts[text] for text in cells)
    statistic = sum((counts[text] - len(draws) * q) ** 2 / (len(draws) * q) for text, q in cells.items())
    statistic += (rest_seen - rest_expected) ** 2 / rest_expected
    return float(chi2.sf(statistic, len(cells))), len(cells) + 1


def _likely(model: Any, prompt: Sequence[int], temperature: float) -> dict[tuple[int, ...], float]:
    """Every continuation of LENGTH tokens with a probability of at least LEAST / DRAWS, exactly (tree search)."""
    level: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        ids = torch.tensor([list(prompt) + list(text) for text in level])
        with torch.inference_mode():
            step = (model(ids).logits[:, -1].double() / temperature).softmax(-1)
        level = {
            text + (token,): q * float(step[i, token])
            for i, (text, q) in enumerate(level.items())
            for token in (step[i] * q >= LEAST / DRAWS).nonzero().flatten().tolist()
        }
    return level


def chosen_prompts() -> list[tuple[int, ...]]:
    """Three prompts with many likely continuations."""
    return [pair.prompts(40)[i] for i in (10, 4, 8)]


def exact_draws(prompt: Sequence[int], temperature: float, seed: int, favour: float = 0.0) -> list[tuple[int, ...]]:
    """Draws from transformers' probabilities; ``favour`` adds that much to the probability of the best token."""
    model, generator = pair.hf_model(), torch.Generator().manual_seed(seed)
    texts: list[tuple[int, ...]] = [()] * DRAWS
    for _ in range(LENGTH):
        distinct = sorted(set(texts))
        steps = []
        for begin in range(0, len(distinct), 256):
            ids = torch.tensor([list(prompt) + list(text) for text in distinct[begin : begin + 256]])
            with torch.inference_mode():
                steps.append((model(ids).logits[:, -1].double() / temperature).softmax(-1))
        step = torch.cat(steps)
        best = step.argmax(-1, keepdim=True)
        step = (1 - favour) * step + favour * torch.zeros_like(step).scatter_(1, best, 1.0)
        rows = {text: i for i, text in enumerate(distinct)}
        index = torch.tensor([rows[text] for text in texts])
        drawn = torch.multinomial(step[index], 1, generator=generator)[:, 0].tolist()
        texts = [text + (token,) for text, token in zip(texts, drawn)]
    return texts


def test_the_statistics_tell_a_right_sampler_from_a_wrong_one() -> None:
    for prompt in chosen_prompts():
        assert sum(q * DRAWS >= LEAST for q in _likely(pair.hf_model(), prompt, TEMPERATURE).values()) >= 50
    prompt = chosen_prompts()[0]
    good, cells = p_value(exact_draws(prompt, TEMPERATURE, seed=1), prompt)
    wrong, _ = p_value(exact_draws(prompt, TEMPERATURE, seed=1, favour=0.05), prompt)
    assert cells >= 20 and good > 0.01 and wrong < 1e-4, (cells, good, wrong)


@pytest.mark.gpu
@pytest.mark.skipif(not os.path.exists("/dev/nvidia0"), reason="needs a CUDA GPU; this machine has none")
@pytest.mark.parametrize("k", [3])
def test_sampled_output_has_the_targets_distribution(k: int) -> None:
    """A deliberately wrong sampler, SGLang's relaxed acceptance threshold switched on at run time, fails the same test."""
    from sglang.srt.managers.io_struct import SetInternalStateReq

    harness.START_METHOD = "spawn"
    prompts = chosen_prompts()
    sampling = {"temperature": TEMPERATURE, "max_new_tokens": LENGTH, "ignore_eos": True}

    def draw(engine: Any) -> list[list[tuple[int, ...]]]:
        drawn = []
        for prompt in prompts:
            outputs = engine.generate(input_ids=[list(prompt)] * DRAWS, sampling_params=sampling)
            drawn.append([tuple(o["output_ids"]) for o in outputs])
        return drawn

    def use(engine: Any) -> tuple[list[Any], list[Any]]:
        right = draw(engine)
        request = SetInternalStateReq(server_args={"speculative_accept_threshold_single": 0.05})
        engine.loop.run_until_complete(engine.tokenizer_manager.set_internal_state(request))
        return right, draw(engine)

    right, wrong = with_engine(
        use, timeout=400, env={"SGLANG_FORCE_FUSED_OP_BACKEND": "torch", "TRITON_F32_DEFAULT": "ieee"},
        **peagle(k, device="cuda", dtype="float32", attention_backend="triton", mem_fraction_static=0.9,
                 max_total_tokens=65536, max_running_requests=512, disable_cuda_graph=False, random_seed=1234,
                 disable_prefill_cuda_graph=True, cuda_graph_bs_decode=[64, 256, 512]),
    )  # fmt: skip
    for prompt, good, bad in zip(prompts, right, wrong):
        (p, cells), (p_wrong, _) = p_value(good, prompt), p_value(bad, prompt)
        print(f"{cells} cells: p {p:.4f}; with a wrong sampler p {p_wrong:.2e}")
        assert cells >= 20 and p > 0.01, f"{cells} cells, p {p}"
        assert p_wrong < 0.01, f"a wrong sampler passes: p {p_wrong}"
