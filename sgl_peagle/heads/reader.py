"""The strict reader of a head folder: every tensor accounted for, every parameter present, or an error.

Only the headers of the safetensors files are read here (names, shapes, dtypes); SGLang's own loader reads the
data later, and :meth:`Head.canonical` tells the model what each tensor is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping, Optional

from safetensors import SafetensorError, safe_open

from sgl_peagle.errors import PEagleError
from sgl_peagle.heads.config import PEagleHeadConfig, parse_head_config
from sgl_peagle.heads.names import canonical_name, expected_shapes, optional_shapes


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor is: file name, name in the file, shape, safetensors dtype name."""

    file: str
    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Head:
    """A head that passed every check which needs no tensor data.

    Attributes:
        folder: The local folder.
        config: The parsed config.
        tensors: Canonical tensor name -> where it is.
    """

    folder: Path
    config: PEagleHeadConfig
    tensors: Mapping[str, TensorInfo]

    def has(self, canonical: str) -> bool:
        """Whether the head brings the tensor of this canonical name."""
        return canonical in self.tensors


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
        patterns = ["*.json", "*.safetensors"]
        return Path(snapshot_download(path_or_id, revision=revision, allow_patterns=patterns))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise PEagleError(
            f"no P-EAGLE head at {path_or_id!r}",
            f"it is not a local folder, and the hub says: {str(error).splitlines()[0]}",
            "check the path or repository id, the network, and HF_HUB_OFFLINE",
        ) from error


def read_head(path_or_id: str, revision: Optional[str] = None) -> Head:
    """Read and check a head in the vLLM/Amazon format.

    Raises:
        PEagleError: Naming the file, the key or tensor, and what to do.
    """
    folder = resolve_folder(path_or_id, revision)
    config_path = folder / "config.json"
    if not config_path.is_file():
        raise PEagleError(
            f"{config_path} does not exist", "a head is a folder with a config.json", "check the path of the head"
        )
    try:
        raw: dict[str, Any] = json.loads(config_path.read_text())
    except json.JSONDecodeError as error:
        raise PEagleError(f"{config_path} is not JSON: {error}", "it cannot be read", "download it again") from error
    found = _tensor_headers(folder)
    tensors = _by_canonical_name(found, folder)
    if "mask_hidden" not in tensors:
        raise PEagleError(
            f"{folder}: no tensor mask_hidden",
            "without its learned h_shared a head cannot draft in parallel; this is a plain EAGLE-3 head",
            "serve it with --speculative-algorithm EAGLE3, or use a P-EAGLE head",
        )
    config = parse_head_config(raw, str(config_path))
    _check_shapes(config, tensors, folder)
    return Head(folder, config, tensors)


def _tensor_headers(folder: Path) -> list[TensorInfo]:
    files = _weight_files(folder)
    infos: list[TensorInfo] = []
    for file in files:
        try:
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():
                    view = handle.get_slice(name)
                    infos.append(TensorInfo(file.name, name, tuple(view.get_shape()), view.get_dtype()))
        except (SafetensorError, OSError) as error:
            raise PEagleError(
                f"{file} cannot be read: {error}",
                "the file is truncated or is not a safetensors file",
                "download or copy the head again",
            ) from error
    return infos


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if any(Path(name).name != name for name in names):
            raise PEagleError(
                f"{index} names a file outside its folder", "only files of the head are read", "correct the index"
            )
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise PEagleError(
                f"{folder}: {', '.join(missing)} from {index.name} is missing", "its tensors are part of the head",
                "download the head again",
            )  # fmt: skip
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = sorted(p.name for p in folder.glob("*.bin")) + sorted(p.name for p in folder.glob("*.pt*"))
        raise PEagleError(
            f"{folder} holds no safetensors file" + (f", only {', '.join(pickles)}" if pickles else ""),
            "pickled weights can run code when they are loaded, so only safetensors is read",
            "convert the weights to safetensors, or check the path",
        )
    return files


def _by_canonical_name(found: list[TensorInfo], folder: Path) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for info in found:
        name = canonical_name(info.name)
        if name in tensors:
            raise PEagleError(
                f"{folder}: {info.file} {info.name} and {tensors[name].file} {tensors[name].name} are the same tensor",
                "only one of them can be loaded",
                "remove one of them",
            )
        tensors[name] = info
    return tensors


def _check_shapes(config: PEagleHeadConfig, tensors: Mapping[str, TensorInfo], folder: Path) -> None:
    required, optional = expected_shapes(config), optional_shapes(config)
    for name, info in tensors.items():
        shapes = required.get(name) or optional.get(name)
        if shapes is None:
            raise PEagleError(
                f"{folder}: {info.file} holds an unknown tensor {info.name} {list(info.shape)}",
                "a tensor that is not used would silently change the drafts",
                "check config.json (num_hidden_layers, attention_bias, fc_norm, norm_before_fc), or remove the tensor",
            )
        if info.shape not in shapes:
            raise PEagleError(
                f"{folder}: {info.file} {info.name} has shape {list(info.shape)}",
                f"config.json asks for {' or '.join(str(list(shape)) for shape in shapes)}",
                "correct config.json, or use the weights that belong to it",
            )
    missing = sorted(set(required) - set(tensors))
    if missing:
        raise PEagleError(
            f"{folder}: missing tensor{'s' if len(missing) > 1 else ''} {', '.join(missing[:8])}"
            + (f" and {len(missing) - 8} more" if len(missing) > 8 else ""),
            "every parameter of the drafter must come from the head",
            "check config.json (num_hidden_layers, attention_bias, fc_norm, norm_before_fc), or download again",
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
