"""The learning rate over a run, and how ``--minutes`` becomes a number of steps.

The rate follows the *progress* of a run, 0 ... 1: a linear warm-up, then a cosine. With a known number of steps progress is
step / total. With ``--minutes`` it is not known at first: the warm-up begins, the number is fixed from the speed of a few
steps and revised at .25, .5, .75 and .9 of the time, because the beginning of a run may be slow
(compilation, a busy machine). Each time progress goes on from where it is to 1 at the new end: the rate never jumps.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Callable, Optional

#: Warm-up while the length of the run is not known yet.
_PROVISIONAL_WARMUP = 100

#: The first number of steps: after so many steps, or this share of the time, measure until so many more, or that share.
_FIRST_FROM, _FIRST_STEPS = 10, 30
_FIRST_FROM_SHARE, _FIRST_UNTIL_SHARE = 0.06, 0.12

#: Shares of the time at which the number is revised, the share before each whose speed counts, and how far, as a share of
#: the steps, a plan may be off: the last few steps of the cosine hardly differ.
REVISIONS = (0.25, 0.5, 0.75, 0.9)
_WINDOW_SHARE, _TOLERANCE = 0.06, 0.03

#: Fewest steps that a speed is measured over.
_FEWEST = 3

#: Kept back for the last evaluation and the export: seconds, or this share of a short run; once an evaluation was timed,
#: a fifth more than that and some seconds, but never more than a quarter of the run.
_RESERVE_SECONDS, _RESERVE_SHARE = 15.0, 0.1
_EXPORT_SECONDS, _EXPORT_SHARE, _RESERVE_MOST = 5.0, 0.03, 0.25

#: Share of the time left that steps get, while no evaluation was timed; and always, for what is not foreseen.
_BEFORE_EVALUATIONS, _MARGIN = 0.93, 0.98

#: Evaluations of a run, unless ``--eval-every`` says otherwise.
EVALUATIONS = 8


@dataclass
class Schedule:
    """Learning rate by step.

    Attributes:
        warmup: Share of the run that warms up.
        final: Share of the peak at the end of the cosine.
        total: Steps of the run, None while unknown.
        since, progress: The steps done when ``total`` was last fixed, and the progress there.
    """

    warmup: float
    final: float
    total: Optional[int] = None
    since: int = 0
    progress: float = 0.0

    def at(self, done: int) -> float:
        """Progress after ``done`` steps."""
        steps = done - self.since
        if self.total is None:
            return max(self.progress, min(self.warmup, self.progress + self.warmup * steps / _PROVISIONAL_WARMUP))
        return min(1.0, self.progress + (1 - self.progress) * steps / max(1, self.total - self.since))

    def factor(self, step: int) -> float:
        """Share of the peak learning rate at a step (from 0)."""
        at = self.at(step + 1)
        if at < self.warmup:
            return at / self.warmup
        done = (at - self.warmup) / max(1e-9, 1 - self.warmup)
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * done))

    def fix(self, done: int, total: int) -> None:
        """The run has ``total`` steps, as is found out after ``done`` of them."""
        self.progress, self.since, self.total = self.at(done), done, total

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs."""
        kept = asdict(self)
        return {name: kept[name] for name in ("total", "since", "progress")}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state`."""
        self.total, self.since, self.progress = state["total"], state["since"], state["progress"]


class Pace:
    """Keeps a run within its time.

    Args:
        schedule: Whose ``total`` is fixed here.
        minutes: Length of the command; None: nothing is planned here.
        begin: When it began, by ``clock``.
        clock: Seconds.
        sync: Waits for the device, so that times are those of finished steps.
        evaluates: The run has held-out documents.
        eval_every: Steps between evaluations; None: :data:`EVALUATIONS` in all.
        final: The total is the checkpoint's and stays: a resumed run is the same run.
    """

    def __init__(
        self, schedule: Schedule, minutes: Optional[float], begin: float, clock: Callable[[], float],
        sync: Callable[[], None], *, evaluates: bool, eval_every: Optional[int], first: int = 0, final: bool = False,
    ) -> None:  # fmt: skip
        self._schedule, self._begin, self._clock, self._sync = schedule, begin, clock, sync
        self._seconds = None if minutes is None else minutes * 60
        self._evaluates, self._eval_every, self._first = evaluates, eval_every, first
        self._revisions = () if final or minutes is None else REVISIONS
        self._open = minutes is not None and schedule.total is None
        self._paused = 0.0
        self._evaluation: Optional[float] = None
        self._mark: Optional[tuple[float, int]] = None

    def evaluated(self, seconds: float) -> None:
        """An evaluation took so long: it is no part of the steps' time, and the next will take as long."""
        self._paused += seconds
        self._evaluation = seconds

    def out_of_time(self) -> bool:
        """Whether only the last evaluation and the export fit into what is left."""
        return self._seconds is not None and self._clock() >= self._deadline()

    def after_step(self, done: int) -> Optional[dict[str, Any]]:
        """Measure, and fix or revise the number of steps where it is time to.

        Returns:
            What was decided, for the log; mostly None.
        """
        if self._seconds is None or not (self._open or self._revisions):
            return None
        share = (self._clock() - self._begin) / self._seconds
        steps = done - self._first
        if self._mark is None:
            if self._open:
                due = steps >= _FIRST_FROM or share >= _FIRST_FROM_SHARE
            else:
                due = share >= self._revisions[0] - _WINDOW_SHARE
            if due:
                self._mark = (self._busy(), done)
            return None
        since, marked = self._mark
        if self._open:
            due = done - marked >= _FIRST_STEPS or share >= _FIRST_UNTIL_SHARE
        else:
            due = share >= self._revisions[0]
        if not due or done - marked < _FEWEST:
            return None
        each = (self._busy() - since) / (done - marked)
        share = (self._clock() - self._begin) / self._seconds
        self._mark, self._open = None, False
        self._revisions = tuple(r for r in self._revisions if r > share)
        return self._decide(done, each)

    def _busy(self) -> float:
        self._sync()
        return self._clock() - self._paused

    def _deadline(self) -> float:
        assert self._seconds is not None
        reserve = min(_RESERVE_SECONDS, _RESERVE_SHARE * self._seconds)
        if self._evaluation is not None:
            export = min(_EXPORT_SECONDS, _EXPORT_SHARE * self._seconds)
            reserve = min(_RESERVE_MOST * self._seconds, 1.2 * self._evaluation + export)
        return self._begin + self._seconds - reserve

    def _decide(self, done: int, each: float) -> Optional[dict[str, Any]]:
        assert self._seconds is not None
        now, before = self._clock(), self._schedule.total
        left = max(0.0, self._deadline() - now) * _MARGIN
        if self._evaluates and self._evaluation is None:
            left *= _BEFORE_EVALUATIONS
        elif self._evaluation is not None and self._eval_every is None:
            # The last one is in the reserve.
            left -= min(left / 2, (EVALUATIONS - 1) * (1 - self._schedule.at(done)) * self._evaluation)
        elif self._evaluation is not None:
            each += self._evaluation / self._eval_every  # type: ignore[operator]
        total = done + max(1, int(left / max(each, 1e-9)))
        if before is not None and abs(total - before) <= _TOLERANCE * before:
            return None
        self._schedule.fix(done, total)
        return {
            "total": total, "before": before, "step_ms": round(each * 1000, 1), "seconds": round(now - self._begin, 1),
        }  # fmt: skip
