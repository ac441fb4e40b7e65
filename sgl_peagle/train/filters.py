"""What is thrown away before training: poor prompts, repeats, overlap with held-out sets, and looping answers.

All rules are pure functions of text or ids, so that the counts in a manifest can be recomputed.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from typing import Iterable, Optional, Sequence

import numpy as np

#: Tokens of a self-synthesised prompt, least and most.
PROMPT_TOKENS = (4, 200)
#: Least share of distinct words in a prompt.
DISTINCT_WORDS = 0.6
#: Words in a row that two prompts must not share: among training prompts, and with held-out ones.
DUPLICATE_WORDS, HELD_OUT_WORDS = 8, 13
#: A loop: so many tokens in a row, seen so many times in one answer.
LOOP_TOKENS, LOOP_TIMES = 16, 3
#: An answer shorter than this after its loop was cut off teaches nothing.
LEAST_AFTER_CUT = 16

_WORD = re.compile(r"\w+")

#: Weights of a run's hash are the powers of this; products wrap modulo 2**64.
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_WEIGHTS = _FACTOR ** np.arange(LOOP_TOKENS, dtype=np.uint64)


def words(text: str) -> list[str]:
    """The lower-cased words of a text: what all comparisons of texts go by."""
    return _WORD.findall(text.lower())


@lru_cache(maxsize=1 << 20)
def _word_hash(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")


def word_runs(text: str, length: int) -> set[int]:
    """64-bit hashes of all runs of ``length`` words, the same in every process; a shorter text is one run of its own."""
    hashes = np.fromiter(map(_word_hash, words(text)), dtype=np.uint64)
    if len(hashes) < length:
        hashes = np.concatenate([hashes, np.full(1, len(hashes), np.uint64)])
        length = len(hashes)
    weights = _FACTOR ** np.arange(length, dtype=np.uint64)
    return set((np.lib.stride_tricks.sliding_window_view(hashes, length) @ weights).tolist())


def prompt_fault(text: str, tokens: int, template_tokens: Iterable[str]) -> Optional[str]:
    """Why a sampled prompt is not fit for training, or None.

    Args:
        text: The user turn.
        tokens: Its length in tokens.
        template_tokens: The tokenizer's special tokens as text.
    """
    if tokens < PROMPT_TOKENS[0]:
        return "too short"
    if tokens > PROMPT_TOKENS[1]:
        return "too long"
    if any(token in text for token in template_tokens):
        return "template token"
    found = words(text)
    if not found or len(set(found)) < DISTINCT_WORDS * len(found):
        return "repeats words"
    return None


class Duplicates:
    """Remembers prompts; :meth:`is_new` refuses one that repeats an earlier one or shares ``length`` words in a row.

    ``length`` 0 compares whole prompts only.
    """

    def __init__(self, length: int = DUPLICATE_WORDS) -> None:
        self._length = length
        self._seen: set[int] = set()

    def is_new(self, text: str) -> bool:
        """Whether nothing like it came before; it is remembered only then."""
        runs = word_runs(text, self._length) if self._length else {hash(tuple(words(text)))}
        if runs & self._seen:
            return False
        self._seen |= runs
        return True


class HeldOut:
    """The runs of 13 words of texts that must stay unseen in training."""

    def __init__(self, texts: Iterable[str] = (), length: int = HELD_OUT_WORDS) -> None:
        self._length = length
        self._runs: set[int] = set()
        for text in texts:
            self.add(text)

    def add(self, text: str) -> None:
        """Hold out one more text; one shorter than 13 words only as a whole."""
        self._runs |= word_runs(text, self._length)

    @property
    def runs(self) -> np.ndarray:
        """The hashes, for another process."""
        return np.fromiter(self._runs, dtype=np.uint64, count=len(self._runs))

    def add_runs(self, runs: np.ndarray) -> None:
        """Hold out what another process holds out."""
        self._runs.update(runs.tolist())

    def overlaps(self, text: str) -> bool:
        """Whether the text shares 13 words in a row with a held-out one (or is a short one of them)."""
        return bool(word_runs(text, self._length) & self._runs)


def loop_start(ids: Sequence[int]) -> Optional[int]:
    """Where the third occurrence of a run of 16 tokens begins (the earliest such place), or None.

    Occurrences may overlap, so that one token repeated 18 times is a loop, too.
    """
    if len(ids) < LOOP_TOKENS + LOOP_TIMES - 1:
        return None
    windows = np.lib.stride_tricks.sliding_window_view(np.asarray(ids, dtype=np.uint64), LOOP_TOKENS)
    hashes = ((windows + np.uint64(1)) * _WEIGHTS).sum(axis=1, dtype=np.uint64)
    if np.unique(hashes, return_counts=True)[1].max() < LOOP_TIMES:
        return None  # equal runs have equal hashes
    seen: dict[tuple[int, ...], int] = {}
    for i in range(len(windows)):
        run = tuple(ids[i : i + LOOP_TOKENS])
        seen[run] = seen.get(run, 0) + 1
        if seen[run] == LOOP_TIMES:
            return i
    return None


def cut_loop(ids: list[int]) -> tuple[list[int], str]:
    """An answer without its loop: ``(ids, "whole" | "cut" | "dropped")``; a dropped one is empty."""
    start = loop_start(ids)
    if start is None:
        return ids, "whole"
    return (ids[:start], "cut") if start >= LEAST_AFTER_CUT else ([], "dropped")
