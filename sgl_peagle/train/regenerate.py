"""From prompts to token files: the target answers every prompt itself, and what it generated is kept as ids.

One folder, three stages, each written as files so that an interrupted run goes on where it stopped::

    OUT/settings.json                    what was asked for; another run with other settings is refused
    OUT/stages/prompts.json              prompts after all filters, and what the filters dropped
    OUT/eval/<set>, OUT/eval/<set>-t0.7  evaluation corpora: the target's greedy and sampled answers
    OUT/stages/responses-0000.jsonl      training documents, shard by shard
    OUT/train                            the training corpus

Loops are cut from training answers; evaluation answers keep them and are flagged instead.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Callable, Iterator, Optional

from sgl_peagle.errors import PEagleError
from sgl_peagle.train import synthesis
from sgl_peagle.train.chat import ChatFormat
from sgl_peagle.train.corpus import Corpus
from sgl_peagle.train.filters import HeldOut, cut_loop, loop_start, prompt_fault
from sgl_peagle.train.generate import Conversation, Reply, Request, Target, converse_once, start
from sgl_peagle.train.prompts import Prompt
from sgl_peagle.train.stdlib_code import LONG_CODE

#: Temperature of sampled answers and evaluation sets.
SAMPLED = 0.7
#: Share of training conversations that get a second user turn, sampled from the target.
SECOND_TURNS = 0.2
#: Sources whose prompts are answered twice: greedily and sampled.
ANSWERED_TWICE = ("synthetic", "gsm8k")


@dataclass(frozen=True)
class Settings:
    """What decides the content of a run's folder; paths and time limits do not.

    Attributes:
        target: Hash of the target's weights, tokenizer and template.
        files: Role and name of each prompt file -> hash of its content.
        long_code: Prompts per length of the long-code evaluation set.
        gsm8k_test: How many GSM8K-test prompts are answered for evaluation.
        mask_token_id: The id that must not occur.
    """

    target: str
    files: dict[str, str]
    backend: str
    seed: int = 0
    synthetic: int = 0
    tune: int = 500
    code: int = 0
    long: int = 0
    long_code: int = 16
    gsm8k_test: int = 200
    max_new_tokens: int = 512
    mask_token_id: int = 16
    shard: int = 2048


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


class Run:
    """One run of the data pipeline in folder ``out``; :meth:`everything` does all stages."""

    def __init__(
        self, out: Path, target: Path, settings: Settings, sources: synthesis.Sources, *,
        minutes: Optional[float] = None, begun: Optional[float] = None, engine: Optional[dict[str, Any]] = None,
        evaluate: bool = True,
    ) -> None:  # fmt: skip
        self.out, self.target_folder, self.settings, self.sources = out, target, settings, sources
        self._begun = time.monotonic() if begun is None else begun
        self._deadline = None if minutes is None else self._begun + 60 * minutes
        self._engine = engine or {}
        self._evaluate_too = evaluate
        self._target: Optional[Target] = None
        _claim(out, settings)
        self.chat = ChatFormat.of(target)
        self._context = _context_length(target)
        if settings.mask_token_id in self.chat.eos:
            raise PEagleError(
                f"mask token id {settings.mask_token_id} ends the target's turns",
                "it occurs in every answer",
                "give the head's MASK id, one that never occurs in text",
            )

    def everything(self) -> Path:
        """All stages that are not done yet; returns the folder of the training corpus."""
        try:
            train, tune = self.prompts()
            held_out = HeldOut(turn for p in [*self.sources.held_out_prompts, *tune] for turn in p.turns)
            if self._evaluate_too:
                self.evaluation(tune)
            self.responses(train, held_out)
        finally:
            if self._target is not None:
                self._target.close()
        return self.corpus(train)

    def target(self) -> Target:
        """The running target, started when first needed."""
        if self._target is None:
            self._note("starting the target")
            s = self.settings
            self._target = start(s.backend, self.target_folder, seed=s.seed, context=self._context, **self._engine)
            self._note(f"target is ready ({self._target.name})")
        return self._target

    def _note(self, text: str) -> None:
        print(f"[{time.monotonic() - self._begun:6.1f} s] {text}", flush=True)

    def _fits(self, prompt: Prompt) -> bool:
        if len(prompt.text.encode()) + len(prompt.system or "") + 256 + self.settings.max_new_tokens <= self._context:
            return True  # a token has at least a byte: no need to count
        return len(self.chat.prompt(prompt.messages())) + self.settings.max_new_tokens <= self._context

    # -- prompts ----------------------------------------------------------------------------------------------------

    def prompts(self) -> tuple[list[Prompt], list[Prompt]]:
        """(training prompts in a random order, synthetic ones kept for tuning)."""
        file = self.out / "stages" / "prompts.json"
        if not file.is_file():
            found = synthesis.gather(self.settings, self.sources, self.chat, self.target)
            found.train = self._keep(found.train, self._fits, found.dropped, "too long for the context")
            _write_json(file, asdict(found))
        stored = json.loads(file.read_text())
        train, tune = ([_prompt(row) for row in stored[name]] for name in ("train", "tune"))
        self._note(f"{len(train)} training prompts, {len(tune)} for tuning; dropped: {stored['dropped']}")
        return train, tune

    @staticmethod
    def _keep(
        prompts: list[Prompt], good: Callable[[Prompt], bool], dropped: dict[str, int], reason: str
    ) -> list[Prompt]:
        kept = [prompt for prompt in prompts if good(prompt)]
        if len(kept) < len(prompts):
            dropped[reason] = dropped.get(reason, 0) + len(prompts) - len(kept)
        return kept

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def evaluation(self, tune: list[Prompt]) -> None:
        """Answer the evaluation prompts, greedily and sampled, and write one corpus for each set and temperature."""
        sets = dict(self.sources.evaluation_sets)
        if self.settings.long_code:
            sets[LONG_CODE] = self.sources.long_code(self.settings.long_code, self.chat.counts)
        if tune:
            sets["tune"] = tune
        wanted: list[tuple[str, float, Prompt]] = []
        for name, prompts in sets.items():
            for temperature in (0.0, SAMPLED):
                if not self._eval_folder(name, temperature).exists():
                    wanted += [(name, temperature, prompt) for prompt in prompts if self._fits(prompt)]
        if not wanted:
            return
        conversations = [self._evaluate(prompt, temperature) for _, temperature, prompt in wanted]
        documents: list[Document] = converse_once(self.target(), conversations, "evaluation answers")
        groups: dict[tuple[str, float], list[Document]] = {}
        for (name, temperature, _), document in zip(wanted, documents):
            groups.setdefault((name, temperature), []).append(document)
        for (name, temperature), members in groups.items():
            kept = [d for d in members if self.settings.mask_token_id not in d.ids and d.spans]
            skipped = len(sets[name]) - len(kept)
            manifest = self._manifest() | {
                "set": name, "temperature": temperature, "prompts": len(sets[name]), "left_out": skipped,
                "documents": len(kept), "assistant_tokens": sum(e - b for d in kept for b, e in d.spans),
                "kinds": [d.kind for d in kept], "loops": [d.loops for d in kept], "ended": [d.ended for d in kept],
            }  # fmt: skip
            if kept:
                Corpus.of(((d.ids, d.marks()) for d in kept), manifest).write(self._eval_folder(name, temperature))
        self._note(f"evaluation sets written: {', '.join(sorted(sets))}")

    def _eval_folder(self, name: str, temperature: float) -> Path:
        return self.out / "eval" / (name if temperature == 0 else f"{name}-t{temperature:g}")

    def _evaluate(self, prompt: Prompt, temperature: float) -> Conversation:
        """All turns of a prompt, loops included."""
        ids, ended = self.chat.prompt(prompt.messages()), False
        document = Document([], [], prompt.source, prompt.kind, temperature, False)
        for turn in range(len(prompt.turns)):
            if turn:
                ids = ids + self.chat.next_turn(prompt.turns[turn], ended=ended)
                if len(ids) + self.settings.max_new_tokens > self._context:
                    break
            reply: Reply = yield self._request(ids, temperature)
            document.spans.append((len(ids), len(ids) + len(reply.ids)))
            ids, ended = ids + reply.ids, reply.ended
            document.ids, document.ended = ids, ended
        return document

    def _request(self, ids: list[int], temperature: float) -> Request:
        return Request(ids, self.settings.max_new_tokens, self.chat.eos, temperature)

    # -- training answers ---------------------------------------------------------------------------------------------

    def responses(self, train: list[Prompt], held_out: HeldOut) -> None:
        """Answer the training prompts shard by shard, until the time is up."""
        shards = self._shards(train)
        todo = [i for i in range(len(shards)) if not self._shard_file(i).exists()]
        if not todo or (self.out / "train").exists():
            return
        started: list[int] = []

        def groups() -> Iterator[list[Conversation]]:
            for number, index in enumerate(todo):
                any_there = number > 0 or len(todo) < len(shards)
                if any_there and self._deadline is not None and time.monotonic() > self._deadline:
                    self._note(f"time is up: {len(todo) - number} of {len(shards)} shards are left out")
                    return
                started.append(index)
                yield [self._answer(prompt, temperature, held_out) for prompt, temperature in shards[index]]

        def finished(group: int, documents: list[Document]) -> None:
            rows = (json.dumps(vars(document), separators=(",", ":")) for document in documents)
            _write(self._shard_file(started[group]), "".join(row + "\n" for row in rows))

        total = sum(len(shards[i]) for i in todo)
        self.target().converse(groups(), finished, total, "training answers")
        self._note("training answers are there")

    def _shards(self, train: list[Prompt]) -> list[list[tuple[Prompt, float]]]:
        """(prompt, temperature) in a random order that mixes sources, cut into shards."""
        plan: list[tuple[str, Prompt, float]] = []
        for prompt in train:
            greedy_first = int(prompt.key[:8], 16) % 2
            both = (0.0, SAMPLED) if prompt.source in ANSWERED_TWICE else ((0.0, SAMPLED)[greedy_first],)
            for temperature in both:
                order = hashlib.sha256(f"{prompt.key} {temperature} {self.settings.seed}".encode()).hexdigest()
                plan.append((order, prompt, temperature))
        ordered = [(prompt, temperature) for _, prompt, temperature in sorted(plan, key=lambda entry: entry[0])]
        size = self.settings.shard
        return [ordered[i : i + size] for i in range(0, len(ordered), size)]

    def _shard_file(self, index: int) -> Path:
        return self.out / "stages" / f"responses-{index:04d}.jsonl"

    def _answer(self, prompt: Prompt, temperature: float, held_out: HeldOut) -> Conversation:
        """The answer without its loop, and perhaps a second turn; a document without spans is one to be dropped."""
        ids = self.chat.prompt(prompt.messages())
        document = Document(ids, [], prompt.source, prompt.kind, temperature, False)
        reply = yield self._request(ids, temperature)
        if not self._append(document, reply):
            return document
        lot = int(hashlib.sha256(f"turn {prompt.key} {temperature}".encode()).hexdigest()[:8], 16) / 2**32
        room = self._context - len(document.ids) - self.settings.max_new_tokens - 2 * synthesis.MOST_SAMPLED
        if lot >= SECOND_TURNS or not reply.ended or "loop cut" in document.events or room < 0:
            return document
        sampled = yield synthesis.user_turn(document.ids + self.chat.reopened_user(), self.chat)
        user = self.chat.user_text(sampled.ids)
        fault = prompt_fault(user, self.chat.count(user), self.chat.special_texts)
        if not sampled.ended or fault is not None or held_out.overlaps(user):
            document.events.append("second turn refused")
            return document
        document.events.append("second turn")
        before = document.ids
        document.ids = before + self.chat.next_turn(user, ended=True)
        reply = yield self._request(document.ids, temperature)
        if not self._append(document, reply):
            document.ids = before
        return document

    def _append(self, document: Document, reply: Reply) -> bool:
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

    # -- corpus -------------------------------------------------------------------------------------------------------

    def corpus(self, train: list[Prompt]) -> Path:
        """Join the shards that are there into the training corpus."""
        folder = self.out / "train"
        if folder.exists():
            self._note(f"{folder} is there already")
            return folder
        shards = self._shards(train)
        files = [self._shard_file(i) for i in range(len(shards)) if self._shard_file(i).exists()]
        documents = [_document(line) for file in files for line in file.read_text().splitlines()]
        counts: Counter[str] = Counter(event for document in documents for event in document.events)
        good = [d for d in documents if d.spans]
        clean = [d for d in good if self.settings.mask_token_id not in d.ids]
        counts["MASK id in document, dropped"] = len(good) - len(clean)
        counts["no answer left, dropped"] = len(documents) - len(good)
        stored = json.loads((self.out / "stages" / "prompts.json").read_text())
        manifest = self._manifest() | {
            "shards": len(files), "shards_planned": len(shards), "documents": len(clean),
            "assistant_tokens": sum(e - b for d in clean for b, e in d.spans),
            "tokens": sum(len(d.ids) for d in clean),
            "ended_by_the_target": sum(d.ended for d in clean),
            "documents_by_source": dict(Counter(d.source for d in clean)),
            "assistant_tokens_by_source": dict(_sum((d.source, e - b) for d in clean for b, e in d.spans)),
            "documents_by_temperature": dict(Counter(str(d.temperature) for d in clean)),
            "answers": dict(counts), "prompts_dropped": stored["dropped"], "prompts_sampled": stored["sampled"],
        }  # fmt: skip
        Corpus.of(((d.ids, d.marks()) for d in clean), manifest).write(folder)
        self._note(f"{folder}: {len(clean)} documents, {manifest['assistant_tokens']} assistant tokens")
        return folder

    def _manifest(self) -> dict[str, Any]:
        return {"made_by": "sgl-peagle train data", "settings": asdict(self.settings)}


# -- files ------------------------------------------------------------------------------------------------------------


def _prompt(row: dict[str, Any]) -> Prompt:
    return Prompt(row["source"], tuple(row["turns"]), row["system"], row["kind"])


def _document(line: str) -> Document:
    row = json.loads(line)
    return Document(**row | {"spans": [(begin, end) for begin, end in row["spans"]]})


def _sum(pairs: Iterator[tuple[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for key, value in pairs:
        total[key] += value
    return total


def _write(file: Path, text: str) -> None:
    """Write a file whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(file.name + ".part")
    partial.write_text(text, encoding="utf-8")
    partial.rename(file)


