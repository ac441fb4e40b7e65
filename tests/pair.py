"""The tiny trained pair, its prompts, and what transformers and the oracle say about it."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterable

import torch
from conftest import TALLY

from sgl_peagle.oracle import OracleHead, aux_from_transformers

PAIR = Path(__file__).parent.parent / "examples" / "tiny_pair"
TARGET, HEAD = PAIR / "target", PAIR / "head"

#: A draft may differ from the oracle's only where the two best logits are closer than this (counted as a tie).
TIE_MARGIN = 1e-4

#: Capture points of the tiny head.
AUX_POINTS = tuple(json.loads((HEAD / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"])


@functools.lru_cache(maxsize=None)
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TARGET)


@functools.lru_cache(maxsize=None)
def prompts(count: int) -> tuple[tuple[int, ...], ...]:
    """Token ids of the first ``count`` held-out prompts."""
    texts = json.loads((PAIR / "prompts.json").read_text())
    return tuple(tuple(tokenizer()(text)["input_ids"]) for text in texts[:count])


@functools.lru_cache(maxsize=None)
def hf_model(path: Path = TARGET) -> Any:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@functools.lru_cache(maxsize=None)
def greedy(prompt: tuple[int, ...], length: int, path: Path = TARGET) -> tuple[int, ...]:
    """transformers' greedy continuation of ``prompt``, ``length`` tokens, past any end token."""
    if length == 0:
        return ()
    out = hf_model(path).generate(
        torch.tensor([prompt]), max_new_tokens=length, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return tuple(out[0, len(prompt) :].tolist())


@functools.lru_cache(maxsize=None)
def oracle(path: Path = HEAD, target: Path = TARGET) -> OracleHead:
    model = hf_model(target)
    return OracleHead.from_folder(
        path,
        target_embed=model.get_input_embeddings().weight.detach(),
        target_lm_head=model.get_output_embeddings().weight.detach(),
    )


@functools.lru_cache(maxsize=512)
def aux_hidden(tokens: tuple[int, ...], path: Path = TARGET, points: tuple[int, ...] = AUX_POINTS) -> torch.Tensor:
    """Aux hidden states of a whole text, from transformers: not from the engine, so a wrong layer is seen."""
    return aux_from_transformers(hf_model(path), torch.tensor(tokens), list(points))


@dataclass
class Comparison:
    """How recorded rounds compare with the oracle."""

    rounds: int = 0
    ties: int = 0
    differences: list[str] = field(default_factory=list)

    def __iadd__(self, other: "Comparison") -> "Comparison":
        self.rounds += other.rounds
        self.ties += other.ties
        self.differences += other.differences
        return self


def read_rounds(folder: Path) -> list[dict[str, Any]]:
    """Every recorded round of a run, in the order of recording."""
    return [json.loads(line) for file in sorted(folder.glob("rounds-*.jsonl")) for line in file.open()]


def compare(
    rounds: Iterable[dict[str, Any]],
    texts: dict[str, tuple[int, ...]],
    k: int,
    *,
    head: Path = HEAD,
    target: Path = TARGET,
    points: tuple[int, ...] = AUX_POINTS,
) -> Comparison:
    """Compare recorded drafts with the oracle's.

    Args:
        rounds: Recorded rounds.
        texts: Request id -> prompt and complete output. Rounds past the text's end (the last one overshoots a
            length limit) have no ground truth to be recomputed from and are skipped.
        k: Drafts per round.
    """
    result = Comparison()
    judge = oracle(head, target)
    for entry in rounds:
        text = texts.get(entry["rid"])
        if text is None or entry["kind"] == "chunk" or entry["tokens"] > len(text):
            continue
        tokens = text[: entry["tokens"]]
        if tokens[-1] != entry["bonus"]:
            result.differences.append(f"{entry['rid']} at {entry['tokens']}: bonus {entry['bonus']}, text {tokens[-1]}")
            continue
        aux = aux_hidden(text, target, points)[: len(tokens) - 1]
        truth = judge.drafts(torch.tensor(tokens), aux, k)
        compared = 1 if entry["fallback"] else k
        result.rounds += 1
        for i in range(compared):
            if truth.ids[i] == entry["drafts"][i]:
                continue
            if float(truth.margin[i]) < TIE_MARGIN:
                result.ties += 1
                continue
            result.differences.append(
                f"{entry['rid']} {entry['kind']} at {entry['tokens']}, draft {i + 1}: engine {entry['drafts']}, "
                f"oracle {truth.ids}, margin {float(truth.margin[i]):.2e}"
            )
            break
    TALLY["rounds compared with the oracle"] += result.rounds
    TALLY["near-ties between two drafts"] += result.ties
    return result
