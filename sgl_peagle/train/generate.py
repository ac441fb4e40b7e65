"""The target as a generator of token ids: SGLang's offline engine where there is a GPU, transformers elsewhere.

Both take and give ids (no text in between), and both say whether the target really ended its turn. What is to be
generated is a *conversation*: a Python generator that yields a :class:`Request`, is sent the :class:`Reply`, may ask
again, and returns its result. So a second turn starts as soon as its own first one is there, not when all are.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Generator, Iterable, Optional, Protocol, Sequence

from sgl_peagle.errors import PEagleError

#: Batch sizes that get a CUDA graph: few, because each is captured at start-up, and a padded step costs little.
GRAPH_BATCHES = [8, 32, 64, 128, 256, 512, 768, 1024]
#: Requests in one batch. A step costs a fixed 2 to 4 ms besides what each request adds, so larger batches gain little.
RUNNING = 1024
#: New requests wait until this part of the places is free: their prefill costs about as much as a step of all others.
ADMITTED_TOGETHER = 1 / 10


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


@dataclass(frozen=True)
class Group:
    """Conversations that belong together; the name is part of the seed of sampled ones (transformers only)."""

    name: str
    conversations: list[Conversation]


#: Called as a group is complete, with its name and the results in order; in any order of groups.
Finished = Callable[[str, list[Any]], None]
#: Called with a number of conversations that have just ended.
Progress = Callable[[int], object]

#: Temperature of greedy requests on a GPU. At exactly 0 SGLang sets top-k to 1, and one such request makes its sampler
#: sort the whole vocabulary for all requests of the batch, which takes longer than a small model's step. At this
#: temperature only tokens of exactly equal logits are drawn from, where greedy decoding takes the first.
NEARLY_GREEDY = 1e-5


class Target(Protocol):
    """A target that holds many conversations at once; ``close`` frees it."""

    name: str

    def converse(self, groups: Iterable[Optional[Group]], finished: Finished, progress: Progress) -> None:
        """Hold all conversations.

        Args:
            groups: Asked for one by one, as there is room; None means that there is none yet, but may be soon.
        """

    def close(self) -> None: ...


@dataclass(frozen=True)
class Share:
    """What part of its machine a target may take: one of ``of`` that share a GPU (its memory in bytes; 0: unknown)."""

    of: int = 1
    memory: int = 0


def start(
    backend: str, target: Path, *, seed: int, context: int, share: Share = Share(), worker: int = 0, **engine: Any
) -> Target:
    """Start a backend: ``sglang``, ``transformers`` or ``auto`` (SGLang on a GPU, transformers elsewhere).

    Args:
        context: Longest prompt plus answer, in tokens.
        share: How much of a GPU is its own.
        worker: Number of this target among those of a run; it keeps their draws apart.
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
    return SglangTarget(target, 1000 * seed + worker, context, share, engine)


