"""One worker of a data run: a process with its own target that takes jobs from a pipe and sends back results.

Messages to the worker are ``("begin", state)`` once, ``("hold out", runs)``, ``("job", job)`` and ``("end",)``; from it
``("ready", name)``, ``("more",)``, ``("progress", n)``, ``("done", job's name, results)`` and ``("failed", reason)``.
This module imports nothing heavy, so that its process can choose its GPU and threads first.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator, Optional

if TYPE_CHECKING:
    from sgl_peagle.train.conversations import Speaker
    from sgl_peagle.train.generate import Group


@dataclass(frozen=True)
class Start:
    """What a worker needs to start its target.

    Attributes:
        gpu: What CUDA_VISIBLE_DEVICES is set to; None leaves it.
        share: How many workers have this GPU.
    """

    number: int
    backend: str
    target: Path
    seed: int
    gpu: Optional[str]
    share: int
    engine: dict[str, Any] = field(default_factory=dict)


def main(start: Start, pipe: Connection) -> None:
    """The process: start the target, then hold conversations until there are no more."""
    if start.gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = start.gpu
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        _work(start, pipe)
    except (EOFError, BrokenPipeError):  # the command has ended
        pass
    except Exception as error:
        import traceback

        reason = str(error) if isinstance(error, ValueError) else traceback.format_exc()
        try:
            pipe.send(("failed", reason))
        except OSError:
            pass
        raise SystemExit(1) from error


def _work(start: Start, pipe: Connection) -> None:
    from sgl_peagle.train import generate
    from sgl_peagle.train.chat import ChatFormat
    from sgl_peagle.train.conversations import Speaker, context_length

    context = context_length(start.target)
    share = generate.Share(start.share, _gpu_memory() if start.share > 1 else 0)
    target = generate.start(
        start.backend, start.target, seed=start.seed, context=context, share=share, worker=start.number, **start.engine
    )
    try:
        chat = ChatFormat.of(start.target)
        pipe.send(("ready", target.name))
        message = pipe.recv()
        if message[0] == "begin":
            inbox = _Inbox(pipe, Speaker(chat, context, message[1]))
            target.converse(inbox.groups(), inbox.finished, inbox.progress)
            inbox.flush()
    finally:
        target.close()


def _gpu_memory() -> int:
    """Bytes of this process's GPU, 0 if unknown."""
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else 0


class _Inbox:
    """Jobs as groups of conversations, and what comes of them."""

    def __init__(self, pipe: Connection, speaker: "Speaker") -> None:
        self._pipe, self._speaker = pipe, speaker
        self._ended, self._told = 0, time.monotonic()

    def groups(self) -> Iterator[Optional["Group"]]:
        """A group per job; None while there is none."""
        from sgl_peagle.train.generate import Group

        asked = False
        while True:
            if not asked:
                self._pipe.send(("more",))
                asked = True
            if not self._pipe.poll():
                self._tell()
                yield None
                continue
            message = self._pipe.recv()
            if message[0] == "end":
                return
            if message[0] == "hold out":
                self._speaker.held_out.add_runs(message[1])
            else:
                job, asked = message[1], False
                yield Group(job.name, [self._speaker.conversation(task) for task in job.tasks])

    def finished(self, name: str, results: list[Any]) -> None:
        """Send a job's results."""
        self.flush()
        self._pipe.send(("done", name, results))

    def progress(self, number: int) -> None:
        """Count conversations that have ended."""
        self._ended += number
        self._tell()

    def _tell(self) -> None:
        if time.monotonic() - self._told > 1:
            self.flush()

    def flush(self) -> None:
        """Send the count."""
        self._told = time.monotonic()
        if self._ended:
            self._pipe.send(("progress", self._ended))
            self._ended = 0
