"""Who does the jobs of a data run: this process alone, or several worker processes with a target each."""

from __future__ import annotations

import multiprocessing
import os
import re
import threading
from collections import deque
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Callable, Iterator, Optional, Protocol

from sgl_peagle.errors import PEagleError
from sgl_peagle.train import worker

if TYPE_CHECKING:
    from sgl_peagle.train.conversations import Job, Speaker
    from sgl_peagle.train.filters import HeldOut
    from sgl_peagle.train.generate import Target

#: A job that was under way in so many workers as they ended is not given to another.
MOST_ATTEMPTS = 2

Finished = Callable[[str, list[Any]], None]
Note = Callable[[str], None]


class Crew(Protocol):
    """Does jobs; ``close`` ends it."""

    def begin(self, speaker: "Speaker", note: Note) -> None:
        """Say how tasks become conversations, and where to report."""

    def hold_out(self, held_out: "HeldOut") -> None:
        """Made-up second turns of later jobs must not repeat these."""

    def work(self, jobs: Iterator["Job"], finished: Finished, total: int, label: str) -> None:
        """Do all jobs.

        Args:
            jobs: Asked for one by one, as there is room for another; may end early.
            finished: Called with a job's name and the results of its tasks; jobs end in any order.
            total: Number of tasks, for the progress bar.
        """

    def close(self) -> None: ...


class Alone:
    """This process with one target, which starts with the first job."""

    def __init__(self, start: Callable[[], "Target"]) -> None:
        self._start = start
        self._target: Optional["Target"] = None

    def begin(self, speaker: "Speaker", note: Note) -> None:
        """See :class:`Crew`."""
        self._speaker, self._note = speaker, note

    def hold_out(self, held_out: "HeldOut") -> None:
        """See :class:`Crew`."""
        self._speaker.held_out = held_out

    def work(self, jobs: Iterator["Job"], finished: Finished, total: int, label: str) -> None:
        """See :class:`Crew`."""
        from tqdm import tqdm

        from sgl_peagle.train.generate import Group

        if self._target is None:
            self._note("starting the target")
            self._target = self._start()
            self._note(f"target is ready ({self._target.name})")

        def groups() -> "Iterator[Group]":
            for job in jobs:
                yield Group(job.name, [self._speaker.conversation(task) for task in job.tasks])

        with tqdm(total=total, desc=label, mininterval=2.0) as bar:
            self._target.converse(groups(), finished, bar.update)

    def close(self) -> None:
        """See :class:`Crew`."""
        if self._target is not None:
            self._target.close()
            self._target = None


class _Hand:
    """What the command knows of one worker."""

    def __init__(self, number: int, process: Any, pipe: Connection) -> None:
        self.number, self.process, self.pipe = number, process, pipe
        self.ready = False
        self.wants = False  # it has asked for a job
        self.jobs: dict[str, "Job"] = {}  # given to it, not yet done
        self.counted = 0  # ended conversations of those, for the progress bar
        self.reason = ""
        # Sent by a thread: a pipe holds little, and a worker that is sending (or starting) does not read.
        self._outbox: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
        threading.Thread(target=self._post, daemon=True).start()

    def send(self, message: tuple[Any, ...]) -> None:
        """Send soon; a worker that has ended is noticed as its pipe is read."""
        self._outbox.put(message)

    def _post(self) -> None:
        try:
            while True:
                message = self._outbox.get()
                self.pipe.send(message)
                if message[0] == "end":
                    return
        except (OSError, ValueError):
            pass