def _write_json(file: Path, value: Any) -> None:
    _write(file, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def _claim(out: Path, settings: Settings) -> None:
    """Take a new folder, or go on with one of the same settings."""
    file = out / "settings.json"
    if file.is_file():
        if json.loads(file.read_text()) != asdict(settings):
            raise PEagleError(
                f"{out} was begun with other settings or other files",
                "its stages would not fit together",
                "choose another folder, or give the same options again",
            )
        return
    if out.exists() and any(out.iterdir()):
        raise PEagleError(f"{out} is not empty", "nothing of yours is overwritten", "choose another folder")
    _write_json(file, asdict(settings))


def _context_length(target: Path) -> int:
    config = json.loads((target / "config.json").read_text())
    return int(config.get("max_position_embeddings") or 8192)


def target_hash(target: Path) -> str:
    """One hash over a target's config, weights, tokenizer and chat template.

    Raises:
        PEagleError: The folder holds no model.
    """
    files = sorted(f for pattern in ("*.json", "*.jinja", "*.safetensors") for f in target.glob(pattern))
    if not (target / "config.json").is_file() or not any(f.suffix == ".safetensors" for f in files):
        raise PEagleError(f"{target} holds no model", "config.json and safetensors are read", "give a model's folder")
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file_hash(file).encode())
    return digest.hexdigest()


def file_hash(file: Path) -> str:
    """SHA-256 of a file's content."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
