"""Code prompts from Python's standard library: one half of its modules for training, the other for evaluation.

Source text comes from the interpreter that runs this, so counts differ a little between Python versions; which
module belongs to which half does not (``lists/stdlib_split.json``).
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
import textwrap
from pathlib import Path
from typing import Callable, Iterator

from sgl_peagle.train.prompts import COMPLETE, Prompt, stdlib_split

#: Texts -> the number of tokens of each.
TokenCounts = Callable[[list[str]], list[int]]

#: Our stand-in for a long code set (SPEED-Bench could not be had).
LONG_CODE = "stdlib-long-code"
#: Context lengths of that set, in tokens of the prompt's code.
LONG_CODE_LENGTHS = (500, 1000, 2000, 4000, 7000)
#: Length of long training prompts in tokens, least and most.
LONG_TRAINING = (1000, 1800)

_MOST_CHARACTERS, _LEAST_LINES, _MOST_LINES = 3000, 4, 60

_ABOUT_CODE = (
    "Explain what this Python function does.\n\n```python\n{code}\n```",
    "Write unit tests for this function:\n\n```python\n{code}\n```",
    "Add type hints and a docstring to the following function.\n\n```python\n{code}\n```",
    "Rewrite this Python function so that it is easier to read.\n\n```python\n{code}\n```",
    "Are there any bugs in this code? How could it be improved?\n\n```python\n{code}\n```",
    "What does this function return, and when does it raise an error?\n\n{code}",
)
_FROM_TEXT = (
    "Write a Python function `{name}` that does the following: {text}",
    "Implement `{signature}` in Python. {text}",
)
_LONG_TASKS = (
    "Summarise the following Python code.\n\n```python\n{code}\n```",
    "Explain the following module step by step.\n\n```python\n{code}\n```",
    "Continue the following Python code.\n\n```python\n{code}\n```",
    "Read this code and write a docstring for each function.\n\n```python\n{code}\n```",
    "{code}\n\nWhat does the code above do? Suggest improvements and show the changed code.",
)


def source_files(half: str) -> list[tuple[str, Path]]:
    """(dotted module name, file) of a half (``training`` or ``evaluation``), tests left out, missing modules skipped."""
    root, found = Path(sysconfig.get_paths()["stdlib"]), []
    for name in stdlib_split()[half]:
        single = root / f"{name}.py"
        files = [single] if single.is_file() else sorted((root / name).rglob("*.py"))
        found += [(".".join(f.relative_to(root).with_suffix("").parts), f) for f in files]
    return [(module, file) for module, file in found if not {"test", "tests", "idle_test"} & set(module.split("."))]


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""  # a few files are in other encodings; nothing depends on any one of them


def _digest(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256("\0".join(map(str, parts)).encode()).digest()[:8], "big")


def _functions(source: str) -> Iterator[tuple[ast.FunctionDef, list[str]]]:
    """Functions of some size with their dedented source lines."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    lines = source.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
            if not _LEAST_LINES <= node.end_lineno - node.lineno + 1 <= _MOST_LINES:
                continue
            own = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])).splitlines()
            if _LEAST_LINES <= len(own) <= _MOST_LINES and sum(map(len, own)) <= _MOST_CHARACTERS:
                yield node, own


def code_prompts(count: int, half: str = "training") -> list[Prompt]:
    """Up to ``count`` short code tasks, in an order given by their hashes: complete, explain, test, improve, write."""
    found: dict[str, Prompt] = {}
    for module, file in source_files(half):
        for node, lines in _functions(_read(file)):
            for kind, text in _tasks(node, lines, module):
                prompt = Prompt("code", (text,), kind=kind)
                found[prompt.key] = prompt
    return [found[key] for key in sorted(found)][:count]


