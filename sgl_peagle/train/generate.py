"""The target as a generator of token ids: SGLang's offline engine where there is a GPU, transformers elsewhere.

Both take and give ids (no text in between), and both say whether the target really ended its turn. What is to be
generated is a *conversation*: a Python generator that yields a :class:`Request`, is sent the :class:`Reply`, may ask
again, and returns its result. So a second turn starts as soon as its own first one is there, not when all are.
"""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Generator, Iterable, Protocol, Sequence

from sgl_peagle.errors import PEagleError

#: Batch sizes that get a CUDA graph: few, because each is captured at start-up.
GRAPH_BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024]
RUNNING = 1024


@dataclass(frozen=True)
class Request:
    """One continuation: prompt ids, sampling, at most ``max_new`` tokens, ended by any of ``stop_ids``."""

    ids: list[int]
    max_new: int
    stop_ids: frozenset[int]
    temperature: float = 0.0


@dataclass(frozen=True)
class Reply:
    """What was generated, the stop token included; ``ended`` tells whether there is one."""

    ids: list[int]
    ended: bool


Conversation = Generator[Request, Reply, Any]


class Target(Protocol):
    """A target that holds many conversations at once; ``close`` frees it."""

    name: str

    def converse(
        self, groups: Iterable[list[Conversation]], finished: Callable[[int, list[Any]], None], total: int, label: str
    ) -> None:
        """Hold all conversations; ``finished(i, results)`` is called as group i is complete, in any order of groups.

        Args:
            groups: Asked for one by one; the iterator may end early.
            total: Number of conversations, for the progress bar.
        """

    def close(self) -> None: ...


def converse_once(target: Target, conversations: list[Conversation], label: str) -> list[Any]:
    """The results of some conversations, in their order."""
    results: list[Any] = []
    if conversations:
        target.converse([conversations], lambda _i, found: results.extend(found), len(conversations), label)
    return results


def start(backend: str, target: Path, *, seed: int, context: int, **engine: Any) -> Target:
    """Start a backend: ``sglang``, ``transformers`` or ``auto`` (SGLang on a GPU, transformers elsewhere).

    Args:
        context: Longest prompt plus answer, in tokens.
        engine: Overrides of the engine's arguments (SGLang only).

    Raises:
        PEagleError: The backend is not installed or not known.
    """
    import torch

    if backend == "auto":
        backend = "sglang" if torch.cuda.is_available() else "transformers"
    if backend == "transformers":
        return TransformersTarget(target, seed)
    if backend != "sglang":
        raise PEagleError(f"backend {backend!r}", "there are sglang and transformers", "choose one of them, or auto")
    try:
        import sglang  # noqa: F401
    except ImportError as error:
        raise PEagleError(
            f"SGLang cannot be imported: {error}", "the backend sglang needs it", "install it, or --backend transformers"
        ) from error
    return SglangTarget(target, seed, context, engine)


class SglangTarget:
    """``sgl.Engine`` without a tokenizer. On a GPU in bfloat16 with CUDA graphs, on a CPU in float32.

    Greedy answers are reproducible up to batch-dependent rounding (bfloat16), sampled ones are not: SGLang draws from
    one generator for the whole batch.
    """

    name = "sglang"

    def __init__(self, target: Path, seed: int, context: int, overrides: dict[str, Any]) -> None:
        import torch

        options: dict[str, Any] = {
            "model_path": str(target), "skip_tokenizer_init": True, "random_seed": seed, "context_length": context,
            "skip_server_warmup": True, "log_level": "warning", "sampling_backend": "pytorch",
        }  # fmt: skip
        if torch.cuda.is_available():
            # No radix cache: prompts share only the system turn, and its bookkeeping is CPU time of the scheduler.
            options |= {
                "device": "cuda", "dtype": "bfloat16", "mem_fraction_static": 0.8, "max_running_requests": RUNNING,
                "cuda_graph_bs_decode": GRAPH_BATCHES, "cuda_graph_max_bs_decode": GRAPH_BATCHES[-1],
                "disable_prefill_cuda_graph": True, "disable_radix_cache": True, "schedule_policy": "fcfs",
                "chunked_prefill_size": 16384, "stream_interval": 64, "watchdog_timeout": 600,
            }  # fmt: skip
        else:
            options |= {
                "device": "cpu", "dtype": "float32", "disable_cuda_graph": True, "max_running_requests": 16,
                "max_total_tokens": 16384, "watchdog_timeout": 600,
            }  # fmt: skip
        import sglang

        options |= overrides
        self._low_water = options["max_running_requests"]
        self._engine = sglang.Engine(**options)

    def converse(
        self, groups: Iterable[list[Conversation]], finished: Callable[[int, list[Any]], None], total: int, label: str
    ) -> None:
        """The next group starts when fewer conversations are left than the engine can run, so it never idles."""
        self._engine.loop.run_until_complete(self._converse(groups, finished, total, label))

    async def _converse(
        self, groups: Iterable[list[Conversation]], finished: Callable[[int, list[Any]], None], total: int, label: str
    ) -> None:
        from tqdm import tqdm

        running: set[asyncio.Task[Any]] = set()
        left = 0

        async def one(conversation: Conversation) -> Any:
            nonlocal left
            try:
                request = next(conversation)
                while True:
                    request = conversation.send(await self._reply(request))
            except StopIteration as end:
                left -= 1
                bar.update()
                return end.value

        async def group(index: int, conversations: list[Conversation]) -> None:
            finished(index, list(await asyncio.gather(*(one(c) for c in conversations))))

        with tqdm(total=total, desc=label, mininterval=2.0) as bar:
            for index, conversations in enumerate(groups):
                left += len(conversations)
                running.add(asyncio.create_task(group(index, conversations)))
                await asyncio.sleep(0)
                while running and left > self._low_water:
                    await asyncio.sleep(0.02)
                    for task in [task for task in running if task.done()]:
                        running.remove(task)
                        task.result()  # raises what went wrong in it
            await asyncio.gather(*running)

    async def _reply(self, request: Request) -> Reply:
        sampling = {
            "temperature": request.temperature, "max_new_tokens": request.max_new,
            "stop_token_ids": sorted(request.stop_ids),
        }  # fmt: skip
        output = await self._engine.async_generate(input_ids=list(request.ids), sampling_params=sampling)
        ids = list(output["output_ids"])
        return Reply(ids, bool(ids) and ids[-1] in request.stop_ids)

    def close(self) -> None:
        """Stop the engine's processes."""
        self._engine.shutdown()


