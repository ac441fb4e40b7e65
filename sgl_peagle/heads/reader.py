"""The strict reader of a head folder: every tensor accounted for, every parameter present, or an error.

Only headers are read here (names, shapes, dtypes), never tensor data, no pickle and no code. SGLang's own loader
reads the data later, and :meth:`Head.canonical` tells the model what each tensor is.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Mapping, Optional

from sgl_peagle.errors import PEagleError
from sgl_peagle.heads.config import MASK_ID_ENV, PEagleHeadConfig
from sgl_peagle.heads.formats import HeadFormat, detect
from sgl_peagle.heads.keys import read_json_object
from sgl_peagle.heads.names import expected_shapes, optional_shapes
from sgl_peagle.heads.safetensors_io import FLOATS, TensorInfo, read_headers

INDEX = "model.safetensors.index.json"

_DTYPES = {"d2t": ("I64", "I32"), "t2d": ("BOOL", "U8", "I64")}


@dataclass(frozen=True)
class Head:
    """A head that passed every check which needs no tensor data.

    Attributes:
        folder: The local folder.
        format: The format of its files.
        config: The parsed config.
        tensors: Canonical tensor name -> where it is.
    """

    folder: Path
    format: HeadFormat
    config: PEagleHeadConfig
    tensors: Mapping[str, TensorInfo]

    def has(self, canonical: str) -> bool:
        """Whether the head brings the tensor of this canonical name."""
        return canonical in self.tensors

    def canonical(self, file_name: str) -> str:
        """The canonical name of a tensor called ``file_name`` in the head's files."""
        return self.format.canonical(file_name)


def resolve_folder(path_or_id: str, revision: Optional[str] = None) -> Path:
    """The local folder of a head; a Hugging Face hub id is downloaded (or found in the cache).

    Raises:
        PEagleError: Neither a folder nor a hub repository that can be had.
    """
    folder = Path(path_or_id).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, HfHubHTTPError, LocalEntryNotFoundError

    try:
        patterns = ["*.json", "*.safetensors", "LICENSE*", "NOTICE*", "README*", "USE_POLICY*"]
        return Path(snapshot_download(path_or_id, revision=revision, allow_patterns=patterns))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise PEagleError(
            f"no P-EAGLE head at {path_or_id!r}",
            f"it is not a local folder, and the hub says: {str(error).splitlines()[0]}",
            "check the path or repository id, the network, and HF_HUB_OFFLINE",
        ) from error


def revision_of(folder: Path) -> Optional[str]:
    """The commit of a folder in the hub cache, None for any other folder."""
    return folder.name if folder.parent.name == "snapshots" else None


def given_mask_id() -> Optional[int]:
    """The user's mask token id from the environment, or None.

    Raises:
        PEagleError: It is no token id.
    """
    text = os.environ.get(MASK_ID_ENV, "").strip()
    if text and not text.isdecimal():
        raise PEagleError(f"{MASK_ID_ENV} is {text!r}", "it must be a token id", f"set {MASK_ID_ENV} to a number")
    return int(text) if text else None


