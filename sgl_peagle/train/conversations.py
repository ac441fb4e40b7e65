"""The conversations that make up a run: made-up prompts, evaluation answers, training answers.

A :class:`Task` says which one is wanted and can be sent to another process; a :class:`Speaker` turns it into a
conversation, that is, a generator of requests (see :mod:`sgl_peagle.train.generate`).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

from sgl_peagle.train.chat import ChatFormat
from sgl_peagle.train.filters import PROMPT_TOKENS, HeldOut, cut_loop, loop_start, prompt_fault
from sgl_peagle.train.generate import Conversation, Reply, Request
from sgl_peagle.train.prompts import Prompt

#: Share of training conversations that get a second user turn, sampled from the target.
SECOND_TURNS = 0.2
#: Most tokens of a sampled user turn.
MOST_SAMPLED = PROMPT_TOKENS[1]
#: Without top-p: SGLang's torch sampler would sort the whole vocabulary for every request in every step, which
#: costs more than the model. A temperature below 1 keeps the tail in check instead.
_TEMPERATURE = 0.9


@dataclass(frozen=True)
class Task:
    """One conversation to be held.

    Attributes:
        kind: ``made up`` (a user turn behind ``text``), ``evaluate`` or ``answer`` (``prompt`` at ``temperature``).
    """

    kind: str
    text: str = ""
    prompt: Optional[Prompt] = None
    temperature: float = 0.0


@dataclass(frozen=True)
class Job:
    """The unit of work: some tasks with a name that is unique within a run."""

    name: str
    tasks: list[Task]


@dataclass
class Document:
    """One conversation as ids, with the spans that the target generated (start and end of each)."""

    ids: list[int]
    spans: list[tuple[int, int]]
    source: str
    kind: str
    temperature: float
    ended: bool
    events: list[str] = field(default_factory=list)

    def marks(self) -> list[bool]:
        """Whether the target generated each id."""
        marks = [False] * len(self.ids)
        for begin, end in self.spans:
            marks[begin:end] = [True] * (end - begin)
        return marks

    @property
    def loops(self) -> bool:
        """Whether any answer holds a loop."""
        return any(loop_start(self.ids[begin:end]) is not None for begin, end in self.spans)


def context_length(target: Path) -> int:
    """Longest prompt plus answer of a target, in tokens."""
    config = json.loads((target / "config.json").read_text())
    return int(config.get("max_position_embeddings") or 8192)


class Speaker:
    """Turns tasks into conversations.

    Args:
        chat: The target's chat format.
        context: Its longest prompt plus answer, in tokens.
        max_new_tokens: Most tokens of an answer.

    Attributes:
        held_out: What a made-up second turn must not repeat.
    """

    def __init__(self, chat: ChatFormat, context: int, max_new_tokens: int) -> None:
        self.chat, self._context, self.max_new_tokens = chat, context, max_new_tokens
        self.held_out = HeldOut()

    def conversation(self, task: Task) -> Conversation:
        """The conversation of a task."""
        if task.kind == "made up":
            return self._made_up(task.text)
        assert task.prompt is not None
        hold = {"evaluate": self._evaluate, "answer": self._answer}[task.kind]
        return hold(task.prompt, task.temperature)

    def user_turn(self, ids: list[int]) -> Request:
        """Let the target write a user turn behind ``ids``."""
        return Request(ids, MOST_SAMPLED, self.chat.user_ends, _TEMPERATURE)

    def _reply(self, ids: list[int], temperature: float) -> Request:
        return Request(ids, self.max_new_tokens, self.chat.eos, temperature)

    def _made_up(self, beginning: str) -> Conversation:
        """A sampled user turn as text; None where the target did not end it."""
        before = self.chat.opened_user(beginning)
        reply = yield self.user_turn(before)
        return self.chat.user_text(before[len(self.chat.opening) :] + reply.ids) if reply.ended else None

    def _evaluate(self, prompt: Prompt, temperature: float) -> Conversation:
        """All turns of a prompt, loops included."""
        ids, ended = self.chat.prompt(prompt.messages()), False
        document = Document([], [], prompt.source, prompt.kind, temperature, False)
        for turn in range(len(prompt.turns)):
            if turn:
                ids = ids + self.chat.next_turn(prompt.turns[turn], ended=ended)
                if len(ids) + self.max_new_tokens > self._context:
                    break
            reply: Reply = yield self._reply(ids, temperature)
            document.spans.append((len(ids), len(ids) + len(reply.ids)))
            ids, ended = ids + reply.ids, reply.ended
            document.ids, document.ended = ids, ended
        return document

    def _answer(self, prompt: Prompt, temperature: float) -> Conversation:
        """The answer without its loop, and perhaps a second turn; a document without spans is one to be dropped."""
        ids = self.chat.prompt(prompt.messages())
        document = Document(ids, [], prompt.source, prompt.kind, temperature, False)
        reply = yield self._reply(ids, temperature)
        if not _append(document, reply):
            return document
        lot = int(hashlib.sha256(f"turn {prompt.key} {temperature}".encode()).hexdigest()[:8], 16) / 2**32
        room = self._context - len(document.ids) - self.max_new_tokens - 2 * MOST_SAMPLED
        if lot >= SECOND_TURNS or not reply.ended or "loop cut" in document.events or room < 0:
            return document
        sampled = yield self.user_turn(document.ids + self.chat.reopened_user())
        user = self.chat.user_text(sampled.ids)
        fault = prompt_fault(user, self.chat.count(user), self.chat.special_texts)
        if not sampled.ended or fault is not None or self.held_out.overlaps(user):
            document.events.append("second turn refused")
            return document
        document.events.append("second turn")
        before = document.ids
        document.ids = before + self.chat.next_turn(user, ended=True)
        reply = yield self._reply(document.ids, temperature)
        if not _append(document, reply):
            document.ids = before
        return document


def _append(document: Document, reply: Reply) -> bool:
    """Add a reply up to its loop; False if nothing is left of it."""
    kept, outcome = cut_loop(reply.ids)
    if outcome != "whole":
        document.events.append(f"loop {outcome}")
    if not kept:
        return False
    document.spans.append((len(document.ids), len(document.ids) + len(kept)))
    document.ids = document.ids + kept
    document.ended = reply.ended and outcome == "whole"
    return True
