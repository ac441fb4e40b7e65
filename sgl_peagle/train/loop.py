"""The training run: target and head in one step, a fixed schedule, logs, checkpoints, an orderly end.

The step reads nothing back from the device; numbers are fetched at log intervals. What a run does follows from its settings
and corpus alone (on a CPU bit by bit), except that ``--minutes`` has to measure: see :mod:`sgl_peagle.train.schedule`. What it
decided is in the log and the checkpoint, and a resumed run keeps to it.
"""

from __future__ import annotations

import json
import math
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any, Callable, Optional

import torch
from torch import Tensor, nn
from tqdm import tqdm

from sgl_peagle import __version__
from sgl_peagle.errors import PEagleError
from sgl_peagle.train import checkpoint, eagle3, partition
from sgl_peagle.train.attention import BLOCK, choose, to_device
from sgl_peagle.train.batches import Batch, Documents, Feed, epoch_order, row_budget, split
from sgl_peagle.train.corpus import Corpus
from sgl_peagle.train.export import export_eagle3, export_peagle
from sgl_peagle.train.holdout import evaluate
from sgl_peagle.train.losses import RowStats
from sgl_peagle.train.model import Head, Shape
from sgl_peagle.train.noise import with_noise
from sgl_peagle.train.partition import LossSettings
from sgl_peagle.train.rows import Ints
from sgl_peagle.train.schedule import EVALUATIONS, Pace, Schedule
from sgl_peagle.train.settings import Settings, check_resumed
from sgl_peagle.train.target import Target
from sgl_peagle.train.weights import Ema, make_optimizer, wearing
from sgl_peagle.train.window import Window

LOG = "train_log.jsonl"

#: Documents whose states give ``mask_hidden`` and ``fc`` their scale.
_START_DOCUMENTS = 16


