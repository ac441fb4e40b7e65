"""What a PEAGLE server runs with: decided once from the server arguments, the head and the target."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any, Optional

from sgl_peagle.backends import DrafterBackend, default_drafter_backend, device_kind, drafter_backend
from sgl_peagle.errors import PEagleError
from sgl_peagle.heads import Head, read_head
from sgl_peagle.layout import SlotPlan, verify_width

logger = logging.getLogger(__name__)

#: Draft tokens per round when neither the flags nor the head's config say (P-EAGLE's published optimum).
DEFAULT_K = 7

#: Page size chosen when the allocation needs more than 1 and the user named none.
DEFAULT_PAGE_SIZE = 16

#: Test hook: keep overlap scheduling on a CPU, where stock SGLang switches it off.
CPU_OVERLAP_ENV = "SGL_PEAGLE_CPU_OVERLAP"


@dataclass(frozen=True)
class Settings:
    """The decided values.

    Attributes:
        k: Draft tokens per round.
        backend: The drafter's attention backend.
        slots: Allocation per decode step and smallest page size.
        page_size: Page size to serve with.
        overlap: Whether overlap scheduling stays on.
    """

    k: int
    backend: DrafterBackend
    slots: SlotPlan
    page_size: int
    overlap: bool


def view_of(server_args: Any) -> Any:
    """SGLang's view of the arguments, behind the recorder of writes that it hands to plugin callbacks."""
    try:
        return object.__getattribute__(server_args, "_cfg")
    except AttributeError:
        return server_args


def given_page_size(server_args: Any) -> Optional[int]:
    """The ``--page-size`` that the user typed, or None when SGLang chose it."""
    from sglang.srt.arg_groups.model_override_base import record_of

    try:
        return record_of(view_of(server_args)).page_size
    except AttributeError:  # the arguments themselves, not a view of them
        return server_args.page_size


def decide(server_args: Any, head: Head) -> Settings:
    """Decide every PEAGLE value, or refuse.

    Args:
        server_args: SGLang's (resolving) server arguments.
        head: The head to serve.

    Raises:
        PEagleError: Contradictory or impossible values.
    """
    k = draft_tokens_per_round(server_args, head.config.k_trained)
    device = device_kind(server_args.device)
    name = server_args.speculative_draft_attention_backend or default_drafter_backend(device)
    backend = drafter_backend(name, device)
    slots = backend.plan(k)
    page_size = server_args.page_size or 1
    if page_size < slots.min_page_size:
        if given_page_size(server_args) is not None:
            raise PEagleError(
                f"--page-size {page_size} with K={k} drafts on drafter backend {backend.name!r}",
                f"each decode step reserves 2 x {slots.alloc} slots, and at page size 1 SGLang's request row holds at "
                "most 2 x 8 behind the context end, so another request's row would be overwritten",
                f"pass --page-size {DEFAULT_PAGE_SIZE} (any size from {slots.min_page_size}), or fewer drafts",
            )
        page_size = _page_size_dividing(server_args.chunked_prefill_size, slots.min_page_size)
        logger.info("PEAGLE: page size %d, because K=%d needs at least %d", page_size, k, slots.min_page_size)
    on_cpu = device == "cpu" and os.environ.get(CPU_OVERLAP_ENV) != "1"
    overlap = not (server_args.disable_overlap_schedule or on_cpu)
    return Settings(k, backend, slots, page_size, overlap)


def _page_size_dividing(chunk: Optional[int], smallest: int) -> int:
    """The default page size, or a smaller one that divides the prefill chunk, as SGLang demands."""
    size = DEFAULT_PAGE_SIZE
    while size > smallest and chunk and chunk > 0 and chunk % size:
        size //= 2
    return size


def draft_tokens_per_round(server_args: Any, k_trained: Optional[int]) -> int:
    """K from ``--speculative-num-draft-tokens`` (K+1), ``--speculative-num-steps`` (K), the head, or 7.

    Raises:
        PEagleError: The flags contradict each other or ask for less than one draft.
    """
    steps, tokens = server_args.speculative_num_steps, server_args.speculative_num_draft_tokens
    topk = server_args.speculative_eagle_topk
    if topk not in (None, 1):
        raise PEagleError(
            f"--speculative-eagle-topk {topk}",
            "P-EAGLE drafts one chain of K tokens, not a tree",
            "leave the flag out, or set it to 1",
        )
    if steps is not None and tokens is not None and tokens != verify_width(steps):
        raise PEagleError(
            f"--speculative-num-steps {steps} and --speculative-num-draft-tokens {tokens} contradict each other",
            "the first is K, the second K+1 (the drafts and the bonus token)",
            f"give one of them: --speculative-num-draft-tokens {verify_width(steps)} for K={steps}",
        )
    k = steps if steps is not None else tokens - 1 if tokens is not None else k_trained or DEFAULT_K
    if k < 1:
        raise PEagleError(
            f"K={k} drafts per round", "a round needs at least one draft", "pass --speculative-num-draft-tokens 8 (K=7)"
        )
    if k_trained is not None and k > k_trained:
        logger.warning("PEAGLE: K=%d, but the head was trained for %d drafts; later ones will rarely hit", k, k_trained)
    return k


def head_of(server_args: Any) -> Head:
    """The head that the server arguments name.

    Raises:
        PEagleError: No path was given, or the head cannot be served.
    """
    path = server_args.speculative_draft_model_path
    if not path:
        raise PEagleError(
            "--speculative-draft-model-path is missing",
            "PEAGLE needs a trained P-EAGLE head",
            "pass the head's folder or Hugging Face id",
        )
    return read_head(path, server_args.speculative_draft_model_revision)
