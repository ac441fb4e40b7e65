"""Batches: which documents share a step, and the rows they give. Everything follows from (seed, epoch, index).

All of it happens on the host, in a process ahead of the steps, so that a step never waits for it.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any, Callable, Iterator, Optional, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from sgl_peagle.errors import PEagleError
from sgl_peagle.train.attention import BLOCK, Rows
from sgl_peagle.train.corpus import Corpus
from sgl_peagle.train.rows import Bools, Cod, Ints, all_rows, generator, most_rows, sample_rows, supervised

#: Documents are sorted by length within so many batches' worth of them: little padding, still shuffled.
_BUCKET_BATCHES = 16

#: Keeps the draws of rows apart from those of the order.
_ORDER, _ROWS = 1, 2


@dataclass(frozen=True)
class Document:
    """One document, cut to the run's length.

    Attributes:
        sample: Its index in the corpus.
        tokens: [n + 1] int64.
        weight: [n] bool, the supervised positions.
    """

    sample: int
    tokens: Ints
    weight: Bools

    @property
    def n(self) -> int:
        """Positions."""
        return len(self.weight)


@dataclass(frozen=True)
class Batch:
    """Documents and their rows: depth-0 rows of all documents first, then rollouts by document, anchor and depth.

    Attributes:
        tokens: [B, L] int64, padded on the right with 0.
        rows: Who the R rows are.
        positions: [B] int64, n of each document.
        context: Number of depth-0 rows.
        trained: [M] int64, rows with weight, in the order of rows.
        weight: Their total weight (M, as weights are 0 or 1).
        text_tokens: Tokens of all documents, for the throughput.
        samples: [B] int64, where each document is in the corpus.
    """

    tokens: Tensor
    rows: Rows
    positions: Ints
    context: int
    trained: Ints
    text_tokens: int
    samples: Ints

    @property
    def state(self) -> Ints:
        """[R] int64: index of position p = anchor + depth of the row's document in [B, L], flat."""
        return self.rows.document * self.tokens.shape[1] + self.rows.anchor + self.rows.depth


class Documents(Sequence[Document]):
    """The documents of a corpus that have something to train, cut to ``max_length`` tokens.

    Raises:
        PEagleError: The MASK id occurs, an id is outside the vocabulary, or nothing is left.
    """

    def __init__(
        self, corpus: Corpus, max_length: int, strict: bool, vocab_size: int, mask_token_id: Optional[int]
    ) -> None:
        if mask_token_id is not None and bool((corpus.tokens == mask_token_id).any()):
            count = int((corpus.tokens == mask_token_id).sum())
            raise PEagleError(
                f"the MASK id {mask_token_id} occurs {count} times in the corpus",
                "its embedding becomes the MASK row, so it must never be text",
                "choose a reserved id that the tokenizer never produces (--mask-token-id)",
            )
        low, high = int(corpus.tokens.min()), int(corpus.tokens.max())
        if low < 0 or high >= vocab_size:
            raise PEagleError(
                f"the corpus has ids {low} ... {high}, the target a vocabulary of {vocab_size}",
                "it was made with another tokenizer",
                "make the corpus with this target",
            )
        self._found: list[Document] = []
        for sample, (tokens, assistant) in enumerate(corpus):
            ids, marks = tokens[:max_length].numpy(), assistant[:max_length].numpy()
            weight = supervised(marks, strict) if len(ids) > 1 else np.zeros(0, dtype=bool)
            if weight.any():
                self._found.append(Document(sample, ids, weight))
        if not self._found:
            raise PEagleError(
                f"none of the {len(corpus)} documents has a trainable position within {max_length} tokens",
                "a position is trained where its token and the next one are the target's own",
                "check the assistant marks of the corpus, or raise --max-length",
            )

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self._found[index]


def split(documents: Sequence[Document], holdout: int) -> tuple[list[Document], list[Document]]:
    """(training, held out): the last ``holdout`` documents are held out.

    Raises:
        PEagleError: Nothing would be left to train on.
    """
    if holdout >= len(documents):
        raise PEagleError(
            f"--holdout {holdout} of {len(documents)} usable documents",
            "nothing is left to train on",
            "hold out fewer, or use a larger corpus",
        )
    cut = len(documents) - holdout
    return list(documents[:cut]), list(documents[cut:])


#: Epochs whose orders are looked through for the largest batch.
_BUDGET_EPOCHS = 3


