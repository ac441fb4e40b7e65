"""Learning rate and ``--minutes``: continuity, slow and fast beginnings, evaluations in the budget, resumption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Callable

import pytest
import torch

from sgl_peagle.train import checkpoint
from sgl_peagle.train.loop import LOG, Trainer
from sgl_peagle.train.schedule import Pace, Schedule
from train_cases import place_of, quiet, run, settings_of


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return place_of(tmp_path_factory.mktemp("place"))


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_schedule() -> None:
    values = [Schedule(0.03, 0.02, 100).factor(step) for step in range(100)]
    assert values[:3] == pytest.approx([1 / 3, 2 / 3, 1]) and values[-1] == pytest.approx(0.02)
    assert all(a >= b for a, b in zip(values[2:], values[3:]))
    assert Schedule(0.03, 0.02).factor(0) == pytest.approx(0.01)
    assert Schedule(0.03, 0.02).factor(500) == 1
    assert Schedule(0.0, 0.02, 10).factor(9) == pytest.approx(0.02)


@pytest.mark.parametrize("totals", [(300, 900), (900, 300), (250, 201), (4000, 4000)])
def test_fixing_the_total_never_makes_the_rate_jump(totals: tuple[int, int]) -> None:
    schedule = Schedule(0.03, 0.02)
    values = []
    step = 0
    while schedule.total is None or step < schedule.total:
        if step in (40, 200):
            schedule.fix(step, totals[step == 200])
            again = Schedule(0.03, 0.02)
            again.restore(json.loads(json.dumps(schedule.state())))
            assert again == schedule
        values.append(schedule.factor(step))
        step += 1
    assert step == totals[1] and values[-1] == pytest.approx(0.02)
    top = values.index(max(values))
    assert values[top] > 0.97 and values[: top + 1] == sorted(values[: top + 1])
    assert values[top:] == sorted(values[top:], reverse=True)
    if totals[1] > 210:  # else the rest of the cosine has to fit into one step
        assert abs(values[200] - values[199]) < 0.01


def simulate(
    minutes: float, step_seconds: Callable[[float], float], evaluation: float = 0.0, startup: float = 5.0, **options: Any
) -> tuple[Schedule, int, float, list[dict[str, Any]]]:
    """(schedule, steps done, seconds used, plans) of a run whose steps take ``step_seconds(seconds since the beginning)``."""
    clock, schedule = Clock(), Schedule(0.03, 0.02)
    begin = clock.now
    pace = Pace(
        schedule, minutes, begin, clock, lambda: None, evaluates=evaluation > 0, eval_every=options.get("eval_every")
    )
    clock.now += startup
    done, plans = 0, []
    every = options.get("eval_every")

    def evaluate() -> None:
        clock.now += evaluation
        pace.evaluated(evaluation)

    while (schedule.total is None or done < schedule.total) and not pace.out_of_time():
        clock.now += step_seconds(clock.now - begin)
        done += 1
        plans += [plan for plan in [pace.after_step(done)] if plan]
        at = every or (schedule.total and -(-schedule.total // 8))
        if evaluation and at and done % at == 0 and done != schedule.total:
            evaluate()
    if evaluation:
        evaluate()
    return schedule, done, clock.now - begin, plans


CASES: list[tuple[float, Callable[[float], float], float, dict[str, Any]]] = [
    (6.47, lambda t: 0.36 if t < 107 else 0.138, 1.0, {}),  # as seen on a GPU that something else used at first
    (6.0, lambda t: 0.36 if t < 40 else 0.138, 0.0, {}),
    (6.0, lambda t: 0.1, 3.0, {}),
    (6.0, lambda t: 0.08 if t < 200 else 0.16, 2.0, {}),  # a slow end
    (2.0, lambda t: 20.0 if t < 10 else 0.05, 2.0, {"startup": 20.0}),  # a long compilation
    (8.0, lambda t: 0.1, 10.0, {"eval_every": 500}),
    (0.5, lambda t: 2.5, 0.5, {}),  # hardly any steps
]


@pytest.mark.parametrize("minutes, seconds, evaluation, options", CASES)
def test_minutes_are_used_and_kept(
    minutes: float, seconds: Callable[[float], float], evaluation: float, options: dict[str, Any]
) -> None:
    """The run ends inside its time with the schedule at its end, and leaves little over, however it began."""
    schedule, done, used, plans = simulate(minutes, seconds, evaluation, **options)
    assert used <= minutes * 60
    assert used > 0.85 * minutes * 60
    assert plans[0]["before"] is None and plans[-1]["total"] == schedule.total
    assert schedule.total is not None and schedule.factor(done - 1) < 0.06
    assert all(a["total"] == b["before"] for a, b in zip(plans, plans[1:]))


def test_a_steady_run_is_planned_once() -> None:
    assert len(simulate(6.0, lambda t: 0.1)[3]) == 1


def test_a_slow_beginning_in_a_real_run(place: Path, tmp_path: Path) -> None:
    """The revision is in log, checkpoint and record; a run broken after it and resumed is the same to the bit."""
    settings = settings_of(place, steps=None, minutes=1.0, holdout=2)

    def go(out: Path, stop_after: int = 0, resume: bool = False) -> Trainer:
        clock = Clock()
        trainer = Trainer(settings, out, resume=resume, echo=quiet, clock=clock)

        def on_step(step: int) -> None:
            clock.now += 1.0 if step <= 12 else 0.5
            if step == stop_after:
                trainer.interrupt()

        trainer.run(on_step)
        return trainer

    straight = go(tmp_path / "straight")
    first, last = straight.plans[0], straight.plans[-1]
    assert first["before"] is None and last["total"] > 1.3 * first["total"]
    assert straight.step == straight.total == last["total"]
    go(tmp_path / "broken", stop_after=last["step"] + 2)
    # What is left is planned, whatever time the second part is given or needs.
    go(tmp_path / "broken", resume=True)
    one, two = (checkpoint.load(tmp_path / name) for name in ("straight", "broken"))
    assert one["schedule"] == two["schedule"] and one["plans"] == two["plans"] and one["step"] == two["step"]
    assert all(torch.equal(one["head"][name], two["head"][name]) for name in one["head"])
    lines = [json.loads(line) for line in (tmp_path / "straight" / LOG).read_text().splitlines()]
    assert [line["plan"]["total"] for line in lines if "plan" in line] == [plan["total"] for plan in straight.plans]
    record = json.loads((tmp_path / "straight" / "head" / "training.json").read_text())
    assert record["plans"] == straight.plans and record["steps_planned"] == straight.total


def test_time_is_real_by_default(place: Path, tmp_path: Path) -> None:
    trainer = run(settings_of(place, steps=None, minutes=0.05), tmp_path / "out")
    assert trainer.total is not None and 3 < trainer.step <= trainer.total
    assert trainer.clock() - trainer.begin < 10
    assert (tmp_path / "out" / "head").is_dir()