class Trainer:
    """One run.

    Args:
        settings: What to do.
        out: Its folder, made here; with ``resume`` that of the interrupted run.
        resume: Go on from the checkpoint.
        formats: What to export, of :data:`~sgl_peagle.train.export.FORMATS`.
        target_name: Hub id of the target, recorded in the head.
        echo: Where messages go.
        clock: Seconds; for tests.

    Raises:
        PEagleError: Anything that would make the run useless, before it starts.
    """

    def __init__(
        self,
        settings: Settings,
        out: Path,
        *,
        resume: bool = False,
        formats: tuple[str, ...] = ("peagle",),
        target_name: Optional[str] = None,
        echo: Callable[[str], None] = print,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock, self.begin = clock, clock()
        self.settings, self.out, self.formats, self.target_name, self.echo = settings, out, formats, target_name, echo
        self._check_folder(resume)
        saved = checkpoint.load(out) if resume else None
        if saved is not None:
            check_resumed(saved["settings"], settings.as_json())
        self.device = _device(settings.device)
        on_gpu = self.device.type == "cuda"
        dtype = torch.bfloat16 if on_gpu else torch.float32
        corpus = Corpus.open(Path(settings.corpus))
        self.target = Target(settings.target, self.device, dtype, settings.aux_layer_ids)
        self._check_sizes()
        vocab = self.target.config.vocab_size
        documents = Documents(corpus, settings.max_length, settings.strict, vocab, settings.mask_token_id)
        self.documents, self.held_out = split(documents, settings.holdout)
        self.budget = row_budget(self.documents, settings.seed, settings.tokens_per_step, settings.cod)
        self.per_epoch = len(self._order(0))
        self.identity = {"corpus_sha256": corpus.sha256, "target_sha256": self.target.sha256()}
        if saved is not None and saved["identity"] != self.identity:
            raise PEagleError(
                "the corpus or the target is not the one that the run was started with",
                "a resumed run is the same run",
                "restore them, or start a new run in another folder",
            )
        aux = len(self.target.aux_layer_ids)
        shape = Shape.of_target(self.target.config, settings.layers, aux, settings.intermediate_size)
        self.head = Head(
            shape,
            self.target.embedding,
            mask_token_id=settings.mask_token_id,
            embedding=settings.embedding,
            positions=settings.max_length + settings.depths,
            dtype=dtype,
        )
        random = torch.Generator().manual_seed(settings.seed)
        self.head.start(self._some_aux(), self.target.norm.float().cpu(), random)
        self.head.to(self.device)
        self.loss = LossSettings(
            self.target.lm_head, settings.loss, settings.chunk, settings.compile_loss, settings.refused_weight
        )
        self.optimizer = make_optimizer(self.head, settings)
        self.ema = Ema(self.head, settings.ema) if settings.ema else None
        q_step, k_step = self._shapes()
        self.planner, words = choose(
            settings.attention, q_step, k_step, shape.num_heads, shape.num_kv_heads, shape.head_dim, dtype, self.device
        )
        self.echo(f"attention: {words}")
        torch.manual_seed(settings.seed)  # nothing in a step draws from it; if that changes, runs stay repeatable
        self.step = self.epoch = self.index = self.tokens_seen = 0
        self.schedule = Schedule(settings.warmup, settings.final_lr, self._planned_steps())
        self.plans: list[dict[str, Any]] = []
        self.best: Optional[dict[str, Any]] = None
        self.walked: Optional[dict[str, Any]] = None
        if saved is not None:
            self._restore(saved)
        self.pace = Pace(
            self.schedule, settings.minutes, self.begin, clock, self._sync, evaluates=bool(self.held_out),
            eval_every=settings.eval_every, first=self.step, final=saved is not None and self.total is not None,
        )  # fmt: skip
        self._stop: Optional[int] = None

    @property
    def total(self) -> Optional[int]:
        """Steps of the run; None while unknown."""
        return self.schedule.total

    # -- setting up ---------------------------------------------------------------------------------------------

    def _check_folder(self, resume: bool) -> None:
        if resume and not self.out.is_dir():
            raise PEagleError(f"{self.out} does not exist", "--resume goes on with a run", "leave out --resume")
        if not resume and self.out.exists():
            raise PEagleError(
                f"{self.out} exists",
                "it may hold an earlier run, and nothing is overwritten",
                "choose another folder, or go on with that run: --resume",
            )

    def _check_sizes(self) -> None:
        limit = getattr(self.target.config, "max_position_embeddings", None)
        if limit is not None and self.settings.max_length > limit:
            raise PEagleError(
                f"--max-length {self.settings.max_length} with a target of {limit} positions",
                "its states mean nothing beyond them",
                f"use --max-length {limit} or less",
            )
        mask, vocab = self.settings.mask_token_id, self.target.config.vocab_size
        if mask is not None and not 0 <= mask < vocab:
            raise PEagleError(
                f"--mask-token-id {mask} of a vocabulary of {vocab}", "the id has no embedding", "choose a reserved id"
            )

    def _order(self, epoch: int) -> list[list[int]]:
        return epoch_order(self.documents, self.settings.seed, epoch, self.settings.tokens_per_step)

    def _planned_steps(self) -> Optional[int]:
        if self.settings.steps is not None:
            return self.settings.steps
        if self.settings.epochs is None:
            return None
        whole = int(self.settings.epochs)
        steps = sum(len(self._order(epoch)) for epoch in range(whole))
        return max(1, steps + round((self.settings.epochs - whole) * len(self._order(whole))))

    def _some_aux(self) -> Tensor:
        """Aux states of supervised positions of a few documents, [n, A*H] float32 on the CPU."""
        parts = []
        for document in self.documents[:_START_DOCUMENTS]:
            tokens = to_device(document.tokens[None], self.device)
            aux = self.target.read(tokens).aux[:-1]
            parts.append(aux[torch.from_numpy(document.weight).to(self.device)].float().cpu())
        return torch.cat(parts)

    def _shapes(self) -> tuple[int, int]:
        """What FlexAttention pads queries and keys to: the largest batch, so that one compilation serves the run."""
        if self.settings.method == "eagle3":
            return self.budget, self.budget * self.settings.depths
        if self.settings.segments == 1:
            return self.budget, self.budget
        step = -(-self.budget // (4 * BLOCK)) * BLOCK  # segments differ in size: a few shapes
        return step, step

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def _restore(self, saved: dict[str, Any]) -> None:
        self.head.load_state_dict(saved["head"])
        self.optimizer.load_state_dict(saved["optimizer"])
        for name in ("step", "epoch", "index", "tokens_seen", "plans", "best"):
            setattr(self, name, saved[name])
        if self.ema is not None:
            self.ema.restore(saved["ema"])
        asked = self.total
        if saved["schedule"]["total"] is not None:
            self.schedule.restore(saved["schedule"])
        if asked is not None and asked != self.total:
            self.echo(f"the run goes on to the {self.total} steps that it was planned with, not {asked}")
        torch.set_rng_state(saved["rng"])

    def save(self) -> None:
        """Write the checkpoint."""
        checkpoint.save(
            self.out,
            {
                "settings": json.loads(json.dumps(self.settings.as_json())),
                "identity": self.identity,
                "head": self.head.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "step": self.step,
                "epoch": self.epoch,
                "index": self.index,
                "tokens_seen": self.tokens_seen,
                "schedule": self.schedule.state(),
                "plans": self.plans,
                "best": self.best,
                "ema": self.ema.weights if self.ema is not None else None,
                "rng": torch.get_rng_state(),
            },
        )

    # -- running --------------------------------------------------------------------------------------------------

    def backward(self, batch: Batch) -> tuple[Ints, RowStats]:
        """Accumulate the gradient of one batch; the depth of every judged row, and what is known of the rows."""
        states = self.target.read(to_device(batch.tokens, self.device))
        states = with_noise(states, batch, self.settings.noise, self.head.aux_scale, self.settings.seed, self.epoch)
        if self.settings.method == "eagle3":
            return eagle3.loss_and_backward(self.head, batch, states, self.planner, self.loss, self.settings.depths)
        return partition.loss_and_backward(
            self.head, batch, states, self.planner, self.loss, self.settings.segments, self.settings.partition
        )

    def update(self, batch: Batch) -> tuple[Ints, RowStats]:
        """One optimiser step."""
        self.optimizer.zero_grad()
        result = self.backward(batch)
        nn.utils.clip_grad_norm_(self.head.parameters(), self.settings.clip)
        factor = self.schedule.factor(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * factor
        self.optimizer.step()
        if self.ema is not None:
            self.ema.update(self.step + 1)
        return result

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Finish the step, write a checkpoint and end."""
        self._stop = number

    def run(self, on_step: Optional[Callable[[int], None]] = None) -> Optional[int]:
        """Train to the end, then export.

        Args:
            on_step: Called after every step with the number of steps done.

        Returns:
            None when the run is complete; the signal's number when it was interrupted.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        before = self._catch_signals()
        s = self.settings
        feed = Feed(self.documents, s.seed, s.tokens_per_step, s.cod, self.epoch, self.index)
        window = Window(s.depths, self.device)
        bar = tqdm(total=self.total, initial=self.step, desc=s.method, unit="step", mininterval=1.0, dynamic_ncols=True)
        try:
            self._loop(feed, window, bar, on_step)
        finally:
            bar.close()
            feed.close()
            for number, handler in before.items():
                signal.signal(number, handler)
        self.save()
        if self._stop is not None:
            self.echo(f"stopped after step {self.step}; go on with the same command and --resume")
            return self._stop
        if self.held_out:
            self._evaluate()
            self.save()
        self._export()
        return None

    def _loop(self, feed: Feed, window: "Window", bar: Any, on_step: Optional[Callable[[int], None]]) -> None:
        s = self.settings
        while (self.total is None or self.step < self.total) and self._stop is None and not self._out_of_time():
            self.epoch, self.index, self.per_epoch, batch = feed.next()
            depths, stats = self.update(batch)
            window.add(depths, stats, batch)
            self.step, self.index = self.step + 1, self.index + 1
            self.tokens_seen += batch.text_tokens
            bar.update()
            self._plan(bar)
            if self.step % s.log_every == 0 or self.step == self.total:
                self._log(window, bar)
            if self.step % s.checkpoint_every == 0:
                self.save()
            if self.held_out and self.step != self.total and self._time_to_evaluate():
                window.pause(self._evaluate)
            if on_step is not None:
                on_step(self.step)

    def _catch_signals(self) -> dict[int, Any]:
        """SIGINT and SIGTERM end the run after the step (only the main thread may install handlers)."""
        if threading.current_thread() is not threading.main_thread():
            return {}
        return {
            number: signal.signal(number, lambda n, _frame: self.interrupt(n)) for number in (signal.SIGINT, signal.SIGTERM)
        }

    def _out_of_time(self) -> bool:
        if not self.pace.out_of_time():
            return False
        if self.total is not None and self.step < self.total:
            self.echo(f"time is up after step {self.step} of {self.total}")
        return True

    def _sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _plan(self, bar: Any) -> None:
        """Let ``--minutes`` fix or revise the number of steps."""
        plan = self.pace.after_step(self.step)
        if plan is None:
            return
        self.plans.append({"step": self.step, **plan})
        self._write({"step": self.step, "plan": plan})
        bar.total = self.total
        bar.refresh()
        was = "" if plan["before"] is None else f", not {plan['before']}"
        self.echo(f"{plan['step_ms']:.0f} ms a step: {self.total} steps fit into {self.settings.minutes} minutes{was}")

    def _time_to_evaluate(self) -> bool:
        every = self.settings.eval_every or (self.total and max(1, math.ceil(self.total / EVALUATIONS)))
        return bool(every) and self.step % every == 0

    def _evaluate(self) -> None:
        """Measure the weights that would be exported now, and keep them if they are the best so far."""
        s, k, begin = self.settings, self.settings.quoted, self.clock()
        weights = self.ema.weights if self.ema is not None else None
        with wearing(self.head, weights):
            result = evaluate(
                self.head, self.held_out, self.target, self.planner, s.depths, method=s.method, row_budget=self.budget
            )
            self.walked = {"step": self.step, "walk": result["walk"][k - 1]}
            if self.best is None or self.walked["walk"] >= self.best["walk"]:  # of equals the one that annealed longer
                self.best = dict(self.walked)
                if s.select == "best":
                    self.best["weights"] = {n: p.detach().cpu().clone() for n, p in self.head.named_parameters()}
        self.pace.evaluated(self.clock() - begin)
        self._write({"step": self.step, "holdout": result})
        tqdm.write(
            f"step {self.step}: held out, K={k}: walk {result['walk'][k - 1]:.3f}, all anchors "
            f"{result['all_anchors'][k - 1]:.3f}, accuracy {' '.join(f'{a:.2f}' for a in result['accuracy'])}"
        )

    def _log(self, window: "Window", bar: Any) -> None:
        numbers = window.take()
        factor = self.schedule.factor(self.step - 1)
        line = {
            "step": self.step,
            "total": self.total,
            "epoch": round(self.epoch + self.index / self.per_epoch, 3),
            **numbers,
            "lr": self.settings.quoted_lr * factor,
            "tokens": self.tokens_seen,
            "peak_memory_gb": round(_peak_memory(self.device) / 1e9, 3),
            "seconds": round(self.clock() - self.begin, 1),
        }
        self._write(line)
        if not math.isfinite(numbers["loss"]):
            raise PEagleError(
                f"the loss is {numbers['loss']} at step {self.step}",
                "the weights are spoiled; the last checkpoint is from before",
                "lower --lr and start anew",
            )
        bar.set_postfix_str(
            f"loss {numbers['loss']:.3f}, acc {' '.join(f'{a:.2f}' for a in numbers['accuracy'])}, "
            f"{numbers['tokens_per_second'] / 1000:.1f}k tok/s",
            refresh=False,
        )

    def _write(self, line: dict[str, Any]) -> None:
        with (self.out / LOG).open("a") as file:
            file.write(json.dumps(line) + "\n")

    # -- the result -----------------------------------------------------------------------------------------------

    def record(self) -> dict[str, Any]:
        """How the head came to be, without anything that names this machine."""
        s = self.settings
        skipped = {"target", "corpus", "device", "log_every", "checkpoint_every", "eval_every", "attention", "served"}
        return {
            "tool": f"sgl-peagle {__version__}",
            **{name: value for name, value in s.as_json().items() if name not in skipped and value is not None},
            "num_depths": s.depths,
            "aux_layer_ids": list(self.target.aux_layer_ids),
            **self.identity,
            "documents": len(self.documents),
            "steps_done": self.step,
            "steps_planned": self.total,
            "plans": self.plans,
            "exported_step": self._chosen()["step"],
            "holdout": self._held_out(),
            "epochs_done": round(self.epoch + self.index / self.per_epoch, 3),
            "tokens_seen": self.tokens_seen,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
        }

    def _chosen(self) -> dict[str, Any]:
        """The step whose weights are exported, and the weights where they are not the head's own."""
        if self.settings.select == "best" and self.best is not None:
            return self.best
        return {"step": self.step, "weights": self.ema.weights if self.ema is not None else None}

    def _held_out(self) -> Optional[dict[str, Any]]:
        if self.walked is None or self.best is None:
            return None
        return {
            "documents": len(self.held_out),
            "k": self.settings.quoted,
            "last": self.walked,
            "best": {name: self.best[name] for name in ("step", "walk")},
        }

    def _export(self) -> None:
        s, name, record = self.settings, self.target_name or self.target.public_name, self.record()
        layers, chosen = self.target.aux_layer_ids, self._chosen()
        self._write({"step": self.step, "exported_step": chosen["step"], "select": s.select, "of": record["holdout"]})
        for to in self.formats if s.method == "peagle" else ("eagle3",):
            folder = self.out / ("head" if to in ("peagle", "eagle3") else f"head-{to}")
            if folder.exists():  # from an earlier end of this run: kept, under another name if training went on
                done = json.loads((folder / "training.json").read_text())["steps_done"]
                if done == self.step:
                    self.echo(f"{folder} is there already")
                    continue
                folder.rename(folder.with_name(f"{folder.name}-step{done}"))
            with wearing(self.head, chosen["weights"]):
                if s.method == "eagle3":
                    export_eagle3(self.head, folder, aux_layer_ids=layers, record=record)
                else:
                    export_peagle(
                        self.head, self.target.lm_head, folder, to=to, depths=s.depths, aux_layer_ids=layers,
                        record=record, target=s.target, target_name=name,
                    )  # fmt: skip
            size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
            self.echo(f"wrote {folder} ({to}, step {chosen['step']}, {size:.1f} MB)")


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise PEagleError(f"--device {name}", "torch sees no CUDA GPU here", "use --device cpu")
    return torch.device(name)


def _peak_memory(device: torch.device) -> int:
    """Bytes: of the GPU's allocator, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