def _cache_tokens(target: Path, share: Share, running: int) -> int:
    """Tokens of KV cache for one of several targets on a GPU: enough for its requests, or its part of the memory."""
    config = json.loads((target / "config.json").read_text())
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    each = 2 * 2 * config["num_hidden_layers"] * heads * width  # keys and values of two bytes
    weights = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    # Besides weights and cache: graphs, logits and the CUDA context, some GB.
    room = (share.memory or 40 * 2**30) * 0.85 / share.of - 1.1 * weights - 4 * 2**30
    tokens = min(running * 1280, int(room) // each)
    if tokens < 16384:
        raise PEagleError(
            f"{share.of} workers do not fit on one GPU: {max(tokens, 0)} tokens of KV cache would be left for each",
            "each holds the target's weights and its own cache",
            "take fewer --workers, or set --engine max_total_tokens=N and mem_fraction_static=F yourself",
        )
    return tokens


class SglangTarget:
    """SGLang's engine without a tokenizer. On a GPU in bfloat16 with CUDA graphs, on a CPU in float32.

    Greedy answers are reproducible up to batch-dependent rounding and ties (bfloat16), sampled ones are not: SGLang
    draws from one generator for the whole batch.
    """

    name = "sglang"

    def __init__(self, target: Path, seed: int, context: int, share: Share, overrides: dict[str, Any]) -> None:
        import torch

        # Requests that are not streamed would still be reported every 50 tokens.
        os.environ.setdefault("SGLANG_FORCE_STREAM_INTERVAL", "1000000")
        from sglang.srt.entrypoints.engine import Engine

        options: dict[str, Any] = {
            "model_path": str(target), "skip_tokenizer_init": True, "random_seed": seed, "context_length": context,
            "skip_server_warmup": True, "log_level": "warning", "sampling_backend": "pytorch", "stream_interval": 64,
        }  # fmt: skip
        if torch.cuda.is_available():
            running = int(overrides.get("max_running_requests", RUNNING))
            graphs = [size for size in GRAPH_BATCHES if size < running] + [running]
            # No radix cache: prompts share only the system turn, and its bookkeeping is CPU time of the scheduler.
            options |= {
                "device": "cuda", "dtype": "bfloat16", "mem_fraction_static": 0.8, "max_running_requests": running,
                "cuda_graph_bs_decode": graphs, "cuda_graph_max_bs_decode": running,
                "disable_prefill_cuda_graph": True, "disable_radix_cache": True, "schedule_policy": "fcfs",
                "chunked_prefill_size": 16384, "min_free_slots_delay": max(1, int(running * ADMITTED_TOGETHER)),
                "watchdog_timeout": 600,
            }  # fmt: skip
            if share.of > 1 and "mem_fraction_static" not in overrides and "max_total_tokens" not in overrides:
                # The fraction is of what is free as an engine starts, while others take their parts: it only bounds,
                # the number of tokens decides.
                options |= {"mem_fraction_static": 0.92, "max_total_tokens": _cache_tokens(target, share, running)}
        else:
            options |= {
                "device": "cpu", "dtype": "float32", "disable_cuda_graph": True, "max_running_requests": 16,
                "max_total_tokens": 16384, "watchdog_timeout": 600,
            }  # fmt: skip
        options |= overrides
        # So many conversations are always there that a few wait in the scheduler while new prompts are tokenised here.
        self._low_water = options["max_running_requests"] * 5 // 4
        self._greedy = NEARLY_GREEDY if options["device"] == "cuda" else 0.0
        self._engine = Engine(**options)

    def converse(self, groups: Iterable[Optional[Group]], finished: Finished, progress: Progress) -> None:
        """The next group starts while the engine has some requests more than it can run, so it never idles."""
        self._engine.loop.run_until_complete(self._converse(groups, finished, progress))

    async def _converse(self, groups: Iterable[Optional[Group]], finished: Finished, progress: Progress) -> None:
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
                progress(1)
                return end.value

        async def hold(group: Group) -> None:
            finished(group.name, list(await asyncio.gather(*(one(c) for c in group.conversations))))

        async def wait() -> None:
            await asyncio.sleep(0.02)
            for task in [task for task in running if task.done()]:
                running.remove(task)
                task.result()  # raises what went wrong in it

        for group in groups:
            if group is None:
                await wait()
                continue
            left += len(group.conversations)
            running.add(asyncio.create_task(hold(group)))
            await asyncio.sleep(0)
            while running and left > self._low_water:
                await wait()
        await asyncio.gather(*running)

    async def _reply(self, request: Request) -> Reply:
        sampling = {
            "temperature": request.temperature or self._greedy, "max_new_tokens": request.max_new,
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

    def converse(self, groups: Iterable[Optional[Group]], finished: Finished, progress: Progress) -> None:
        """Group by group; within a group, all first requests, then all second ones, and so on."""
        for group in groups:
            if group is None:
                time.sleep(0.02)
                continue
            conversations = group.conversations
            results: list[Any] = [None] * len(conversations)
            pending = {i: next(conversation) for i, conversation in enumerate(conversations)}
            while pending:
                members = list(pending)
                for i, reply in zip(members, self._generate([pending[i] for i in members], group.name)):
                    try:
                        pending[i] = conversations[i].send(reply)
                    except StopIteration as end:
                        results[i] = end.value
                        del pending[i]
                        progress(1)
            finished(group.name, results)

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
