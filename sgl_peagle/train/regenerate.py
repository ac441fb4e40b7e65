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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, Optional

from sgl_peagle.errors import PEagleError
from sgl_peagle.train import synthesis
from sgl_peagle.train.chat import ChatFormat
from sgl_peagle.train.conversations import Document, Job, Speaker, Task, context_length
from sgl_peagle.train.corpus import Corpus
from sgl_peagle.train.crew import Alone, Crew
from sgl_peagle.train.filters import HeldOut
from sgl_peagle.train.generate import start
from sgl_peagle.train.prompts import Prompt
from sgl_peagle.train.stdlib_code import LONG_CODE

#: Temperature of sampled answers and evaluation sets.
SAMPLED = 0.7
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
    shard: int = 512


class Run:
    """One run of the data pipeline in folder ``out``; :meth:`everything` does all stages."""

    def __init__(
        self, out: Path, target: Path, settings: Settings, sources: synthesis.Sources, *,
        minutes: Optional[float] = None, begun: Optional[float] = None, engine: Optional[dict[str, Any]] = None,
        evaluate: bool = True, crew: Optional[Crew] = None,
    ) -> None:  # fmt: skip
        self.out, self.settings, self.sources = out, settings, sources
        self._begun = time.monotonic() if begun is None else begun
        self._deadline = None if minutes is None else self._begun + 60 * minutes
        self._evaluate_too = evaluate
        self._answered: dict[int, list[Document]] = {}
        _claim(out, settings)
        self.chat = ChatFormat.of(target)
        self._context = context_length(target)
        self.speaker = Speaker(self.chat, self._context, settings.max_new_tokens)
        if settings.mask_token_id in self.chat.eos:
            raise PEagleError(
                f"mask token id {settings.mask_token_id} ends the target's turns",
                "it occurs in every answer",
                "give the head's MASK id, one that never occurs in text",
            )
        backend, seed, options = settings.backend, settings.seed, engine or {}
        self.crew = crew or Alone(lambda: start(backend, target, seed=seed, context=self._context, **options))
        self.crew.begin(self.speaker, self._note)

    def everything(self) -> Path:
        """All stages that are not done yet; returns the folder of the training corpus."""
        try:
            train, tune = self.prompts()
            self.crew.hold_out(HeldOut(turn for p in [*self.sources.held_out_prompts, *tune] for turn in p.turns))
            self.answers(train, tune)
            return self.corpus(train)
        finally:
            self.crew.close()

    def _note(self, text: str) -> None:
        print(f"[{time.monotonic() - self._begun:6.1f} s] {text}", flush=True)

    def fits(self, prompt: Prompt) -> bool:
        """Whether a prompt and its answer fit into the target's context."""
        if len(prompt.text.encode()) + len(prompt.system or "") + 256 + self.settings.max_new_tokens <= self._context:
            return True  # a token has at least a byte: no need to count
        return len(self.chat.prompt(prompt.messages())) + self.settings.max_new_tokens <= self._context

    # -- prompts ----------------------------------------------------------------------------------------------------

    def prompts(self) -> tuple[list[Prompt], list[Prompt]]:
        """(training prompts in a random order, synthetic ones kept for tuning)."""
        file = self.out / "stages" / "prompts.json"
        if not file.is_file():
            found = synthesis.gather(self.settings, self.sources, self.chat, self._all)
            self._note("prompts are gathered")
            found.train = self._keep(found.train, self.fits, found.dropped, "too long for the context")
            _write_json(file, asdict(found))
        stored = json.loads(file.read_text())
        train, tune = ([_prompt(row) for row in stored[name]] for name in ("train", "tune"))
        self._note(f"{len(train)} training prompts, {len(tune)} for tuning; dropped: {stored['dropped']}")
        return train, tune

    def _all(self, jobs: list[Job], label: str) -> dict[str, list[Any]]:
        """The results of jobs by their names."""
        results: dict[str, list[Any]] = {}
        self.crew.work(iter(jobs), results.__setitem__, sum(len(job.tasks) for job in jobs), label)
        return results

    @staticmethod
    def _keep(
        prompts: list[Prompt], good: Callable[[Prompt], bool], dropped: dict[str, int], reason: str
    ) -> list[Prompt]:
        kept = [prompt for prompt in prompts if good(prompt)]
        if len(kept) < len(prompts):
            dropped[reason] = dropped.get(reason, 0) + len(prompts) - len(kept)
        return kept

    # -- answers ------------------------------------------------------------------------------------------------------

    def answers(self, train: list[Prompt], tune: list[Prompt]) -> None:
        """Answer the evaluation prompts, then the training prompts; write each set and each shard as it is complete."""
        evaluation = _Evaluation(self, tune) if self._evaluate_too else None
        shards = self._shards(train)
        todo = [i for i in range(len(shards)) if not self._shard_file(i).exists()]
        if (self.out / "train").exists():
            todo = []
        names = {f"responses {i:04d}": i for i in todo}
        jobs = evaluation.jobs if evaluation else []

        def finished(name: str, documents: list[Document]) -> None:
            if name in names:
                rows = (json.dumps(vars(document), separators=(",", ":")) for document in documents)
                _write(self._shard_file(names[name]), "".join(row + "\n" for row in rows))
                self._answered[names[name]] = documents
            elif evaluation is not None:
                evaluation.finished(name, documents)

        def all_jobs() -> Iterator[Job]:
            yield from jobs
            for number, index in enumerate(todo):
                any_there = number > 0 or len(todo) < len(shards)
                if any_there and self._deadline is not None and time.monotonic() > self._deadline:
                    self._note(f"time is up: {len(todo) - number} of {len(shards)} shards are left out")
                    return
                yield Job(f"responses {index:04d}", [Task("answer", "", p, t) for p, t in shards[index]])

        total = sum(len(job.tasks) for job in jobs) + sum(len(shards[i]) for i in todo)
        if total:
            self.crew.work(all_jobs(), finished, total, "answers")
            self._note("answers are there")

    def eval_folder(self, name: str, temperature: float) -> Path:
        """Where an evaluation set's answers are written."""
        return self.out / "eval" / (name if temperature == 0 else f"{name}-t{temperature:g}")

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

    def _shard(self, index: int) -> list[Document]:
        """A shard's documents, read only if an earlier run made them."""
        if index not in self._answered:
            self._answered[index] = [_document(line) for line in self._shard_file(index).read_text().splitlines()]
        return self._answered[index]

    # -- corpus -------------------------------------------------------------------------------------------------------

    def corpus(self, train: list[Prompt]) -> Path:
        """Join the shards that are there into the training corpus."""
        folder = self.out / "train"
        if folder.exists():
            self._note(f"{folder} is there already")
            return folder
        shards = self._shards(train)
        there = [i for i in range(len(shards)) if self._shard_file(i).exists()]
        documents = [document for i in there for document in self._shard(i)]
        counts: Counter[str] = Counter(event for document in documents for event in document.events)
        good = [d for d in documents if d.spans]
        clean = [d for d in good if self.settings.mask_token_id not in d.ids]
        counts["MASK id in document, dropped"] = len(good) - len(clean)
        counts["no answer left, dropped"] = len(documents) - len(good)
        stored = json.loads((self.out / "stages" / "prompts.json").read_text())
        manifest = self.manifest() | {
            "shards": len(there), "shards_planned": len(shards), "documents": len(clean),
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

    def manifest(self) -> dict[str, Any]:
        """What every corpus of this run says of itself."""
        return {"made_by": "sgl-peagle train data", "settings": asdict(self.settings)}


class _Evaluation:
    """The evaluation sets that are to be answered: their jobs, and the corpora that come of them."""

    def __init__(self, run: Run, tune: list[Prompt]) -> None:
        self._run = run
        self._sets = dict(run.sources.evaluation_sets)
        if run.settings.long_code:
            self._sets[LONG_CODE] = run.sources.long_code(run.settings.long_code, run.chat.counts)
        if tune:
            self._sets["tune"] = tune
        self.jobs: list[Job] = []
        self._job: dict[str, tuple[str, float]] = {}  # a job's name -> set and temperature
        self._found: dict[str, list[Document]] = {}
        size = run.settings.shard
        for name, prompts in self._sets.items():
            for temperature in (0.0, SAMPLED):
                fitting = [prompt for prompt in prompts if run.fits(prompt)]
                if run.eval_folder(name, temperature).exists():
                    continue
                for i in range(0, len(fitting), size):
                    tasks = [Task("evaluate", "", prompt, temperature) for prompt in fitting[i : i + size]]
                    self.jobs.append(Job(f"evaluation {name} {temperature:g} {i // size:04d}", tasks))
                    self._job[self.jobs[-1].name] = (name, temperature)

    def finished(self, job: str, documents: list[Document]) -> None:
        """Keep a job's answers, and write the set if it is complete."""
        self._found[job] = documents
        parts = [other for other in self._job if self._job[other] == self._job[job]]
        if all(part in self._found for part in parts):
            self._write(*self._job[job], [d for part in parts for d in self._found.pop(part)])

    def _write(self, name: str, temperature: float, documents: list[Document]) -> None:
        kept = [d for d in documents if self._run.settings.mask_token_id not in d.ids and d.spans]
        if not kept:
            return
        manifest = self._run.manifest() | {
            "set": name, "temperature": temperature, "prompts": len(self._sets[name]),
            "left_out": len(self._sets[name]) - len(kept),
            "documents": len(kept), "assistant_tokens": sum(e - b for d in kept for b, e in d.spans),
            "kinds": [d.kind for d in kept], "loops": [d.loops for d in kept], "ended": [d.ended for d in kept],
        }  # fmt: skip
        Corpus.of(((d.ids, d.marks()) for d in kept), manifest).write(self._run.eval_folder(name, temperature))


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
