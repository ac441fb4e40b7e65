"""Engines of one sweep that run at once and are timed in turn, batch by batch.

The host of a small target sets its speed, and on a shared machine the host's speed changes from minute to minute. Engines
that are measured one after the other then meet different machines. In turns, every batch of one engine has a batch of
each other engine next to it, and what slows the machine slows them all. Only the engine whose turn it is works.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path
from typing import Callable, Iterator, Optional

from sweep_process import append_line


class TimeIsOver(Exception):
    """The sweep's time ended while an engine waited for its turn."""


class Turns:
    """The turn of one of ``count`` engines, kept in files of ``folder`` that all of them and the sweep see.

    Args:
        folder: Shared; created by the first.
        place: Whose turns these are, 0 ... count - 1.
        count: Engines that take turns.
        deadline: Unix time at which no turn begins any more.
        changed: Told when a turn begins (True) and ends (False).
    """

    def __init__(
        self, folder: Path, place: int, count: int, deadline: Optional[float] = None,
        changed: Callable[[bool], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self.folder, self.place, self.count, self.deadline, self.changed = folder, place, count, deadline, changed
        self._all_ready, self._parent = False, os.getppid()
        folder.mkdir(parents=True, exist_ok=True)

    def _is(self, state: str, place: int) -> bool:
        return (self.folder / f"{state}-{place}").exists()

    def _now(self) -> int:
        file = self.folder / "turn"
        return int(file.read_text()) if file.exists() else 0

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _pass_on(self) -> None:
        """Give the turn, if it is this place's, to the next that has not left. Under the lock."""
        if self._now() != self.place:
            return
        following = ((self.place + i) % self.count for i in range(1, self.count + 1))
        successor = next((place for place in following if not self._is("left", place)), self.place)
        partial = self.folder / "turn.part"
        partial.write_text(str(successor))
        partial.rename(self.folder / "turn")

    def ready(self) -> None:
        """This engine has started. Nobody's turn begins before all have, or have left."""
        (self.folder / f"ready-{self.place}").touch()

    def leave(self) -> None:
        """This engine takes no more turns: it is done, or has died (then the sweep says so for it)."""
        with self._locked():
            (self.folder / f"left-{self.place}").touch()
            self._pass_on()

    def _wait(self) -> None:
        while not self._all_ready:
            self._all_ready = all(self._is("ready", place) or self._is("left", place) for place in range(self.count))
            self._pause()
        while self._now() != self.place:
            self._pause()

    def _pause(self) -> None:
        if os.getppid() != self._parent:
            raise RuntimeError("the sweep has ended")
        if self.deadline is not None and time.time() > self.deadline:
            raise TimeIsOver
        time.sleep(0.02)

    @contextlib.contextmanager
    def mine(self) -> Iterator[None]:
        """Wait for this engine's turn, and pass it on at the end.

        Raises:
            TimeIsOver: The deadline passed first.
            RuntimeError: The sweep is gone.
        """
        self._wait()
        begin = time.time()
        self.changed(True)
        try:
            yield
        finally:
            append_line(self.folder / f"spans-{self.place}", {"place": self.place, "begin": begin, "end": time.time()})
            with self._locked():
                self._pass_on()
            self.changed(False)
