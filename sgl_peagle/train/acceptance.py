"""Acceptance without an engine: what a head drafts along the target's own text, and how far the text follows.

At anchor a the head has seen x_0 … x_{a+1} and drafts K tokens; L(a) is the number of leading ones that equal
x_{a+2}, x_{a+3}, …. Two averages of L(a) + 1 (bonus included):

* *walk*: begin at the first row of an answer, go on at a + L(a) + 1, as an engine with greedy verification does;
* *all anchors*: every row of the answer once, less noisy, another weighting.

On sampled text the same numbers estimate an engine that drafts greedily and samples: a draft is then right as often as
the target would have drawn it. Nothing here shares code with the oracle or the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterable, Iterator, Mapping, Optional, Sequence

import torch
from torch import Tensor

from sgl_peagle.aux_layers import capture_points
from sgl_peagle.errors import PEagleError
from sgl_peagle.train.corpus import Corpus
from sgl_peagle.train.device import prepare
from sgl_peagle.train.draft_head import DraftHead, load
from sgl_peagle.train.rows import Ints

#: Upper ends of the context-length classes, in tokens committed when a round begins.
CONTEXTS = (512, 1024, 2048, 4096, 8192)


def walk(lengths: "Mapping[int, int] | Ints", rows: Sequence[int]) -> list[int]:
    """The rows that an engine's rounds begin at.

    Args:
        lengths: Row -> L, the number of accepted drafts; a mapping or [n] int64.
        rows: The answer's rows without gaps, ascending; the walk begins at the first and ends behind the last.
    """
    visited, at = [], rows[0]
    while at <= rows[-1]:
        visited.append(at)
        at += lengths[at] + 1
    return visited


@dataclass
class Tally:
    """Counts over rounds: how many, tokens gained, and at which draft positions one was accepted."""

    k: int
    rounds: int = 0
    gained: int = 0
    committed: int = 0
    accepted: list[int] = field(default_factory=list)

    def add(self, length: int, left: int) -> None:
        """One round that accepted ``length`` drafts where ``left`` tokens of the answer were missing."""
        if not self.accepted:
            self.accepted = [0] * self.k
        self.rounds += 1
        self.gained += length + 1
        self.committed += min(length + 1, left)
        for j in range(length):
            self.accepted[j] += 1

    def as_json(self) -> dict[str, Any]:
        """``acceptance_length`` is the mean of L + 1; ``tokens_per_round`` stops at the answer's end, as an engine's
        (completion_tokens - 1) / rounds does. ``per_position`` counts a position only if all before it were right."""
        rounds = max(self.rounds, 1)
        return {
            "rounds": self.rounds,
            "acceptance_length": round(self.gained / rounds, 4),
            "tokens_per_round": round(self.committed / rounds, 4),
            "per_position": [round(n / rounds, 4) for n in self.accepted],
        }


def answers(assistant: Tensor) -> Iterator[tuple[int, int]]:
    """(first, last) index of each run of True: of generated tokens, or of supervised rows."""
    flags = [0, *assistant.int().tolist(), 0]
    begin = 0
    for i in range(1, len(flags)):
        if flags[i] and not flags[i - 1]:
            begin = i - 1
        if not flags[i] and flags[i - 1]:
            yield begin, i - 2


def answer_rows(assistant: Tensor) -> list[list[int]]:
    """The rows at which an engine could begin a round, for each answer of at least two tokens.

    Row a has x_{a+1} generated and x_{a+2} generated after it. The first is the one whose bonus is the answer's first
    token, which the prefill gives; behind the last token no round begins.
    """
    return [list(range(max(first - 1, 0), last - 1)) for first, last in answers(assistant) if last - max(first, 1) >= 1]


def matches(tokens: Tensor, last: int, anchors: Sequence[int], drafts: Tensor) -> list[int]:
    """L(a) of anchors within one answer that ends with token ``last``; drafts [R, k] on any device."""
    k = drafts.shape[1]
    padded = torch.cat([tokens[: last + 1].cpu(), torch.full((k + 2,), -1)])
    at = torch.tensor(list(anchors))[:, None] + 2 + torch.arange(k)
    hit = padded[at.clamp(max=len(padded) - 1)] == drafts.cpu()
    return hit.long().cumprod(dim=1).sum(dim=1).tolist()


@dataclass
class Document:
    """One document's L(a) per answer, at the largest K."""

    lengths: list[dict[int, int]]
    last: list[int]
    loops: bool
    kind: str


@torch.no_grad()
def measure(
    head: DraftHead, tokens: Tensor, assistant: Tensor, aux: Tensor, k: int
) -> tuple[list[dict[int, int]], list[int]]:
    """L(a) at every row of every answer of one document, and the last token index of each answer."""
    rows = answer_rows(assistant)
    if not rows:
        return [], []
    ends = [part[-1] + 2 for part in rows]
    anchors = [row for part in rows for row in part]
    drafts = head.drafts(tokens, aux, torch.tensor(anchors), k)
    found, at = [], 0
    for part, end in zip(rows, ends):
        found.append(dict(zip(part, matches(tokens, end, part, drafts[at : at + len(part)]))))
        at += len(part)
    return found, ends


