"""Trained weights as head folders: this package's compact form, vLLM's, speculators', and stock SGLang's EAGLE-3.

A compact head holds neither the LM head nor the embedding: both are the target's, but for the MASK row.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Mapping, Optional

import torch
from safetensors.torch import save_file
from torch import Tensor

from sgl_peagle.errors import PEagleError
from sgl_peagle.heads import convert as conversion
from sgl_peagle.heads.config import PEagleHeadConfig, RopeConfig
from sgl_peagle.heads.formats import format_named
from sgl_peagle.heads.reader import read_head
from sgl_peagle.heads.report import inspect_head
from sgl_peagle.train.model import Head

WEIGHTS = "model.safetensors"

#: Formats of a P-EAGLE head.
FORMATS = ("peagle", "vllm", "speculators")


def export_peagle(
    head: Head,
    lm_head: Tensor,
    folder: Path,
    *,
    to: str,
    depths: int,
    aux_layer_ids: tuple[int, ...],
    record: Mapping[str, Any],
    target: str,
    target_name: Optional[str] = None,
) -> None:
    """Write a P-EAGLE head, in bfloat16, and check it with ``sgl-peagle inspect``'s checks.

    Args:
        head: Trained.
        lm_head: [V, D], the target's: written for other engines, left out of the compact form.
        folder: To create; it must not exist.
        to: One of :data:`FORMATS`.
        depths: K trained.
        aux_layer_ids: Capture points.
        record: How the head was trained; goes into config.json (``training``) and training.json.
        target: Folder or hub id.
        target_name: Hub id to record, None for a target that has none.

    Raises:
        PEagleError: The folder exists, or the written head fails a check.
    """
    shape = head.shape
    rope = dict(shape.rope_parameters)
    kind, theta = rope.pop("rope_type", "default"), float(rope.pop("rope_theta", 10000.0))
    config = PEagleHeadConfig(
        hidden_size=shape.hidden_size,
        target_hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=shape.layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        draft_vocab_size=shape.vocab_size,
        rms_norm_eps=shape.rms_norm_eps,
        max_position_embeddings=shape.max_position_embeddings,
        rope=RopeConfig(kind, theta, tuple(sorted((k, v) for k, v in rope.items() if k != "partial_rotary_factor"))),
        attention_bias=False,
        qk_norm=False,
        aux_layer_ids=aux_layer_ids,
        num_aux=shape.num_aux,
        mask_token_id=head.mask_token_id,  # type: ignore[arg-type]
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=False,
        tie_word_embeddings=False,
        embed_from_target=head.embedding == "mask_row",
        k_trained=depths,
        target=target_name,
    )
    tensors = head.exported()
    if to != "peagle":
        tensors["lm_head.weight"] = lm_head  # other engines expect it in the file; it is the target's, bit by bit
    raw = format_named("peagle").write(config, "bfloat16") | {"training": dict(record)}
    _refuse_existing(folder)
    if to == "peagle":
        _write(folder, tensors, raw, record)
    else:
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            compact = Path(scratch) / "head"
            _write(compact, tensors, raw, record)
            plan = conversion.make_plan(read_head(str(compact)), to, target=target)
            if to == "vllm":  # speculators reads its config strictly
                plan = replace(plan, raw=plan.raw | {"training": dict(record)})
            conversion.convert(plan, folder, origin="training run", revision=None)
        (folder / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    report = inspect_head(str(folder), target=target)
    failed = [f"{check.name}: {check.detail}" for check in report.checks if check.status == "fail"]
    if failed:
        raise PEagleError(
            f"the exported head {folder} fails its checks: {'; '.join(failed)}",
            "an engine would refuse it",
            "look at the training log; the checkpoint is kept",
        )


def export_eagle3(
    head: Head, folder: Path, *, aux_layer_ids: tuple[int, ...], record: Mapping[str, Any]
) -> None:
    """Write an EAGLE-3 head for stock SGLang (``--speculative-algorithm EAGLE3``), in bfloat16.

    ``draft_vocab_size`` null is SGLang's sign for "the LM head is the target's", and the embedding it shares anyway, so
    that neither is in the file.

    Raises:
        PEagleError: The folder exists.
    """
    shape = head.shape
    rope = dict(shape.rope_parameters)
    theta = rope.get("rope_theta", 10000.0)
    raw: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "target_hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": None,
        "rms_norm_eps": shape.rms_norm_eps,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", **rope, "rope_theta": theta},
        "tie_word_embeddings": False,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        # SGLang counts layers (id i = output of layer i), the capture points count their inputs.
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [i - 1 for i in aux_layer_ids],
        },
        "torch_dtype": "bfloat16",
        "training": dict(record),
    }
    _refuse_existing(folder)
    named = {name.replace("layers.0.", "midlayer."): value for name, value in head.exported().items()}
    _write(folder, named, raw, record)


def _refuse_existing(folder: Path) -> None:
    if folder.exists():
        raise PEagleError(f"{folder} exists", "nothing is overwritten", "choose another folder")


def _write(folder: Path, tensors: Mapping[str, Tensor], raw: Mapping[str, Any], record: Mapping[str, Any]) -> None:
    """A head folder, whole or not at all."""
    partial = folder.with_name("." + folder.name + ".part")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    values = {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in tensors.items()}
    save_file(values, partial / WEIGHTS, metadata={"format": "pt"})
    (partial / WEIGHTS).chmod(0o644)
    (partial / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    (partial / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    partial.rename(folder)