def read_head(path_or_id: str, revision: Optional[str] = None, mask_token_id: Optional[int] = None) -> Head:
    """Read and check a head in any of the formats.

    Args:
        path_or_id: A local folder or a Hugging Face hub id.
        revision: Revision of a hub repository.
        mask_token_id: For files that do not record it; defaults to ``SGL_PEAGLE_MASK_TOKEN_ID``.

    Raises:
        PEagleError: Naming the file, the key or tensor, and what to do.
    """
    folder = resolve_folder(path_or_id, revision)
    config_path = folder / "config.json"
    raw = read_json_object(config_path)
    found = [info for file in weight_files(folder) for info in read_headers(file)]
    _check_index(folder, found)
    head_format = detect(raw, (info.name for info in found), str(config_path))
    tensors = _by_canonical_name(found, head_format, folder)
    mask_id = given_mask_id() if mask_token_id is None else mask_token_id
    config = head_format.parse(raw, str(config_path), mask_id)
    _check_tensors(config, tensors, folder)
    return Head(folder, head_format, config, tensors)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a head, as SGLang would load them.

    Raises:
        PEagleError: There are none, only pickles, or an index that names files outside the folder.
    """
    index = folder / INDEX
    if index.is_file():
        names = sorted(set(_weight_map(index).values()))
        if any(Path(name).name != name or name in ("..", ".") or "\\" in name for name in names):
            raise PEagleError(
                f"{index} names a file outside its folder", "only files of the head are read", "correct the index"
            )
        _refuse_pickles([name for name in names if not name.endswith(".safetensors")], index)
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise PEagleError(
                f"{folder}: {', '.join(missing)} from {index.name} is missing",
                "its tensors are part of the head",
                "download the head again",
            )
        others = sorted({path.name for path in folder.glob("*.safetensors")} - set(names))
        if others:
            raise PEagleError(
                f"{folder}: {', '.join(others)} is not in {index.name}",
                "SGLang would leave it out, and whether the head needs it cannot be told",
                "remove the file, or the index if the file holds everything",
            )
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        _refuse_pickles(sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern)), folder)
        raise PEagleError(f"{folder} holds no safetensors file", "the weights are read from there", "check the path")
    return files


def _refuse_pickles(names: list[str], where: Path) -> None:
    if names:
        raise PEagleError(
            f"{where} names no safetensors file but {', '.join(names)}",
            "pickled weights can run code when they are loaded, so only safetensors is read",
            "convert the weights to safetensors where they come from, or use a revision that has them",
        )


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json_object(index).get("weight_map")
    good = isinstance(weight_map, dict) and weight_map and all(isinstance(v, str) for v in weight_map.values())
    if not good:
        raise PEagleError(
            f"{index} has no weight_map of tensor names to file names", "it says where the tensors are", "download it again"
        )
    return weight_map


def _check_index(folder: Path, found: list[TensorInfo]) -> None:
    """An index and its shards must agree: SGLang takes the files from one and the tensors from the other."""
    index = folder / INDEX
    if not index.is_file():
        return
    weight_map, where = _weight_map(index), {info.name: info.file for info in found}
    for name, file in weight_map.items():
        if where.get(name) != file:
            is_in = f"it is in {where[name]}" if name in where else "it is in no file"
            raise PEagleError(
                f"{index} says that {name} is in {file}, but {is_in}",
                "shards were swapped, renamed or replaced",
                "download the head again",
            )
    unlisted = sorted(set(where) - set(weight_map))
    if unlisted:
        raise PEagleError(
            f"{folder}: {where[unlisted[0]]} holds {unlisted[0]}, which {index.name} does not list",
            "the index is not the one that belongs to the files",
            "download the head again, or remove the index if one file holds everything",
        )


def _by_canonical_name(found: list[TensorInfo], head_format: HeadFormat, folder: Path) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for info in found:
        name = head_format.canonical(info.name)
        if name in tensors:
            raise PEagleError(
                f"{folder}: {info.file} {info.name} and {tensors[name].file} {tensors[name].name} are the same tensor",
                "only one of them can be loaded",
                "remove one of them",
            )
        tensors[name] = info
    return tensors


_FLAGS = "num_hidden_layers, attention_bias, fc_norm, norm_before_fc, qk_norm, embed_from_target"


def _check_tensors(config: PEagleHeadConfig, tensors: Mapping[str, TensorInfo], folder: Path) -> None:
    required, optional = expected_shapes(config), optional_shapes(config)
    for name, info in tensors.items():
        where = f"{folder}: {info.file} {info.name}"
        shapes = required.get(name) or optional.get(name)
        if shapes is None:
            raise PEagleError(
                f"{folder}: {info.file} holds an unknown tensor {info.name} {list(info.shape)}",
                "a tensor that is not used would silently change the drafts",
                f"check config.json ({_FLAGS}), or remove the tensor",
            )
        if info.shape not in shapes:
            raise PEagleError(
                f"{where} has shape {list(info.shape)}",
                f"config.json asks for {' or '.join(str(list(shape)) for shape in shapes)}",
                "correct config.json, or use the weights that belong to it",
            )
        if info.dtype not in _DTYPES.get(name, FLOATS):
            raise PEagleError(
                f"{where} has dtype {info.dtype}",
                f"{' or '.join(_DTYPES.get(name, FLOATS))} is expected; a quantized head cannot be read",
                "use the head's unquantized weights",
            )
    missing = sorted(set(required) - set(tensors))
    if missing:
        raise PEagleError(
            f"{folder}: missing tensor{'s' if len(missing) > 1 else ''} {', '.join(missing[:8])}"
            + (f" and {len(missing) - 8} more" if len(missing) > 8 else ""),
            "every parameter of the drafter must come from the head",
            f"check config.json ({_FLAGS}), or download again",
        )
    if config.draft_vocab_size != config.vocab_size and "d2t" not in tensors:
        raise PEagleError(
            f"{folder}: draft_vocab_size {config.draft_vocab_size} differs from vocab_size {config.vocab_size}, "
            "but there is no tensor d2t",
            "without the map from draft to target ids every draft would be a wrong token",
            "add d2t to the weights, or correct draft_vocab_size",
        )
    if config.tie_word_embeddings and "embed_tokens.weight" in tensors and "lm_head.weight" not in tensors:
        raise PEagleError(
            f"{folder}: tie_word_embeddings is true and there is no lm_head.weight",
            "it is unclear whether the head's own embedding or the target's LM head was trained against",
            "write lm_head.weight into the file and set tie_word_embeddings to false",
        )
