"""Writing a head in another format: streamed, checked, verified by reading back, and moved into place at the end.

Pieces of a few MiB pass from the source files to the new file, so memory does not grow with the head. Nothing exists at
the destination until everything was written and compared; an interrupted run removes its temporary folder (one
that is killed outright leaves ``.NAME.partial-*`` beside the destination, never a partial destination).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional

import numpy as np

from sgl_peagle import __version__
from sgl_peagle.aux_layers import capture_points
from sgl_peagle.errors import PEagleError
from sgl_peagle.heads.checks import draft_ids, quick_checks, require, target_checks
from sgl_peagle.heads.config import PEagleHeadConfig
from sgl_peagle.heads.formats import HeadFormat, format_named
from sgl_peagle.heads.formats.base import cannot_express
from sgl_peagle.heads.keys import read_json_object
from sgl_peagle.heads.pieces import Copied, Output, Rebuilt, Small, Source, cast, embedding_difference
from sgl_peagle.heads.reader import Head, read_head
from sgl_peagle.heads.safetensors_io import (
    CHUNK,
    Planned,
    TensorInfo,
    copy_range,
    equal_bytes,
    fill,
    header_bytes,
    is_finite,
    read_bytes,
    read_chunks,
    write_all,
)
from sgl_peagle.heads.target import read_target, target_embedding

WEIGHTS = "model.safetensors"
RECORD = "conversion.json"

#: ``--dtype`` -> safetensors' name.
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_TRANSFORMERS_NAME = {value: key for key, value in DTYPES.items()} | {"F64": "float64"}

_KEPT_FILES = ("LICENSE*", "LICENCE*", "NOTICE*", "COPYING*", "USE_POLICY*", "README*")


@dataclass(frozen=True)
class Plan:
    """What a conversion will do.

    Attributes:
        head: The source.
        to: Format to write.
        config: The head as it will be read back.
        raw: Its config.json.
        outputs: Every tensor, in the order of writing.
        kept: Licence and model card files.
        notes: What the user should know.
        target: Target's name and the tensor taken from it, None when no weights of it are needed.
    """

    head: Head
    to: HeadFormat
    config: PEagleHeadConfig
    raw: dict[str, Any]
    outputs: tuple[Output, ...]
    kept: tuple[Path, ...]
    notes: tuple[str, ...]
    target: Optional[tuple[Path, TensorInfo]] = None

    @property
    def size(self) -> int:
        """Bytes of weights."""
        return sum(output.planned.size for output in self.outputs)


def make_plan(
    head: Head,
    to: str,
    *,
    target: Optional[str] = None,
    embed_from_target: bool = False,
    dtype: Optional[str] = None,
) -> Plan:
    """Decide what to write, and check everything that needs no full read of the weights.

    Args:
        head: The source, as read.
        to: Name of a writable format.
        target: Folder or hub id of the target: checked against the head, and read where its embedding is needed.
        embed_from_target: Store only the MASK row of the embedding (peagle format).
        dtype: One of :data:`DTYPES`; None keeps every tensor's own.

    Raises:
        PEagleError: The head is bad, or the format cannot express it.
    """
    require(quick_checks(head))
    head_format, notes, config = format_named(to), [], head.config
    if target is not None:
        info = read_target(target)
        require(target_checks(head, info))
        if to == "peagle":
            config = replace(config, aux_layer_ids=capture_points(config.aux_layer_ids, info.num_layers))
        if not Path(target).expanduser().exists():  # a hub id; a local path means nothing on another machine
            config = replace(config, target=config.target or target)
    elif config.aux_layer_ids is None and to == "peagle":
        notes.append("aux layers stay the default (2, L//2, L-3); pass --target to write them out")
    table = None
    if embed_from_target or (config.embed_from_target and to != "peagle"):
        if target is None:
            raise PEagleError(
                "--embed-from-target" if embed_from_target else f"{head.folder} has only the MASK row of its embedding",
                "the target's embedding is needed" + ("" if embed_from_target else " to rebuild the rest"),
                "pass --target with the folder or hub id of the target",
            )
        table = target_embedding(target)
    if embed_from_target and to != "peagle":
        raise cannot_express(head_format.title, "a mask row without an embedding", "use --to peagle")
    config = replace(config, embed_from_target=config.embed_from_target if to == "peagle" else False)
    if embed_from_target and not config.embed_from_target:
        _require_frozen_rows(head, table)  # type: ignore[arg-type]
        config = replace(config, embed_from_target=True)
    if to == "speculators" and head.has("fc.bias"):
        raise cannot_express(head_format.title, "a bias of fc", "use --to peagle or vllm")
    outputs = _outputs(head, config, head_format, DTYPES[dtype] if dtype else None, table)
    if config.k_trained is None:
        notes.append("the head does not record K; PEAGLE drafts 7 tokens unless told otherwise")
    weight_dtype = next(o.planned.dtype for o in outputs if o.planned.name == head_format.file_name("fc.weight"))
    raw = head_format.write(config, _TRANSFORMERS_NAME[weight_dtype])
    if to == "speculators" and config.k_trained is None:
        config = replace(config, target=None)  # both stand in the speculators_config, which needs K
    kept = sorted(p for pattern in _KEPT_FILES for p in head.folder.glob(pattern) if p.is_file())
    return Plan(head, head_format, config, raw, outputs, tuple(kept), tuple(notes), table)


def _require_frozen_rows(head: Head, table: tuple[Path, TensorInfo]) -> None:
    own = head.tensors.get("embed_tokens.weight")
    if own is None:
        raise PEagleError(
            f"{head.folder} has no embed_tokens.weight", "there is no MASK row to keep", "leave out --embed-from-target"
        )
    if own.shape != table[1].shape:
        raise PEagleError(
            f"{head.folder}: embed_tokens.weight is {list(own.shape)}, the target's embedding {list(table[1].shape)}",
            "the target's rows cannot stand in for the head's",
            "leave out --embed-from-target",
        )
    row = embedding_difference(head.folder, own, *table, head.config.mask_token_id)
    if row is not None:
        raise PEagleError(
            f"{head.folder}: {own.file} {own.name} differs from the target's embedding in row {row}",
            "the embedding was trained; replacing it by the target's ruins acceptance",
            "leave out --embed-from-target (or check --target)",
        )


def _outputs(
    head: Head, config: PEagleHeadConfig, to: HeadFormat, dtype: Optional[str], table: Optional[tuple[Path, TensorInfo]]
) -> tuple[Output, ...]:
    outputs: list[Output] = []

    def add(canonical: str, kind: str, shape: tuple[int, ...], source: Source, origin: Optional[TensorInfo] = None) -> None:
        outputs.append(Output(Planned(to.file_name(canonical), kind, shape), source, origin))

    for canonical, info in head.tensors.items():  # in the order of the source files
        kind = dtype if dtype and info.is_float else info.dtype
        shape = (1, 1, config.aux_width) if canonical == "mask_hidden" else info.shape
        if canonical == "embed_tokens.weight" and config.embed_from_target:
            mask = config.mask_token_id
            row = memoryview(read_bytes(head.folder, info, slice(mask, mask + 1)))
            add("embed_mask_row", kind, (config.hidden_size,), Small(bytes(cast(row, info, kind))))
        elif canonical == "embed_mask_row" and not config.embed_from_target:
            row = memoryview(read_bytes(head.folder, info))
            assert table is not None  # make_plan asks for a target
            shape = (config.vocab_size, config.hidden_size)
            if table[1].shape != shape:
                raise PEagleError(
                    f"the target's embedding is {list(table[1].shape)}, the head's would be {list(shape)}",
                    "the head was made for another target",
                    "pass the target that the head was trained for as --target",
                )
            add("embed_tokens.weight", kind, shape, Rebuilt(*table, kind, bytes(cast(row, info, kind)), config.mask_token_id))
        else:
            add(canonical, kind, shape, Copied(head.folder, info, kind), info)
    if to.name == "speculators" and head.has("d2t") and not head.has("t2d"):
        t2d = np.zeros(config.vocab_size, dtype=bool)
        t2d[draft_ids(head)] = True
        add("t2d", "BOOL", (config.vocab_size,), Small(t2d.tobytes()))
    return tuple(outputs)


# -- writing --------------------------------------------------------------------------------------------------------


def convert(plan: Plan, destination: Path, *, origin: str, revision: Optional[str] = None, force: bool = False) -> dict[str, Any]:
    """Carry a plan out.

    Args:
        plan: From :func:`make_plan`.
        destination: The folder to create.
        origin: What the user called the source, for the record.
        revision: Commit of a hub repository, for the record.
        force: Replace an existing head at ``destination``.

    Returns:
        The content of ``conversion.json``.

    Raises:
        PEagleError: The destination exists, a weight is not finite, or reading back shows a difference.
    """
    destination = destination.expanduser().absolute()
    check_destination(plan, destination, force)
    destination.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{destination.name}.partial-", dir=destination.parent))
    try:
        with ThreadPoolExecutor(2) as beside:  # hashing takes longest: it runs beside everything else
            inputs = beside.submit(_hash_inputs, plan)
            _write_weights(plan, work / WEIGHTS)
            on_disk = beside.submit(_flush, work / WEIGHTS)
            (work / "config.json").write_text(json.dumps(plan.raw, indent=2) + "\n")
            for file in plan.kept:
                shutil.copyfile(file, work / file.name)
            _verify(plan, work)
            on_disk.result()  # before the destination exists, so that it is whole even if the power fails
            record = _record(plan, inputs.result(), origin, revision)
        (work / RECORD).write_text(json.dumps(record, indent=2) + "\n")
        work.chmod(0o755)  # mkdtemp's is private
        _move(work, destination)
    finally:
        shutil.rmtree(work, ignore_errors=True)  # gone after the move
    return record


def check_destination(plan: Plan, destination: Path, force: bool) -> None:
    """Refuse a destination whose content would be lost.

    Raises:
        PEagleError: It exists (and is no head that ``force`` allows to replace), or overlaps the source.
    """
    source, real = plan.head.folder.resolve(), destination.resolve()
    inputs = [source] + ([plan.target[0].resolve()] if plan.target else [])
    if any(real == path or real in path.parents or path in real.parents for path in inputs):
        raise PEagleError(f"{destination} overlaps {source}", "the source is never changed", "choose another folder")
    if not os.path.lexists(destination):
        return
    if not force:
        raise PEagleError(f"{destination} exists", "nothing is overwritten unasked", "choose another folder, or pass --force")
    entries = list(destination.iterdir()) if destination.is_dir() else None
    if entries is None or destination.is_symlink() or (entries and not (destination / RECORD).is_file()):
        raise PEagleError(
            f"{destination} is not a converted head (it has no {RECORD})",
            "--force replaces the result of an earlier conversion, nothing else",
            "choose another folder",
        )


def _move(work: Path, destination: Path) -> None:
    old = None
    if destination.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{destination.name}.old-", dir=destination.parent)) / "head"
        destination.rename(old)
    try:
        work.rename(destination)
    except BaseException:
        if old is not None:
            old.rename(destination)
            old.parent.rmdir()
        raise
    if old is not None:
        shutil.rmtree(old.parent)


def _write_weights(plan: Plan, path: Path) -> None:
    planned = [output.planned for output in plan.outputs]
    header = header_bytes(planned, {"format": "pt"})
    with path.open("wb", buffering=0) as out:
        write_all(out, memoryview(header))
        at = len(header)
        for output in plan.outputs:
            if output.origin is not None and output.origin.dtype == output.planned.dtype:
                with (plan.head.folder / output.origin.file).open("rb", buffering=0) as file:
                    copy_range(file, output.origin, out, at)
            else:
                out.seek(at)
                for piece in output.source.pieces():
                    write_all(out, piece)
            at += output.planned.size


def _flush(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _hash_inputs(plan: Plan) -> list[dict[str, Any]]:
    """Name, size and sha256 of every file of the source that was read."""
    names = sorted({info.file for info in plan.head.tensors.values()})
    inputs = []
    for name in [*names, "config.json", *(file.name for file in plan.kept)]:
        digest = hashlib.sha256()
        with (plan.head.folder / name).open("rb", buffering=0) as file:
            buffer = memoryview(bytearray(CHUNK))
            while got := file.readinto(buffer):  # type: ignore[attr-defined]
                digest.update(buffer[:got])
            inputs.append({"file": name, "bytes": file.tell(), "sha256": digest.hexdigest()})
    return inputs


def _verify(plan: Plan, work: Path) -> None:
    """Read the result back: it means the same, and every byte is what it was made from."""

    def refuse(what: str) -> None:
        raise PEagleError(f"{what} differs after writing", "the disk or a file changed underneath", "run it again")

    found = read_head(str(work), mask_token_id=plan.config.mask_token_id)
    if found.format.name != plan.to.name or found.config != plan.config:
        refuse("config.json")
    written = {info.name: info for info in found.tensors.values()}
    if set(written) != {output.planned.name for output in plan.outputs}:
        refuse("the list of tensors")
    for output in plan.outputs:
        name = output.planned.name
        if not _is_written(output, plan.head.folder, work / WEIGHTS, written[name]):
            refuse(name)
    passed = {output.origin.name for output in plan.outputs if output.origin is not None}
    for info in plan.head.tensors.values():  # what was replaced must be sound as well
        if info.name not in passed:
            for piece in Copied(plan.head.folder, info, info.dtype).pieces():
                _require_finite(piece, info.dtype, plan.head.folder / info.file, info.name)


def _is_written(output: Output, folder: Path, path: Path, info: TensorInfo) -> bool:
    """Whether the file holds exactly the bytes that a tensor was made from; NaN in them is refused here as well."""
    at, buffer = info.start, memoryview(bytearray(1))
    with path.open("rb", buffering=0) as file:
        file.seek(at)
        for piece in output.source.pieces():
            if len(buffer) < len(piece):
                buffer = memoryview(bytearray(len(piece)))
            mine = buffer[: len(piece)]
            fill(file, mine, info.name)
            at += len(piece)
            if not equal_bytes(mine, piece):
                return False
            name = output.origin.name if output.origin else info.name
            _require_finite(piece, info.dtype, path if output.origin is None else folder / output.origin.file, name)
    return at == info.end


def _require_finite(piece: memoryview, dtype: str, file: Path, name: str) -> None:
    if not is_finite(piece, dtype):
        raise PEagleError(
            f"{file}: NaN or infinity in {name}",
            "drafts would be arbitrary",
            "download the head again, or ask its author",
        )


def _record(plan: Plan, inputs: list[dict[str, Any]], origin: str, revision: Optional[str]) -> dict[str, Any]:
    record: dict[str, Any] = {
        "tool": f"sgl-peagle {__version__}",
        "source": {"head": origin, "revision": revision, "format": plan.head.format.name, "files": inputs},
        "format": plan.to.name,
        "mask_token_id": plan.config.mask_token_id,
        "tensors": len(plan.outputs),
        "bytes": plan.size,
    }
    earlier = plan.head.folder / RECORD
    if earlier.is_file():  # the head was converted before: its history goes along
        record["source"]["conversion"] = read_json_object(earlier)
    if plan.target is not None:
        folder, info = plan.target
        digest = hashlib.sha256()
        with (folder / info.file).open("rb", buffering=0) as file:
            for piece in read_chunks(file, info):
                digest.update(piece)
        record["target"] = {"model": plan.config.target, "file": info.file, "tensor": info.name, "sha256": digest.hexdigest()}
    return record