def _tasks(node: ast.FunctionDef, lines: list[str], module: str) -> Iterator[tuple[str, str]]:
    first = node.lineno  # of the def line: decorators stand before it
    doc, body = ast.get_docstring(node), node.body
    pick = _digest(module, node.name, node.lineno)
    begin = body[0].end_lineno if doc else body[0].lineno - 1  # the last line before the body proper
    header = (begin or first) - first + 1
    if doc and len(lines) - header >= 2:
        # Half of them show nothing of the body, half its first lines.
        shown = header + (0 if pick % 2 else max(1, (len(lines) - header) // 3))
        yield "complete", COMPLETE[pick % len(COMPLETE)].format(code="\n".join(lines[:shown]).rstrip())
        if 20 <= len(doc) <= 600 and not node.name.startswith("_"):
            signature = " ".join(line.strip() for line in lines[: body[0].lineno - first]).rstrip(":").removeprefix("def ")
            wording = _FROM_TEXT[pick % len(_FROM_TEXT)]
            yield "write", wording.format(name=node.name, signature=signature, text=doc.strip())
    if len(lines) >= 6:
        code = "\n".join(lines)
        for offset in (0, 1):
            wording = _ABOUT_CODE[(pick + offset * 3) % len(_ABOUT_CODE)]
            yield "about", wording.format(code=code)


def long_prompts(count: int, tokens: TokenCounts) -> list[Prompt]:
    """Up to ``count`` training prompts of :data:`LONG_TRAINING` tokens, so that late positions are trained.

    Args:
        tokens: Counts the tokens of each text.
    """
    low, high = LONG_TRAINING
    found = []
    sources = [(module, text) for module, text in ((m, _read(f)) for m, f in source_files("training")) if text]
    # One call for all: the tokenizer then uses every core.
    for (module, text), length in zip(sources, tokens([text for _, text in sources])):
        for i, code in enumerate(_chunks(text, module, low, high, length)):
            wording = _LONG_TASKS[_digest(module, i) % len(_LONG_TASKS)]
            found.append(Prompt("long", (wording.format(code=code),)))
    return sorted(found, key=lambda prompt: prompt.key)[:count]


def long_code_prompts(each: int, tokens: TokenCounts) -> list[Prompt]:
    """The evaluation set :data:`LONG_CODE`: ``each`` prompts per length of :data:`LONG_CODE_LENGTHS`.

    The kind of a prompt is its length, ``"2000"``, say. Modules are taken in the order of their hashes, each at most
    once per length.
    """
    files = sorted(source_files("evaluation"), key=lambda item: _digest(LONG_CODE, item[0]))
    sources = [(module, text) for module, text in ((m, _read(f)) for m, f in files) if len(text) > 1500]
    found = []
    lengths: dict[str, int] = {}
    for length in LONG_CODE_LENGTHS:
        made = 0
        for module, text in sources:
            if made == each:
                break
            if len(text) < 2.5 * length:  # surely too short; spares the tokenizer
                continue
            if module not in lengths:
                lengths[module] = tokens([text])[0]
            code = next(_chunks(text, module, length * 9 // 10, length, lengths[module]), None)
            if code is not None and tokens([code])[0] >= length * 8 // 10:
                wording = _LONG_TASKS[_digest(module, length) % len(_LONG_TASKS)]
                found.append(Prompt(LONG_CODE, (wording.format(code=code),), kind=str(length)))
                made += 1
    return found


def _chunks(source: str, module: str, low: int, high: int, length: int) -> Iterator[str]:
    """Runs of whole lines of about ``low`` … ``high`` tokens (the goal drawn per chunk) of a text of ``length`` tokens."""
    lines = source.splitlines()
    weights = [len(line.strip()) + 2 for line in lines]  # indentation and line end are a token or two
    if not lines:
        return
    scale = length / sum(weights)
    costs = [weight * scale for weight in weights]
    begin, serial = 0, 0
    while begin < len(lines):
        goal, total, end = low + _digest(module, serial) % (high - low + 1), 0.0, begin
        while end < len(lines) and total + costs[end] <= goal:
            total, end = total + costs[end], end + 1
        if total < low * 9 // 10:  # the file ends, or one line is longer than all
            return
        yield "\n".join(lines[begin:end]).strip("\n")
        begin, serial = end, serial + 1
