"""Acceptance of the head on the target's greedy text: the teacher-forced walk, and what breaks it.

For a greedy text, the walk starts at the last prompt position, counts the leading drafts that match the text,
and jumps behind them plus the bonus token, as an engine would. Each round is recomputed from scratch (all rows,
no KV cache), so that nothing of the training code's layout is trusted here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from pair_target import continue_text, read
from pair_tokenizer import EOS_ID, MASK_ID
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm
from transformers import LlamaForCausalLM

from sgl_peagle.train.model import Head

DEPTHS = [1, 2, 3, 5, 7, 10]
ABLATIONS = ["zero_h_shared", "mask_row_of_full_stop", "mask_row_of_bonus_token", "mask_row_of_target",
             "frozen_mask_positions"]


@torch.no_grad()
def greedy_texts(target: LlamaForCausalLM, prompts: Sequence[Sequence[int]], new: int) -> list[Tensor]:
    """Prompt + ``new`` greedy tokens for each prompt; prompts of one length go together, so nothing is padded."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        by_length[len(prompt)].append(index)
    texts: list[Tensor] = [torch.empty(0)] * len(prompts)
    for indices in tqdm(by_length.values(), desc="greedy", mininterval=5.0):
        out = continue_text(target, torch.tensor([prompts[i] for i in indices]), new)
        for index, row in zip(indices, out):
            texts[index] = row
    return texts


def causal(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Plain causal attention of rows [R, heads, dim]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


@torch.no_grad()
def drafts(head: Head, lm_head: Tensor, tokens: Tensor, aux: Tensor, k: int, ablation: str,
           replacement: Tensor) -> list[int]:
    """The K argmaxes of one round. ``tokens`` [n+1] ends with the bonus token, ``aux`` [n, 3·D].

    ``ablation`` "none", or one of:
    zero_h_shared: the mask rows' projected hidden is the zero vector.
    mask_row_of_...: the MASK token's embedding is the row of the full stop or of the bonus token, or the row that
    the target's own embedding has for the MASK id (``replacement`` [D] unless it is the bonus token's).
    frozen_mask_positions: all mask rows sit at the first one's position for RoPE, who sees whom stays.
    """
    n = len(aux)
    rows = n + k - 1
    shared = head.fc(head.mask_hidden[0])
    mask_row = head.embed_tokens.weight[MASK_ID]
    if ablation == "zero_h_shared":
        shared = torch.zeros_like(shared)
    elif ablation == "mask_row_of_bonus_token":
        mask_row = head.embed_tokens.weight[tokens[-1]]
    elif ablation.startswith("mask_row_of"):
        mask_row = replacement
    positions = torch.arange(rows)
    if ablation == "frozen_mask_positions":
        positions = positions.clamp(max=n)
    embedded = torch.cat([head.embed(tokens[1:]), mask_row.expand(k - 1, -1)])
    hidden = torch.cat([head.project(aux), shared.expand(k - 1, -1)])
    out = head.final(head(embedded, hidden, positions, causal)[n - 1:])
    return (out @ lm_head.T).argmax(-1).tolist()


class Walker:
    """Walks the texts for any K; a round's drafts at the largest K hold those of every smaller K as a prefix."""

    def __init__(self, head: Head, lm_head: Tensor, texts: list[Tensor], aux: list[Tensor], prompt_lengths: list[int],
                 new: int, ablation: str, replacement: Tensor) -> None:
        self.head, self.lm_head, self.texts, self.aux, self.prompt_lengths = head, lm_head, texts, aux, prompt_lengths
        self.new, self.ablation, self.replacement = new, ablation, replacement
        self.matches: dict[tuple[int, int], int] = {}

    def match(self, index: int, anchor: int) -> int:
        """Leading right drafts at ``anchor``, out of max(DEPTHS)."""
        key = (index, anchor)
        if key not in self.matches:
            text = self.texts[index]
            got = drafts(self.head, self.lm_head, text[:anchor + 2], self.aux[index][:anchor + 1], max(DEPTHS),
                         self.ablation, self.replacement)
            want = text[anchor + 2:anchor + 2 + len(got)].tolist()
            self.matches[key] = next((i for i, (a, b) in enumerate(zip(got, want)) if a != b), len(got))
        return self.matches[key]

    def walk(self, k: int) -> dict[str, Any]:
        lengths = []
        for index, prompt_length in enumerate(self.prompt_lengths):
            anchor = prompt_length - 1  # the bonus token is the first generated one
            while anchor < prompt_length - 1 + self.new:
                lengths.append(min(k, self.match(index, anchor)))
                anchor += lengths[-1] + 1
        rounds = len(lengths)
        return {"acceptance_length": round(1 + sum(lengths) / rounds, 4), "rounds": rounds,
                "per_position": [round(sum(n > j for n in lengths) / rounds, 4) for j in range(k)]}


@torch.no_grad()
def evaluate(target: LlamaForCausalLM, head: Head, lm_head: Tensor, prompts: Sequence[Sequence[int]], full_stop: int,
             new: int = 96) -> dict[str, Any]:
    """The whole report; ``full_stop`` is that token's id.

    The texts run max(DEPTHS) + 1 tokens further than ``new``, so no round is cut short.
    """
    texts = greedy_texts(target, prompts, new + max(DEPTHS) + 1)
    aux, gaps, sure = [], [], []
    distinct, ended = [], 0
    lengths = [len(prompt) for prompt in prompts]
    for text, length in zip(texts, lengths):
        states, logits = read(target, text[None])
        aux.append(states[0])
        steps = logits[0, length - 1:length - 1 + new]
        top = steps.topk(2, dim=-1).values
        gaps.append(top[:, 0] - top[:, 1])
        sure.append(steps.softmax(-1).amax(-1))
        answer = text[length:length + new].tolist()
        distinct.append(len({tuple(answer[i:i + 4]) for i in range(new - 3)}) / (new - 3))
        ended += EOS_ID in answer
    gap, top_probability = torch.cat(gaps), torch.cat(sure)
    report: dict[str, Any] = {
        "prompts": len(prompts), "new_tokens": new,
        "target_text": {
            "steps": len(gap), "share_gap_below_1e-3": round((gap < 1e-3).float().mean().item(), 6),
            "share_gap_below_1e-2": round((gap < 1e-2).float().mean().item(), 6),
            "smallest_gap": round(gap.min().item(), 6),
            "mean_top_probability": round(top_probability.mean().item(), 4),
            "distinct_4grams_per_text": {"mean": round(sum(distinct) / len(distinct), 3),
                                         "min": round(min(distinct), 3)},
            "texts_with_eos": ended}}
    no_row = torch.empty(0)
    base = Walker(head, lm_head, texts, aux, lengths, new, "none", no_row)
    report["walk"] = {f"K={k}": base.walk(k) for k in tqdm(DEPTHS, desc="walk", mininterval=5.0)}
    reference = report["walk"]["K=5"]["acceptance_length"]
    report["ablations_K=5"] = {}
    rows = {"mask_row_of_full_stop": head.embed_tokens.weight[full_stop],
            "mask_row_of_target": target.get_input_embeddings().weight[MASK_ID]}
    for ablation in tqdm(ABLATIONS, desc="ablations", mininterval=5.0):
        result = Walker(head, lm_head, texts, aux, lengths, new, ablation, rows.get(ablation, no_row)).walk(5)
        result["lowers_acceptance_length_by"] = round(1 - result["acceptance_length"] / reference, 4)
        report["ablations_K=5"][ablation] = result
    return report