class Workers:
    """Several processes, spread over the visible GPUs; they start at once and take jobs as they become ready.

    SGLang and tvm-ffi lock each kernel's build across processes: the first worker compiles, the others wait for that
    kernel and load it. So all may start together.
    """

    def __init__(self, number: int, backend: str, target: Path, seed: int, engine: dict[str, Any]) -> None:
        gpus = visible_gpus()
        context = multiprocessing.get_context("spawn")
        self._hands: list[_Hand] = []
        self._attempts: dict[str, int] = {}
        self._lost: list[str] = []
        self._note: Note = print
        for i in range(number):
            gpu = gpus[i % len(gpus)] if gpus else None
            share = len(range(i % len(gpus), number, len(gpus))) if gpus else number
            mine, theirs = context.Pipe()
            start = worker.Start(i, backend, target, seed, gpu, share, engine)
            process = context.Process(target=worker.main, args=(start, theirs), name=f"data worker {i}")
            process.start()
            theirs.close()
            self._hands.append(_Hand(i, process, mine))

    def begin(self, speaker: "Speaker", note: Note) -> None:
        """See :class:`Crew`."""
        self._note = note
        for hand in self._hands:
            hand.send(("begin", speaker.max_new_tokens))

    def hold_out(self, held_out: "HeldOut") -> None:
        """See :class:`Crew`."""
        for hand in self._hands:
            hand.send(("hold out", held_out.runs))

    def work(self, jobs: Iterator["Job"], finished: Finished, total: int, label: str) -> None:
        """See :class:`Crew`; jobs of a worker that ended are given to another.

        Raises:
            PEagleError: No worker is left, or a job was under way in two that ended.
        """
        from tqdm import tqdm

        again: deque["Job"] = deque()
        source: Optional[Iterator["Job"]] = jobs
        with tqdm(total=total, desc=label, mininterval=2.0) as bar:
            while True:
                for hand in self._hands:
                    while hand.wants and (again or source is not None):
                        job = again.popleft() if again else next(source, None) if source is not None else None
                        if job is None:
                            source = None
                        else:
                            hand.wants = False
                            hand.jobs[job.name] = job
                            hand.send(("job", job))
                if source is None and not again and not any(hand.jobs for hand in self._hands):
                    return
                self._listen(finished, again, bar)

    def _listen(self, finished: Finished, again: "deque[Job]", bar: Any) -> None:
        """Handle what workers say, and the end of those that ended."""
        if not self._hands:
            raise self._failure("no worker is left")
        by_pipe = {hand.pipe: hand for hand in self._hands}
        for pipe in wait(list(by_pipe), timeout=5.0):
            hand = by_pipe[pipe]  # type: ignore[index]
            try:
                message = hand.pipe.recv()
            except (EOFError, OSError):
                self._lose(hand, again, bar)
                continue
            if message[0] == "ready":
                if not any(other.ready for other in self._hands):
                    bar.reset()  # its clock
                hand.ready = True
                self._note(f"worker {hand.number} is ready ({message[1]})")
            elif message[0] == "more":
                hand.wants = True
            elif message[0] == "progress":
                hand.counted += message[1]
                bar.update(message[1])
            elif message[0] == "failed":
                hand.reason = message[1]
            elif message[1] in hand.jobs:
                hand.counted -= len(hand.jobs.pop(message[1]).tasks)
                finished(message[1], message[2])

    def _lose(self, hand: _Hand, again: "deque[Job]", bar: Any) -> None:
        hand.process.join(5)
        reason = hand.reason or f"it ended with exit code {hand.process.exitcode}"
        self._lost.append(f"worker {hand.number}: {reason}")
        self._hands.remove(hand)
        bar.update(-max(0, hand.counted))
        self._note(f"worker {hand.number} is lost: {reason}; {len(hand.jobs)} shards go to others")
        for name, job in hand.jobs.items():
            self._attempts[name] = self._attempts.get(name, 0) + 1
            if self._attempts[name] >= MOST_ATTEMPTS:
                raise self._failure(f"{name} was under way in {MOST_ATTEMPTS} workers that ended")
            again.append(job)

    def _failure(self, what: str) -> PEagleError:
        return PEagleError(
            f"{what}\n" + "\n".join(self._lost),
            "the rest of the work cannot be done; finished shards are kept",
            "see the reasons above; then give the command again, perhaps with fewer --workers",
        )

    def close(self) -> None:
        """Let workers end; a worker that does not, or is still starting, is stopped with its engine."""
        for hand in self._hands:
            hand.send(("end",))
        for hand in self._hands:
            hand.process.join(20 if hand.ready else 0)
            if hand.process.is_alive():
                hand.process.terminate()
                hand.process.join(10)
            if hand.process.is_alive():
                hand.process.kill()
            hand.pipe.close()
        self._hands = []


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES names, or the numbers of the machine's NVIDIA devices; needs no CUDA."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [entry.strip() for entry in named.split(",") if entry.strip() not in ("", "-1")]
    devices = [path.name for path in Path("/dev").glob("nvidia*")]
    return [str(i) for i in range(sum(re.fullmatch(r"nvidia\d+", name) is not None for name in devices))]