def row_budget(documents: Sequence[Document], seed: int, tokens_per_step: int, cod: Cod) -> int:
    """Rows of the largest batches of a run, a multiple of 128, so that shapes can be fixed and memory is known at once.

    A batch of a later epoch may exceed it a little: then FlexAttention compiles once more.
    """
    bounds = np.array([most_rows(d.n, int(d.weight.sum()), cod) for d in documents])
    most = max(
        int(bounds[batch].sum())
        for epoch in range(_BUDGET_EPOCHS)
        for batch in epoch_order(documents, seed, epoch, tokens_per_step)
    )
    return -(-int(most * 1.02) // BLOCK) * BLOCK


def epoch_order(documents: Sequence[Document], seed: int, epoch: int, tokens_per_step: int) -> list[list[int]]:
    """The batches of an epoch, as indices into ``documents``; every document occurs once.

    It follows from the lengths alone, not from the rows: P-EAGLE and EAGLE-3 heads see the same documents in each step.
    """
    random = generator(seed, _ORDER, epoch)
    order = random.permutation(len(documents))
    lengths = np.array([d.n for d in documents])
    per_bucket = max(1, int(_BUCKET_BATCHES * tokens_per_step / lengths.mean()))
    batches: list[list[int]] = []
    current: list[int] = []
    tokens = 0
    for number, begin in enumerate(range(0, len(order), per_bucket)):
        bucket = order[begin : begin + per_bucket]
        bucket = bucket[np.argsort(lengths[bucket], kind="stable")]
        # Every other bucket falling: neighbours stay alike where two buckets meet.
        for i in (bucket if number % 2 == 0 else bucket[::-1]).tolist():
            if current and tokens + lengths[i] > tokens_per_step:
                batches.append(current)
                current, tokens = [], 0
            current.append(i)
            tokens += int(lengths[i])
    batches.append(current)
    return [batches[i] for i in random.permutation(len(batches))]


def make_batch(documents: Sequence[Document], rows_of: Callable[[Document], tuple[Ints, Ints]]) -> Batch:
    """Lay documents out.

    Args:
        documents: At least one.
        rows_of: Anchors and depths of a document.
    """
    length = max(len(d.tokens) for d in documents)
    tokens = np.zeros((len(documents), length), dtype=np.int64)
    anchors, depths, owners, trained = [], [], [], []
    for i, document in enumerate(documents):
        tokens[i, : len(document.tokens)] = document.tokens
        anchor, depth = rows_of(document)
        anchors.append(anchor)
        depths.append(depth)
        owners.append(np.full(len(anchor), i, dtype=np.int64))
        trained.append(document.weight[anchor + depth])
    rows = Rows(np.concatenate(owners), np.concatenate(anchors), np.concatenate(depths))
    order = np.lexsort((rows.depth, rows.anchor, rows.document, rows.depth > 0))
    return Batch(
        torch.from_numpy(tokens),
        rows.take(order),
        np.array([d.n for d in documents], dtype=np.int64),
        int((rows.depth == 0).sum()),
        np.flatnonzero(np.concatenate(trained)[order]),
        sum(len(d.tokens) for d in documents),
        np.array([d.sample for d in documents], dtype=np.int64),
    )


def training_batch(documents: Sequence[Document], seed: int, epoch: int, cod: Cod) -> Batch:
    """A batch with rows drawn for (seed, epoch, sample)."""
    return make_batch(documents, lambda d: sample_rows(d.weight, cod, generator(seed, _ROWS, epoch, d.sample)))


def full_batch(documents: Sequence[Document], depths: int) -> Batch:
    """A batch with every row of every depth, for evaluation."""
    return make_batch(documents, lambda d: all_rows(d.n, depths))


class _Stream(IterableDataset[tuple[int, int, int, Batch]]):
    """The batches of a run without end, from a place on."""

    def __init__(
        self, documents: Sequence[Document], seed: int, tokens_per_step: int, cod: Cod, epoch: int, index: int
    ) -> None:
        self.documents, self.seed, self.tokens_per_step, self.cod = documents, seed, tokens_per_step, cod
        self.epoch, self.index = epoch, index

    def __iter__(self) -> Iterator[tuple[int, int, int, Batch]]:
        epoch, first = self.epoch, self.index
        while True:
            order = epoch_order(self.documents, self.seed, epoch, self.tokens_per_step)
            for i in range(first, len(order)):
                chosen = [self.documents[j] for j in order[i]]
                yield epoch, i, len(order), training_batch(chosen, self.seed, epoch, self.cod)
            epoch, first = epoch + 1, 0


def _as_it_is(item: Any) -> Any:
    return item


def _leave_signals(worker: int) -> None:
    """Ctrl-C reaches every process of a terminal; the trainer decides what it means, and still needs its batches."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


class Feed:
    """Batches from a process that works ahead; ``next`` gives (epoch, index in epoch, batches in epoch, batch).

    A thread would hold the interpreter's lock for much of the time in which a step's kernels are launched.

    Args:
        documents: Training documents.
        seed, tokens_per_step: See :func:`epoch_order`.
        cod: Which rows are drawn.
        epoch, index: Where to start (a resumed run).
    """

    def __init__(
        self, documents: Sequence[Document], seed: int, tokens_per_step: int, cod: Cod,
        epoch: int = 0, index: int = 0, ahead: int = 4,
    ) -> None:  # fmt: skip
        stream = _Stream(documents, seed, tokens_per_step, cod, epoch, index)
        self._batches: Optional[Iterator[Any]] = iter(
            DataLoader(
                stream, batch_size=None, num_workers=1, prefetch_factor=ahead, collate_fn=_as_it_is,
                worker_init_fn=_leave_signals, generator=torch.Generator(),  # its own: the run's is not drawn from
            )  # fmt: skip
        )

    def next(self) -> tuple[int, int, int, Batch]:
        """The next batch; an error of the process is raised here."""
        assert self._batches is not None, "the feed is closed"
        item: tuple[int, int, int, Batch] = next(self._batches)
        return item

    def close(self) -> None:
        """Stop the process, also one that hangs (it ignores SIGTERM, DataLoader's last resort)."""
        workers = list(getattr(self._batches, "_workers", ()))
        self._batches = None
        for worker in workers:
            if worker.is_alive():
                worker.kill()
