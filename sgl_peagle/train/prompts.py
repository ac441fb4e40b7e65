"""Prompts from files, and what the model needs to make up its own: openers and the wording of code tasks."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Iterator, Optional

from sgl_peagle.errors import PEagleError

#: How a chat user asks for the rest of a function; the first wording is the one of evaluation prompts.
COMPLETE = (
    "Complete the following Python function.\n\n```python\n{code}\n```",
    "Finish this Python function:\n\n```python\n{code}\n```",
    "Write the body of this function so that it does what its docstring says.\n\n```python\n{code}\n```",
    "Here is the beginning of a Python function. Please write the complete function.\n\n{code}",
    "{code}",
)


@dataclass(frozen=True)
class Prompt:
    """A conversation whose assistant turns the target is to generate.

    Attributes:
        source: Where it comes from (``gsm8k``, ``synthetic``, ``code`` …).
        turns: The user's turns.
        system: The system turn, None for the template's default.
        kind: Finer than the source: a benchmark's category.
    """

    source: str
    turns: tuple[str, ...]
    system: Optional[str] = None
    kind: str = ""

    @property
    def text(self) -> str:
        """All that the user says."""
        return "\n".join(self.turns)

    @property
    def key(self) -> str:
        """A hash that orders prompts at random, the same on every machine."""
        return hashlib.sha256(f"{self.source}\0{self.system}\0{self.text}".encode()).hexdigest()

    def messages(self, turns: int = 1) -> list[dict[str, str]]:
        """The first ``turns`` user turns as chat messages (one, unless replies come in between)."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return system + [{"role": "user", "content": turn} for turn in self.turns[:turns]]


def openers() -> tuple[str, ...]:
    """The committed beginnings of self-synthesised prompts."""
    return tuple(_list_file("openers.txt").split("\n")[:-1])


def stdlib_split() -> dict[str, list[str]]:
    """``training`` and ``evaluation``: top-level modules of the standard library, each in one half."""
    split = json.loads(_list_file("stdlib_split.json"))
    return {half: split[half] for half in ("training", "evaluation")}


def _list_file(name: str) -> str:
    return resources.files("sgl_peagle.train").joinpath("lists", name).read_text(encoding="utf-8")


def read_prompts(file: Path, source: Optional[str] = None) -> list[Prompt]:
    """Prompts of a JSONL file, one per row with ``messages``, ``turns``, ``question`` or ``prompt``.

    Assistant messages are dropped: the target answers itself. A row that also has an ``entry_point`` is a code task
    (HumanEval's format) and gets the wording of :data:`COMPLETE`. ``category`` becomes the kind.

    Raises:
        PEagleError: The file cannot be read, or a row holds no prompt; names the line.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PEagleError(f"{file} cannot be read: {error}", "prompts are read from it", "check the path") from error
    found = [_row(line, f"{file}, line {i}", source or file.stem) for i, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise PEagleError(f"{file} holds no prompt", "there is nothing to answer", "give a JSONL file with prompts")
    return found


def _row(line: str, where: str, source: str) -> Prompt:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise PEagleError(f"{where} is no JSON: {error}", "each line is one prompt", "correct the line") from error
    system, turns = _turns(row) if isinstance(row, dict) else (None, [])
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise PEagleError(
            f"{where} holds no prompt",
            "a row needs one of: messages (role, content), turns, question, prompt; each a non-empty text",
            "correct the line",
        )
    return Prompt(source, tuple(turns), system, str(row.get("category", "")))


def _turns(row: dict[str, Any]) -> tuple[Optional[str], list[Any]]:
    if isinstance(row.get("messages"), list):
        messages = [m for m in row["messages"] if isinstance(m, dict)]
        systems = [m.get("content") for m in messages if m.get("role") == "system"]
        return (str(systems[0]) if systems else None), [m.get("content") for m in messages if m.get("role") == "user"]
    if isinstance(row.get("turns"), list):
        return None, row["turns"]
    if "question" in row:
        return None, [row["question"]]
    if "entry_point" in row and isinstance(row.get("prompt"), str):
        return None, [COMPLETE[0].format(code=row["prompt"].rstrip())]
    return None, [row["prompt"]] if "prompt" in row else []


def in_random_order(prompts: Iterator[Prompt] | list[Prompt]) -> list[Prompt]:
    """Prompts by their hash: mixed, and the same order on every machine."""
    return sorted(prompts, key=lambda prompt: prompt.key)