class TransformersTarget:
    """``model.generate`` in padded batches, float32 on a CPU; every batch is seeded by its prompts and place."""

    name = "transformers"
    BATCH = 16

    def __init__(self, target: Path, seed: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._seed = seed
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = torch.bfloat16 if self._device == "cuda" else torch.float32
        self._model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype).to(self._device).eval()

    def converse(
        self, groups: Iterable[list[Conversation]], finished: Callable[[int, list[Any]], None], total: int, label: str
    ) -> None:
        """Group by group; within a group, all first requests, then all second ones, and so on."""
        from tqdm import tqdm

        with tqdm(total=total, desc=label, mininterval=2.0) as bar:
            for index, conversations in enumerate(groups):
                results: list[Any] = [None] * len(conversations)
                pending = {i: next(conversation) for i, conversation in enumerate(conversations)}
                while pending:
                    members = list(pending)
                    for i, reply in zip(members, self._generate([pending[i] for i in members], label)):
                        try:
                            pending[i] = conversations[i].send(reply)
                        except StopIteration as end:
                            results[i] = end.value
                            del pending[i]
                            bar.update()
                finished(index, results)

    def _generate(self, requests: Sequence[Request], label: str) -> list[Reply]:
        """Continue all prompts, those of similar length and like settings together."""

        def settings(i: int) -> tuple[Any, ...]:
            r = requests[i]
            return r.temperature, r.max_new, tuple(sorted(r.stop_ids))

        order = sorted(range(len(requests)), key=lambda i: (settings(i), len(requests[i].ids), i))
        replies: dict[int, Reply] = {}
        serial = 0
        while order:
            same = [i for i in order[: self.BATCH] if settings(i) == settings(order[0])]
            order = order[len(same) :]
            replies |= dict(zip(same, self._batch([requests[i] for i in same], f"{label} {serial}")))
            serial += 1
        return [replies[i] for i in range(len(requests))]

    def _batch(self, batch: Sequence[Request], name: str) -> list[Reply]:
        import torch

        first, width = batch[0], max(len(r.ids) for r in batch)
        padding = min(first.stop_ids)
        ids = torch.tensor([[padding] * (width - len(r.ids)) + r.ids for r in batch], device=self._device)
        seen = torch.tensor([[0] * (width - len(r.ids)) + [1] * len(r.ids) for r in batch], device=self._device)
        sampling: dict[str, Any] = {"do_sample": False}
        if first.temperature > 0:
            sampling = {"do_sample": True, "temperature": first.temperature, "top_k": 0}
        # Made-up prompts all begin alike, so the ids alone would give batch after batch the same draws.
        torch.manual_seed(zlib.crc32(repr([self._seed, name, [r.ids for r in batch]]).encode()))
        with torch.no_grad():
            out = self._model.generate(
                ids, attention_mask=seen, max_new_tokens=first.max_new, eos_token_id=sorted(first.stop_ids),
                pad_token_id=padding, **sampling,
            )  # fmt: skip
        replies = []
        for row in out[:, width:].tolist():
            end = next((i for i, token in enumerate(row) if token in first.stop_ids), None)
            replies.append(Reply(row if end is None else row[: end + 1], end is not None))
        return replies

    def close(self) -> None:
        """Forget the model."""
        del self._model
