"""What ``sgl-peagle inspect`` says about a head."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from typing import Any, Optional

from sgl_peagle.heads.checks import Check, quick_checks, scan, target_checks
from sgl_peagle.heads.config import MASK_ID_ENV
from sgl_peagle.heads.reader import Head, read_head
from sgl_peagle.heads.target import read_target
from sgl_peagle.layout import verify_width
from sgl_peagle.settings import DEFAULT_K


@dataclass(frozen=True)
class Report:
    """A head, every check, and how to serve it."""

    head: Head
    checks: tuple[Check, ...]
    command: str
    aux_layers: str

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return all(check.status != "fail" for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """For ``--json``; keys are stable."""
        head, config = self.head, self.head.config
        return {
            "ok": self.ok,
            "folder": str(head.folder),
            "format": head.format.name,
            "config": asdict(config) | {"rope": config.rope.parameters()},
            "aux_layers": self.aux_layers,
            "tensors": {
                name: {"file": i.file, "name": i.name, "shape": list(i.shape), "dtype": i.dtype, "bytes": i.end - i.start}
                for name, i in head.tensors.items()
            },
            "checks": [asdict(check) for check in self.checks],
            "command": self.command,
        }

    def as_text(self) -> str:
        """For a terminal."""
        head, config = self.head, self.head.config
        total = sum(i.end - i.start for i in head.tensors.values())
        dtypes = sorted({i.dtype for i in head.tensors.values() if i.is_float})
        options = [
            name
            for name in ("attention_bias", "norm_before_residual", "norm_before_fc", "fc_norm", "qk_norm", "embed_from_target")
            if getattr(config, name)
        ]
        own = [what for name, what in (("embed_tokens.weight", "embedding"), ("lm_head.weight", "LM head")) if head.has(name)]
        rows = {
            "format": f"{head.format.title} ({head.format.evidence})",
            "drafter": f"{config.num_layers} layers, hidden {config.hidden_size}, {config.num_heads} heads "
            f"({config.num_kv_heads} key/value) of {config.head_dim}, MLP {config.intermediate_size}, "
            f"RoPE {config.rope.rope_type}",
            "options": ", ".join(options) or "none",
            "trained for K": str(config.k_trained) if config.k_trained else "not recorded",
            "mask token id": str(config.mask_token_id),
            "aux layers": self.aux_layers,
            "vocabulary": f"{config.vocab_size}, drafts from {config.draft_vocab_size}",
            "context": f"{config.max_position_embeddings} positions",
            "target": config.target or f"not recorded (hidden size {config.target_hidden_size})",
            "own": " and ".join(own) or "neither embedding nor LM head (the target's are used)",
            "tensors": f"{len(head.tensors)}, {total / 1e6:.1f} MB, {', '.join(dtypes)}",
        }
        lines = [f"{head.folder}: P-EAGLE head"] + [f"  {name:<14} {value}" for name, value in rows.items()] + ["", "checks"]
        for check in self.checks:
            lines.append(f"  {check.status.upper():<4} {check.name}: {check.detail}")
            if check.status in ("warn", "fail"):
                lines += [f"         why: {check.why}", f"         fix: {check.fix}"]
        return "\n".join([*lines, "", "serve with", f"  {self.command}"])


def inspect_head(
    path_or_id: str,
    *,
    revision: Optional[str] = None,
    mask_token_id: Optional[int] = None,
    target: Optional[str] = None,
) -> Report:
    """Read a head, run every check, and work out the launch command.

    Raises:
        PEagleError: The head cannot be read at all (config, names, shapes).
    """
    head = read_head(path_or_id, revision, mask_token_id)
    info = read_target(target) if target is not None else None
    checks = [Check("config and tensors", "pass", f"every key and all {len(head.tensors)} tensors accounted for")]
    checks += [*quick_checks(head), scan(head)]
    checks += target_checks(head, info) if info is not None else [Check("fits the target", "skip", "no --target given")]
    checks.append(_k_trained(head))
    return Report(head, tuple(checks), _command(head, path_or_id, revision, target, mask_token_id), _aux_words(head, info))


def _k_trained(head: Head) -> Check:
    k = head.config.k_trained
    if k is None:
        why = f"PEAGLE then drafts {DEFAULT_K} tokens; drafts beyond what a head was trained for rarely hit"
        fix = "pass --speculative-num-draft-tokens K+1 with the K of the head's model card"
        return Check("K trained", "warn", "the head does not record for how many drafts it was trained", why, fix)
    return Check("K trained", "pass", f"{k} drafts")


def _aux_words(head: Head, target: Any) -> str:
    points = head.config.aux_layer_ids
    if points is None and target is None:
        return "default: outputs of layers 1, L/2 - 1 and L - 4 of a target with L layers (the first is 0)"
    if points is None:
        points = (2, target.num_layers // 2, target.num_layers - 3)
    words = [f"layer {i - 1}" if i else "the embedding" for i in points]
    return f"outputs of {', '.join(words)} of the target (the first layer is 0)"


def _command(
    head: Head, path_or_id: str, revision: Optional[str], target: Optional[str], mask_token_id: Optional[int]
) -> str:
    model = target or head.config.target
    parts = ["python", "-m", "sglang.launch_server", "--model-path", model or "TARGET"]
    parts += ["--speculative-algorithm", "PEAGLE", "--speculative-draft-model-path", path_or_id]
    if revision is not None:
        parts += ["--speculative-draft-model-revision", revision]
    parts += ["--speculative-num-draft-tokens", str(verify_width(head.config.k_trained or DEFAULT_K))]
    prefix = f"{MASK_ID_ENV}={head.config.mask_token_id} " if head.format.name == "specforge" else ""
    return prefix + shlex.join(parts)
