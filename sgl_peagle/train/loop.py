"""The training run: target and head in one step, a fixed schedule, logs, checkpoints, an orderly end.

The step reads nothing back from the device; numbers are fetched at log intervals. What a run does follows from its settings
and corpus alone (on a CPU bit by bit), except that ``--minutes`` first has to measure: the number of steps is then fixed and
kept in the checkpoint.
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

import numpy as np
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
from sgl_peagle.train.partition import LossSettings
from sgl_peagle.train.rows import Ints
from sgl_peagle.train.settings import Settings, check_resumed
from sgl_peagle.train.target import Target

LOG = "train_log.jsonl"

#: Steps over which ``--minutes`` measures the speed (the first ones compile and warm up).
_MEASURE_FROM, _MEASURE_TO = 10, 40

#: Warm-up while the length of the run is not known yet.
_PROVISIONAL_WARMUP = 100

#: Kept back for the last evaluation and the export: so many seconds, or this share of a short run.
_RESERVE_SECONDS, _RESERVE_SHARE = 15.0, 0.1

#: Documents whose states give ``mask_hidden`` and ``fc`` their scale.
_START_DOCUMENTS = 16


def lr_factor(step: int, total: Optional[int], warmup: float, final: float) -> float:
    """Share of the peak learning rate at a step (from 0): linear warm-up, then a cosine down to ``final``."""
    first = _PROVISIONAL_WARMUP if total is None else max(1, round(warmup * total))
    if step < first:
        return (step + 1) / first
    if total is None:
        return 1.0
    done = min(1.0, (step - first) / max(1, total - 1 - first))
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * done))


class Trainer:
    """One run.

    Args:
        settings: What to do.
        out: Its folder, made here; with ``resume`` that of the interrupted run.
        resume: Go on from the checkpoint.
        formats: What to export, of :data:`~sgl_peagle.train.export.FORMATS`.
        target_name: Hub id of the target, recorded in the head.
        echo: Where messages go.

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
    ) -> None:
        self.begin = time.monotonic()
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
        self.budget = row_budget(self.documents, settings.tokens_per_step, settings.cod)
        self.per_epoch = len(self._order(0))
        self.identity = {"corpus_sha256": corpus.sha256, "target_sha256": self.target.sha256()}
        if saved is not None and saved["identity"] != self.identity:
            raise PEagleError(
                "the corpus or the target is not the one that the run was started with",
                "a resumed run is the same run",
                "restore them, or start a new run in another folder",
            )
        shape = Shape.of_target(self.target.config, settings.layers, len(self.target.aux_layer_ids))
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
        self.loss = LossSettings(self.target.lm_head, settings.loss, settings.chunk, settings.compile_loss)
        self.optimizer = self._optimizer()
        q_step, k_step = self._shapes()
        self.planner, words = choose(
            settings.attention, q_step, k_step, shape.num_heads, shape.num_kv_heads, shape.head_dim, dtype, self.device
        )
        self.echo(f"attention: {words}")
        torch.manual_seed(settings.seed)  # nothing in a step draws from it; if that changes, runs stay repeatable
        self.step = self.epoch = self.index = self.tokens_seen = 0
        self.total: Optional[int] = self._planned_steps()
        if saved is not None:
            self._restore(saved)
        self._stop: Optional[int] = None

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
        s = self.settings
        return epoch_order(self.documents, s.seed, epoch, s.tokens_per_step, self.budget, s.cod)

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

    def _optimizer(self) -> torch.optim.AdamW:
        named = dict(self.head.named_parameters())
        copied = named.pop("embed_tokens.weight", None)
        groups: list[dict[str, Any]] = [{"params": list(named.values()), "peak": self.settings.lr}]
        if copied is not None:  # it starts at a good point
            groups.append({"params": [copied], "peak": self.settings.embedding_lr})
        return torch.optim.AdamW(
            groups, lr=self.settings.lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=self.device.type == "cuda"
        )

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
        for name in ("step", "epoch", "index", "tokens_seen"):
            setattr(self, name, saved[name])
        if saved["total"] is not None:
            self.total = saved["total"]
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
                "total": self.total,
                "rng": torch.get_rng_state(),
            },
        )

    # -- running --------------------------------------------------------------------------------------------------

    def backward(self, batch: Batch) -> tuple[Ints, RowStats]:
        """Accumulate the gradient of one batch; the depth of every judged row, and what is known of the rows."""
        states = self.target.read(to_device(batch.tokens, self.device))
        if self.settings.method == "eagle3":
            return eagle3.loss_and_backward(self.head, batch, states, self.planner, self.loss, self.settings.depths)
        return partition.loss_and_backward(
            self.head, batch, states, self.planner, self.loss, self.settings.segments, self.settings.partition
        )

    def update(self, batch: Batch) -> tuple[Ints, RowStats]:
        """One optimiser step."""
        self.optimizer.zero_grad(set_to_none=True)
        result = self.backward(batch)
        nn.utils.clip_grad_norm_(self.head.parameters(), self.settings.clip)
        factor = lr_factor(self.step, self.total, self.settings.warmup, self.settings.final_lr)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * factor
        self.optimizer.step()
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
        feed = Feed(self.documents, s.seed, s.tokens_per_step, self.budget, s.cod, self.epoch, self.index)
        window = _Window(s.depths, self.device)
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
        self._export()
        return None

    def _loop(self, feed: Feed, window: "_Window", bar: Any, on_step: Optional[Callable[[int], None]]) -> None:
        s = self.settings
        measured = 0.0
        first = self.step
        while (self.total is None or self.step < self.total) and self._stop is None and not self._out_of_time():
            self.epoch, self.index, self.per_epoch, batch = feed.next()
            depths, stats = self.update(batch)
            window.add(depths, stats, batch)
            self.step, self.index = self.step + 1, self.index + 1
            self.tokens_seen += batch.text_tokens
            bar.update()
            if self.total is None and self.step - first in (_MEASURE_FROM, _MEASURE_TO):
                measured = self._measure(measured, self.step - first == _MEASURE_FROM, bar)
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

    def _deadline(self) -> float:
        seconds = (self.settings.minutes or 0.0) * 60
        return self.begin + seconds - min(_RESERVE_SECONDS, _RESERVE_SHARE * seconds)

    def _out_of_time(self) -> bool:
        if self.settings.minutes is None or time.monotonic() < self._deadline():
            return False
        if self.total is not None and self.step < self.total:
            self.echo(f"time is up after step {self.step} of {self.total}")
        return True

    def _measure(self, since: float, starting: bool, bar: Any) -> float:
        """Fix the number of steps from the speed of a few."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.monotonic()
        if starting:
            return now
        each = (now - since) / (_MEASURE_TO - _MEASURE_FROM)
        left = (self._deadline() - now) * (0.93 if self.held_out else 0.98)  # evaluations on the way take their share
        self.total = bar.total = self.step + max(1, int(left / each))
        bar.refresh()
        self.echo(f"{each * 1000:.0f} ms a step: {self.total} steps fit into {self.settings.minutes} minutes")
        return now

    def _time_to_evaluate(self) -> bool:
        every = self.settings.eval_every or (self.total and max(1, math.ceil(self.total / 8)))
        return bool(every) and self.step % every == 0

    def _evaluate(self) -> None:
        s = self.settings
        result = evaluate(
            self.head, self.held_out, self.target, self.planner, s.depths, method=s.method, row_budget=self.budget
        )
        self._write({"step": self.step, "holdout": result})
        k = min(7, s.depths)
        tqdm.write(
            f"step {self.step}: held out, K={k}: walk {result['walk'][k - 1]:.3f}, all anchors "
            f"{result['all_anchors'][k - 1]:.3f}, accuracy {' '.join(f'{a:.2f}' for a in result['accuracy'])}"
        )

    def _log(self, window: "_Window", bar: Any) -> None:
        numbers = window.take()
        factor = lr_factor(self.step - 1, self.total, self.settings.warmup, self.settings.final_lr)
        line = {
            "step": self.step,
            "total": self.total,
            "epoch": round(self.epoch + self.index / self.per_epoch, 3),
            **numbers,
            "lr": self.settings.lr * factor,
            "tokens": self.tokens_seen,
            "peak_memory_gb": round(_peak_memory(self.device) / 1e9, 3),
            "seconds": round(time.monotonic() - self.begin, 1),
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
        skipped = {"target", "corpus", "device", "log_every", "checkpoint_every", "eval_every", "attention"}
        return {
            "tool": f"sgl-peagle {__version__}",
            **{name: value for name, value in s.as_json().items() if name not in skipped and value is not None},
            "num_depths": s.depths,
            "aux_layer_ids": list(self.target.aux_layer_ids),
            **self.identity,
            "documents": len(self.documents),
            "steps_done": self.step,
            "steps_planned": self.total,
            "epochs_done": round(self.epoch + self.index / self.per_epoch, 3),
            "tokens_seen": self.tokens_seen,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
        }

    def _export(self) -> None:
        s, name = self.settings, self.target_name or self.target.public_name
        layers = self.target.aux_layer_ids
        for to in self.formats if s.method == "peagle" else ("eagle3",):
            folder = self.out / ("head" if to in ("peagle", "eagle3") else f"head-{to}")
            if folder.exists():  # from an earlier end of this run: kept, under another name if training went on
                done = json.loads((folder / "training.json").read_text())["steps_done"]
                if done == self.step:
                    self.echo(f"{folder} is there already")
                    continue
                folder.rename(folder.with_name(f"{folder.name}-step{done}"))
            if s.method == "eagle3":
                export_eagle3(self.head, folder, aux_layer_ids=layers, record=self.record())
            else:
                export_peagle(
                    self.head, self.target.lm_head, folder, to=to, depths=s.depths, aux_layer_ids=layers,
                    record=self.record(), target=s.target, target_name=name,
                )  # fmt: skip
            size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
            self.echo(f"wrote {folder} ({to}, {size:.1f} MB)")


class _Window:
    """Sums over the steps since the last log line, on the device."""

    def __init__(self, depths: int, device: torch.device) -> None:
        self.depths, self.device = depths, device
        self._clear()

    def _clear(self) -> None:
        self._sums = torch.zeros(2, self.depths, device=self.device)
        self._counts = np.zeros(self.depths)
        self._tokens, self._since, self._rows, self._steps = 0, time.monotonic(), 0, 0

    def add(self, depths: Ints, stats: RowStats, batch: Batch) -> None:
        """Count one step's rows (nothing is read back)."""
        index = to_device(depths, self.device)
        self._sums[0].index_add_(0, index, stats.loss)
        self._sums[1].index_add_(0, index, stats.hit.float())
        self._counts += np.bincount(depths, minlength=self.depths)
        self._tokens += batch.text_tokens
        self._rows += len(depths)
        self._steps += 1

    def pause(self, call: Callable[[], None]) -> None:
        """Leave the time of a call out of the throughput."""
        begin = time.monotonic()
        call()
        self._since += time.monotonic() - begin

    def take(self) -> dict[str, Any]:
        """Means since the last call: loss, its value and the accuracy by depth, and the throughput."""
        loss, hits = self._sums.double().cpu().numpy()
        counts = np.maximum(self._counts, 1)
        seconds = max(time.monotonic() - self._since, 1e-9)
        numbers = {
            "loss": round(float(loss.sum() / counts.sum()), 5),
            "loss_by_depth": (loss / counts).round(4).tolist(),
            "accuracy": (hits / counts).round(4).tolist(),
            "tokens_per_second": round(self._tokens / seconds, 1),
            "rows_per_step": round(self._rows / max(1, self._steps)),
            "step_ms": round(seconds * 1000 / max(1, self._steps), 1),
        }
        self._clear()
        return numbers


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