def summarise(documents: Iterable[Document], k: int) -> dict[str, Any]:
    """Walk and all-anchor acceptance at K drafts, from L at a larger or equal K (drafts of a smaller K are a prefix)."""
    walked, anchored = Tally(k), Tally(k)
    by_context = {limit: Tally(k) for limit in CONTEXTS}
    by_kind: dict[str, Tally] = {}
    count = 0
    for document in documents:
        count += 1
        for lengths, last in zip(document.lengths, document.last):
            short = {row: min(length, k) for row, length in lengths.items()}
            for row, length in short.items():
                anchored.add(length, last - row - 1)
            for row in walk(short, list(short)):
                limit = next((limit for limit in CONTEXTS if row + 2 <= limit), CONTEXTS[-1])
                for tally in (walked, by_context[limit], by_kind.setdefault(document.kind, Tally(k))):
                    tally.add(short[row], last - row - 1)
    return {
        "documents": count,
        "walk": walked.as_json(),
        "all_anchor": anchored.as_json(),
        "by_context": {f"<={limit}": t.as_json() for limit, t in by_context.items() if t.rounds},
        "by_kind": {kind: t.as_json() for kind, t in sorted(by_kind.items()) if kind},
    }


class Evaluator:
    """A target and heads on one device, for any number of corpora.

    Args:
        target: Folder or hub id of the target.
        heads: Folders of heads; all must read the same aux layers.
        dtype: None: bfloat16 on a GPU, float32 elsewhere.

    Raises:
        PEagleError: Something cannot be read, or the heads read different layers.
    """

    def __init__(self, target: str, heads: Sequence[Path], device: str, dtype: Optional[torch.dtype] = None) -> None:
        from transformers import AutoModelForCausalLM

        self._device = torch.device(device)
        prepare(self._device)
        kind = dtype or (torch.bfloat16 if self._device.type == "cuda" else torch.float32)
        self._model = AutoModelForCausalLM.from_pretrained(target, dtype=kind).to(self._device).eval()
        embedding = self._model.get_input_embeddings().weight.detach()
        lm_head = self._model.get_output_embeddings().weight.detach()
        self.heads = [load(folder, embedding, lm_head, self._device, kind) for folder in heads]
        layers = self._model.config.get_text_config().num_hidden_layers
        points = {capture_points(head.config.aux_layer_ids, layers) for head in self.heads}
        if len(points) != 1 or max(next(iter(points))) >= layers:
            raise PEagleError(
                f"the heads read aux layers {sorted(points)} of {layers}",
                "the target is run once for all heads, and transformers norms the last layer's output",
                "evaluate heads of other layers by themselves",
            )
        (self._points,) = points

    @torch.no_grad()
    def _aux(self, batch: Sequence[Tensor]) -> list[Tensor]:
        """[n, A*H] of each text, run together with padding on the right (attention is causal)."""
        width = max(len(tokens) for tokens in batch)
        ids = torch.stack([torch.cat([t, t.new_zeros(width - len(t))]) for t in batch]).to(self._device)
        states = self._model.base_model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        joined = torch.cat([states[i] for i in self._points], dim=-1)
        return [joined[i, : len(tokens) - 1] for i, tokens in enumerate(batch)]

    def run(self, corpus: Corpus, k: int, *, limit: Optional[int] = None, batch_tokens: int = 16384) -> list[list[Document]]:
        """Each head's documents, in the corpus's order.

        Args:
            k: Largest number of drafts.
            limit: Only so many documents.
            batch_tokens: Target tokens at a time.
        """
        from tqdm import tqdm

        count = len(corpus) if limit is None else min(limit, len(corpus))
        loops = corpus.manifest.get("loops") or [False] * len(corpus)
        kinds = corpus.manifest.get("kinds") or [""] * len(corpus)
        found: list[list[Optional[Document]]] = [[None] * count for _ in self.heads]
        order = sorted(range(count), key=lambda i: len(corpus[i][0]))
        with tqdm(total=count, desc=str(corpus.manifest.get("set", "corpus")), mininterval=2.0) as bar:
            while order:
                taken, width = [], 0
                while order and (len(taken) + 1) * max(width, len(corpus[order[0]][0])) <= max(batch_tokens, width + 1):
                    width = max(width, len(corpus[order[0]][0]))
                    taken.append(order.pop(0))
                if not taken:
                    taken.append(order.pop(0))
                for i, aux in zip(taken, self._aux([corpus[i][0] for i in taken])):
                    tokens, assistant = corpus[i]
                    for h, head in enumerate(self.heads):
                        lengths, ends = measure(head, tokens, assistant, aux, k)
                        found[h][i] = Document(lengths, ends, bool(loops[i]), str(kinds[i]))
                bar.update(len(taken))
        return [[document for document in documents if document is not None] for documents in found]


def report(documents: Sequence[Document], ks: Sequence[int]) -> dict[str, Any]:
    """K -> acceptance, with all documents and without those whose answers loop."""
    calm = [document for document in documents if not document.loops]
    return {str(k): {"all": summarise(documents, k), "without_loops": summarise(calm, k)} for k in ks}


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """A Markdown table of {head: {set: report}}: walk AL with all documents and without loops, and all-anchor AL."""
    lines = ["| head | set | K | AL (walk) | without loops | all anchors | rounds | per position |", "|---" * 8 + "|"]
    for head, sets in results.items():
        for name, found in sets.items():
            for k, cell in found.items():
                walked, calm = cell["all"]["walk"], cell["without_loops"]["walk"]
                quiet = f"{calm['acceptance_length']:.2f}" if calm["rounds"] else "–"
                shares = " ".join(f"{share:.2f}" for share in walked["per_position"])
                anchored = cell["all"]["all_anchor"]["acceptance_length"]
                lines.append(
                    f"| {head} | {name} | {k} | {walked['acceptance_length']:.2f} | {quiet} | {anchored:.2f} | "
                    f"{walked['rounds']} | {shares} |"
                )
    return "\n".join(lines)
