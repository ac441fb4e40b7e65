"""Checks that need tensor data or the target; shared by the server, ``inspect`` and ``convert``.

The reader has already matched names, shapes and dtypes with the config. :func:`quick_checks` reads a few small
tensors and is run at every server start; :func:`scan` reads everything.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Iterable

import numpy as np

from sgl_peagle.aux_layers import capture_points, to_sglang
from sgl_peagle.errors import PEagleError
from sgl_peagle.heads.reader import Head
from sgl_peagle.heads.safetensors_io import is_finite, read_chunks, read_values
from sgl_peagle.heads.target import TargetInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Check:
    """One result.

    Attributes:
        name: What was checked.
        status: ``pass``, ``warn`` (served all the same), ``fail`` (refused) or ``skip`` (not applicable).
        detail: What was found.
        why: Why it matters, for ``warn`` and ``fail``.
        fix: What to do, for ``warn`` and ``fail``.
    """

    name: str
    status: str
    detail: str
    why: str = ""
    fix: str = ""

    def error(self) -> PEagleError:
        """The refusal."""
        return PEagleError(self.detail, self.why, self.fix)


def require(checks: Iterable[Check]) -> None:
    """Log warnings, raise the first failure.

    Raises:
        PEagleError: A check failed.
    """
    for check in checks:
        if check.status == "fail":
            raise check.error()
        if check.status == "warn":
            logger.warning("PEAGLE: %s (%s); %s", check.detail, check.why, check.fix)


def quick_checks(head: Head) -> list[Check]:
    """Vocabulary maps, MASK row and mask_hidden: a few small reads."""
    return [_draft_vocabulary(head), _vocabulary_mask(head), _mask_row(head), _mask_hidden(head)]


def _where(head: Head, canonical: str) -> str:
    info = head.tensors[canonical]
    return f"{head.folder}: {info.file} {info.name}"


def draft_ids(head: Head) -> np.ndarray:
    """Target id of every draft id, [draft vocabulary] int64."""
    ids = np.arange(head.config.draft_vocab_size, dtype=np.int64)
    return ids + read_values(head.folder, head.tensors["d2t"]) if head.has("d2t") else ids


def _draft_vocabulary(head: Head) -> Check:
    name, vocab = "draft vocabulary (d2t)", head.config.vocab_size
    if not head.has("d2t"):
        return Check(name, "skip", "no d2t: draft ids are target ids")
    ids = draft_ids(head)
    why, fix = "d2t holds offsets (target id - draft id)", "use the d2t that belongs to this head"
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        at = int(np.flatnonzero((ids < 0) | (ids >= vocab))[0])
        detail = f"{_where(head, 'd2t')} maps draft id {at} to target id {int(ids[at])}, outside 0 ... {vocab - 1}"
        return Check(name, "fail", detail, why + "; absolute ids or a foreign map lead out of the vocabulary", fix)
    unique, counts = np.unique(ids, return_counts=True)
    if len(unique) != len(ids):
        target = int(unique[counts > 1][0])
        detail = f"{_where(head, 'd2t')} maps several draft ids to target id {target}"
        return Check(name, "fail", detail, why + "; each draft id stands for another token", fix)
    identity = bool((ids == np.arange(len(ids))).all())
    return Check(name, "pass", f"{len(ids)} distinct target ids" + (", the identity" if identity else ""))


def _vocabulary_mask(head: Head) -> Check:
    name = "vocabulary mask (t2d)"
    if not head.has("t2d"):
        return Check(name, "skip", "no t2d: it follows from d2t")
    t2d = read_values(head.folder, head.tensors["t2d"]) != 0
    expected = np.zeros(head.config.vocab_size, dtype=bool)
    expected[draft_ids(head).clip(0, head.config.vocab_size - 1)] = True
    if np.array_equal(t2d, expected):
        return Check(name, "pass", "marks exactly the ids that d2t leads to")
    at = int(np.flatnonzero(t2d != expected)[0])
    detail = f"{_where(head, 't2d')} and d2t disagree, first at target id {at}"
    why = "both describe one draft vocabulary, and which is right cannot be told"
    return Check(name, "fail", detail, why, "use the d2t and t2d that belong together")


def _mask_row(head: Head) -> Check:
    name, mask_id = "MASK embedding row", head.config.mask_token_id
    if head.has("embed_mask_row"):
        where, row = _where(head, "embed_mask_row"), read_values(head.folder, head.tensors["embed_mask_row"])
    elif head.has("embed_tokens.weight"):
        row = read_values(head.folder, head.tensors["embed_tokens.weight"], slice(mask_id, mask_id + 1))
        where = f"{_where(head, 'embed_tokens.weight')} row {mask_id} (the mask token id)"
    else:
        why = "published heads were trained with a MASK row of their own; without it acceptance usually falls"
        return Check(name, "warn", f"{head.folder} has no embedding; the target's is used", why, "use the full checkpoint")
    why = "that row was not trained: the id is wrong, or it was the embedding's padding index in training"
    zeros = Check(name, "fail", f"{where} is all zeros", why, "give the mask token id that the head was trained with")
    return _trained_vector(name, where, row, zeros)


def _mask_hidden(head: Head) -> Check:
    name, where = "learned hidden state (mask_hidden)", _where(head, "mask_hidden")
    values = read_values(head.folder, head.tensors["mask_hidden"])
    why = "it was not trained, so drafts after the first will rarely hit"
    zeros = Check(name, "warn", f"{where} is all zeros", why, "use the checkpoint that training ended with")
    return _trained_vector(name, where, values, zeros)


def _trained_vector(name: str, where: str, values: np.ndarray, if_zeros: Check) -> Check:
    """A learned vector that every mask row gets: finite, and ``if_zeros`` where nothing was learned."""
    if not bool(np.isfinite(values).all()):
        return Check(name, "fail", f"{where} is not finite", "every draft after the first would be", "download it again")
    if not bool(values.any()):
        return if_zeros
    return Check(name, "pass", f"finite, norm {float(np.linalg.norm(values)):.3g}")


def scan(head: Head) -> Check:
    """Read all weights and look for NaN and infinity."""
    name, bad = "all weights finite", []
    for info in head.tensors.values():
        with (head.folder / info.file).open("rb", buffering=0) as file:
            if not all(is_finite(piece, info.dtype) for piece in read_chunks(file, info)):
                bad.append(f"{info.file} {info.name}")
    if bad:
        more = f" and {len(bad) - 4} more" if len(bad) > 4 else ""
        detail = f"{head.folder}: NaN or infinity in {', '.join(bad[:4])}{more}"
        return Check(name, "fail", detail, "drafts would be arbitrary", "download the head again, or ask its author")
    return Check(name, "pass", f"{len(head.tensors)} tensors")


def target_checks(head: Head, target: TargetInfo) -> list[Check]:
    """Whether a head and a target belong together."""
    return [_sizes(head, target), _mask_id(head, target), _aux_layers(head, target), _shared(head, target)]


def _sizes(head: Head, target: TargetInfo) -> Check:
    config, name, what = head.config, "sizes fit the target", ""
    if config.target_hidden_size != target.hidden_size:
        what = f"the head was trained on hidden size {config.target_hidden_size}, the target's is {target.hidden_size}"
    elif config.vocab_size != target.vocab_size:
        what = f"the head's vocabulary has {config.vocab_size} tokens, the target's {target.vocab_size}"
    if what:
        fix = "pass the target that the head was trained for (--model-path)"
        return Check(name, "fail", what, "head and target do not belong together", fix)
    return Check(name, "pass", f"hidden size {target.hidden_size}, vocabulary {target.vocab_size}")


def _mask_id(head: Head, target: TargetInfo) -> Check:
    name, mask_id = "mask token id unused by the target", head.config.mask_token_id
    use = target.used_ids.get(mask_id)
    if use is not None:
        return Check(
            name,
            "fail",
            f"mask token id {mask_id} is the target's {use}",
            "the MASK embedding must mean nothing else; real text would look like a mask",
            "correct mask_token_id in the head's config.json (vLLM's ptd_token_id)",
        )
    return Check(name, "pass", f"id {mask_id}")


def _aux_layers(head: Head, target: TargetInfo) -> Check:
    name = "aux layers exist in the target"
    try:
        points = capture_points(head.config.aux_layer_ids, target.num_layers)
        to_sglang(points, target.architecture, target.num_layers)
    except PEagleError as error:
        return Check(name, "fail", error.what, error.why, error.fix)
    return Check(name, "pass", f"outputs of layers {', '.join(str(i - 1) for i in points)} of {target.num_layers}")


def _shared(head: Head, target: TargetInfo) -> Check:
    config, name = head.config, "what the head takes from the target"
    shared = []
    for tensor, what in (("embed_tokens.weight", "embedding"), ("lm_head.weight", "LM head")):
        if head.has(tensor):
            continue
        shared.append(what)
        if config.hidden_size != target.hidden_size:
            detail = f"{head.folder} has no {tensor}, and its hidden size {config.hidden_size} is not the target's"
            return Check(name, "fail", detail, f"the target's {what} cannot stand in for it", "use a head that brings the tensor")
    if "LM head" in shared and config.draft_vocab_size != target.vocab_size:
        detail = f"{head.folder} has no lm_head.weight, and its draft vocabulary is reduced"
        return Check(name, "fail", detail, "the target's LM head has other rows", "use a head that brings lm_head.weight")
    return Check(name, "pass", " and ".join(shared) or "nothing")
