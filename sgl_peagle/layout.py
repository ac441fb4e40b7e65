"""Row and slot arithmetic of one P-EAGLE round. Pure: no SGLang, no torch, no state.

Words: ``k`` draft tokens per round; ``s`` committed length of a request before the verify; ``a`` its accept
length (1..k+1, bonus included). The verify batch has ``k + 1`` rows a request, the drafter window ``2k``:

    row j      0 … a-2                    a-1           a … a+k-2     a+k-1 … 2k-1
    kind       accepted                   bonus         mask          dead
    token      predicted token j          bonus token   MASK id       0
    hidden     target's, verify row j     same          h_shared      any (never read)
    position   s + j                      s + j         s + j         (unused)

Rows ``a-1 … a+k-2`` (the bonus row and the masks) are sampled; they are the k drafts. ``2k`` is the most that
can be live: ``(k+1) + (k-1)``. The functions take ints, or tensors where the arithmetic is elementwise.
"""

from __future__ import annotations

from dataclasses import dataclass

#: The row of every KV pool that no request owns. Dead rows write there (SGLang's own padding rows do too).
PADDING_SLOT = 0


def verify_width(k: int) -> int:
    """Rows per request in the verify batch: the bonus token of last round and k drafts."""
    return k + 1


def window_width(k: int) -> int:
    """Rows per request in the drafter window of a decode round."""
    return 2 * k


def is_real(j, a):
    """Row ``j`` holds a committed token (accepted or bonus). Ints or integer tensors."""
    return j < a


def is_mask(j, a, k: int):
    """Row ``j`` is one of the k-1 mask rows. Ints or integer tensors."""
    return (j >= a) & (j < a + k - 1)


def is_dead(j, a, k: int):
    """Row ``j`` is behind the masks: never sampled, KV goes to the padding slot."""
    return j >= a + k - 1


def first_sampled_row(a):
    """Window row of draft 1; draft i (1..k) is sampled at this row plus i-1."""
    return a - 1


def prefill_masks(k: int, finishing: bool) -> int:
    """Mask rows behind a prompt chunk: k-1 behind the last chunk, none behind earlier ones."""
    return k - 1 if finishing else 0


# ---------------------------------------------------------------------------------------------------------
# Slots. SGLang reserves ``2 * alloc`` slots past the committed length it knows of. Under overlap scheduling
# that knowledge lags one round, i.e. by up to k+1 tokens.


def max_lag(k: int, overlap: bool) -> int:
    """Largest difference between the device's committed length and the scheduler's, in tokens."""
    return k + 1 if overlap else 0


def slots_needed(k: int, private_mask_slots: bool) -> int:
    """Slots that one round may touch past ``s``: the verify rows, and the live window where masks need slots.

    The window's last mask sits at ``s + (k+1) + (k-1) - 1`` when everything was accepted.
    """
    return 2 * k if private_mask_slots else k + 1


def slots_guaranteed(alloc: int, k: int, overlap: bool) -> int:
    """Slots past ``s`` that surely exist when the drafter runs, for a per-decode allocation of ``alloc``."""
    return 2 * alloc - max_lag(k, overlap)


def alloc_per_decode(k: int, private_mask_slots: bool) -> int:
    """Smallest allocation (slots per request and decode step) that is always enough, lag included.

    SGLang never allocates less than the verify width, so that is the floor. Padding-slot masks need no more;
    private mask slots need ``ceil((3k+1)/2)``.
    """
    needed = slots_needed(k, private_mask_slots) + max_lag(k, overlap=True)
    return max(verify_width(k), -(-needed // 2))


def row_overflow(alloc: int, page_size: int) -> int:
    """Entries that the last allocation of a request writes past its ``req_to_token`` row; 0 when it fits.

    A request without max_new_tokens runs to the context end; its last step sees ``context - 4`` committed
    tokens and writes up to ``2 * alloc`` more, rounded up to whole pages. SGLang makes the row
    ``context + max(4 + alloc, 2 * alloc + page_size - 1 if page_size > 1)`` wide
    (``allocation_sizing.get_req_to_token_extra_context_len``).
    """
    extra = 4 + alloc
    if page_size > 1:
        extra = max(extra, 2 * alloc + page_size - 1)
    last_write = -4 + 2 * alloc + (page_size - 1 if page_size > 1 else 0)
    return max(0, last_write - extra)


def min_page_size(alloc: int) -> int:
    """Smallest page size at which the last allocation stays inside the request's row (1 or 2)."""
    return 1 if row_overflow(alloc, 1) == 0 else 2


@dataclass(frozen=True)
class SlotPlan:
    """What one (k, mask slot policy) pair asks of the host.

    Attributes:
        k: Draft tokens per round.
        private_mask_slots: Masks write KV to slots of their own instead of the padding slot.
        alloc: Slots per request and decode step, the value SGLang is given.
        min_page_size: Smallest page size that is safe at the context end.
    """

    k: int
    private_mask_slots: bool
    alloc: int
    min_page_size: int


def slot_plan(k: int, private_mask_slots: bool) -> SlotPlan:
    """The allocation and page size for ``k`` drafts (see :func:`alloc_per_decode`, :func:`min_page_size`)."""
    alloc = alloc_per_decode(k, private_mask_slots)
    return SlotPlan(k, private_mask_slots, alloc, min_page_size(alloc))
