"""Training prompts of all sources, filtered; among them those that the target makes up itself.

Self-synthesis: an instruct model that is given its chat template up to the opened user turn writes a user's prompt.
A small model's own prompts are of few kinds, so half of them start from a committed list of openers.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Optional

from sgl_peagle.train import stdlib_code
from sgl_peagle.train.chat import ChatFormat
from sgl_peagle.train.conversations import Job, Task
from sgl_peagle.train.filters import Duplicates, HeldOut, prompt_fault
from sgl_peagle.train.prompts import Prompt, in_random_order, openers, read_prompts

if TYPE_CHECKING:
    from sgl_peagle.train.regenerate import Settings

#: Samples drawn in the first round for each prompt wanted; a second round makes up for what the filters took.
OVERSAMPLING = 1.5


class Sources:
    """The files that a run reads: training prompts, and the held-out sets.

    Args:
        gsm8k: JSONL with GSM8K's training questions, or None.
        extra: Further JSONL files with training prompts.
        held_out: JSONL files of evaluation prompts; a file's stem is its set's name.
        gsm8k_test: Only so many prompts of a set called ``gsm8k_test`` are answered (all are held out).
    """

    def __init__(
        self, gsm8k: Optional[Path] = None, extra: tuple[Path, ...] = (), held_out: tuple[Path, ...] = (),
        gsm8k_test: int = 200,
    ) -> None:  # fmt: skip
        self.training = [p for file in extra for p in read_prompts(file)]
        self.training += [] if gsm8k is None else read_prompts(gsm8k, "gsm8k")
        sets = {file.stem: read_prompts(file) for file in held_out}
        self.held_out_prompts = [prompt for prompts in sets.values() for prompt in prompts]
        self.evaluation_sets = {n: p[:gsm8k_test] if n == "gsm8k_test" else p for n, p in sets.items()}
        self._long_code: dict[int, list[Prompt]] = {}

    def long_code(self, each: int, tokens: Callable[[list[str]], list[int]]) -> list[Prompt]:
        """The long-code evaluation set."""
        if each not in self._long_code:
            self._long_code[each] = stdlib_code.long_code_prompts(each, tokens)
        return self._long_code[each]


@dataclass
class Gathered:
    """Prompts after the filters.

    Attributes:
        train: Training prompts in a random order.
        tune: Synthetic prompts kept for tuning.
        dropped: Reason -> how many prompts were dropped for it.
        sampled: How many prompts the target made up, before the filters.
    """

    train: list[Prompt]
    tune: list[Prompt]
    dropped: dict[str, int] = field(default_factory=dict)
    sampled: int = 0


#: Does jobs: given them with a label for the progress bar, it returns the results by the jobs' names.
Work = Callable[[list[Job], str], dict[str, list[Any]]]


def gather(settings: "Settings", sources: Sources, chat: ChatFormat, work: Work) -> Gathered:
    """Training and tuning prompts: files, code, long code, and synthetic ones; none overlaps a held-out one."""
    found = Gathered([], [])
    held_out = HeldOut(turn for prompt in sources.held_out_prompts for turn in prompt.turns)
    ours, long_code = _from_code(settings, sources, chat)
    for prompt in long_code:
        held_out.add(prompt.text)
    synthetic = _synthetic(settings, chat, work, held_out, found) if settings.synthetic else []
    tune = min(settings.tune, len(synthetic) // 2)
    found.tune, rest = synthetic[:tune], synthetic[tune:]
    for prompt in found.tune:
        held_out.add(prompt.text)

    others = sources.training + ours
    whole = Duplicates(0)  # code tasks share wordings on purpose, so only whole repeats count
    for prompt in others:
        if any(token in prompt.text for token in chat.special_texts):
            _drop(found, f"{prompt.source}: template token")
        elif held_out.overlaps(prompt.text):
            _drop(found, f"{prompt.source}: shares 13 words with a held-out prompt")
        elif not whole.is_new(prompt.text):
            _drop(found, f"{prompt.source}: duplicate")
        else:
            found.train.append(prompt)
    found.train = in_random_order(found.train + rest)
    return found


def _from_code(settings: "Settings", sources: Sources, chat: ChatFormat) -> tuple[list[Prompt], list[Prompt]]:
    """Code tasks for training, and the long-code set that is held out."""
    ours = stdlib_code.code_prompts(settings.code) if settings.code else []
    ours += stdlib_code.long_prompts(settings.long, chat.counts) if settings.long else []
    return ours, sources.long_code(settings.long_code, chat.counts) if settings.long_code else []


def _drop(found: Gathered, reason: str) -> None:
    found.dropped[reason] = found.dropped.get(reason, 0) + 1


def _synthetic(
    settings: "Settings", chat: ChatFormat, work: Work, held_out: HeldOut, found: Gathered
) -> list[Prompt]:
    """Prompts that the target makes up, in the order of their hashes."""
    wanted = settings.synthetic + settings.tune
    seen, kept = Duplicates(), []
    draw = random.Random(settings.seed)
    beginnings = openers()
    number = int(wanted * OVERSAMPLING) + 1
    for turn in (1, 2):
        starts = ["" if i % 2 else draw.choice(beginnings) for i in range(number)]
        jobs = [
            Job(f"prompts {turn}-{i // settings.shard:04d}", [Task("made up", start) for start in starts[i : i + settings.shard]])
            for i in range(0, number, settings.shard)
        ]  # fmt: skip
        results = work(jobs, f"prompts, round {turn}")
        found.sampled += number
        for text in (text for job in jobs for text in results[job.name]):
            fault = _fault(text, chat, held_out, seen)
            if fault is None:
                kept.append(Prompt("synthetic", (text,)))
            else:
                _drop(found, f"synthetic: {fault}")
        missing = wanted - len(kept)
        if missing <= 0 or not kept:
            break
        number = int(min(missing / (len(kept) / number), wanted) * 1.1) + 1
    return in_random_order(kept)[:wanted]


def _fault(text: Optional[str], chat: ChatFormat, held_out: HeldOut, seen: Duplicates) -> Optional[str]:
    if text is None:
        return "not ended"
    fault = prompt_fault(text, chat.count(text), chat.special_texts)
    if fault is None and held_out.overlaps(text):
        fault = "shares 13 words with a held-out prompt"
    if fault is None and not seen.is_new(text):
        fault = "duplicate"
    return fault
