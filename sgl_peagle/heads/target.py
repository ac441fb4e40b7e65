"""What a head must know about its target: sizes, and token ids that already mean something."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Mapping, Optional

from sgl_peagle.errors import PEagleError
from sgl_peagle.heads.keys import read_json_object
from sgl_peagle.heads.safetensors_io import TensorInfo, read_headers

#: Files of a target that are read besides its embedding.
_SMALL_FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
                "model.safetensors.index.json"]  # fmt: skip
_TOKENIZER_JSON_LIMIT = 256 << 20


@dataclass(frozen=True)
class TargetInfo:
    """A target model.

    Attributes:
        name: As the user gave it.
        architecture: First entry of ``architectures``.
        num_layers: L.
        max_position_embeddings: Longest context, None when unknown.
        used_ids: Token id -> what it is used for (bos, eos, unk, a token of the chat template).
    """

    name: str
    architecture: str
    hidden_size: int
    vocab_size: int
    num_layers: int
    max_position_embeddings: Optional[int] = None
    used_ids: Mapping[int, str] = field(default_factory=dict)


def target_folder(path_or_id: str, revision: Optional[str] = None, *, local_only: bool = False) -> Path:
    """The folder with a target's small files; from the hub where it is no local folder.

    Raises:
        PEagleError: It cannot be had.
    """
    folder = Path(path_or_id).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(path_or_id, revision=revision, allow_patterns=_SMALL_FILES, local_files_only=local_only)
        )
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise PEagleError(
            f"no target at {path_or_id!r}",
            f"it is not a local folder, and the hub says: {str(error).splitlines()[0]}",
            "check the path or repository id, the network, and HF_HUB_OFFLINE",
        ) from error


def read_target(path_or_id: str, revision: Optional[str] = None) -> TargetInfo:
    """Read a target's config and tokenizer files (no weights).

    Raises:
        PEagleError: The target has no readable config.
    """
    folder = target_folder(path_or_id, revision)
    raw = read_json_object(folder / "config.json")
    text = raw.get("text_config") if isinstance(raw.get("text_config"), dict) else raw
    sizes = [text.get(key) for key in ("hidden_size", "vocab_size", "num_hidden_layers")]
    if any(type(size) is not int or size < 1 for size in sizes):
        raise PEagleError(
            f"{folder / 'config.json'} lacks hidden_size, vocab_size or num_hidden_layers",
            "the head is compared with them",
            "give the target model's folder or hub id",
        )
    architectures = raw.get("architectures") or [""]
    limit = text.get("max_position_embeddings")
    return TargetInfo(
        path_or_id, str(architectures[0]), *sizes, limit if type(limit) is int else None, used_token_ids(folder)
    )


def used_token_ids(folder: Path) -> dict[int, str]:
    """Token ids that mean something to the target: id -> what.

    The padding token is left out: it never reaches the model, and heads are trained with it as their MASK.
    """
    used: dict[int, str] = {}
    for name in ("config.json", "generation_config.json"):
        raw = _optional(folder / name)
        for key in ("bos_token_id", "eos_token_id"):
            value = raw.get(key)
            for token in value if isinstance(value, list) else [value]:
                if type(token) is int:
                    used.setdefault(token, key)
    ids = _added_tokens(folder)
    settings = _optional(folder / "tokenizer_config.json")
    for key in ("bos_token", "eos_token", "unk_token"):
        value = settings.get(key)
        content = value.get("content") if isinstance(value, dict) else value
        if content in ids:
            used.setdefault(ids[content], key)
    template = _chat_template(folder, settings)
    for content, token in ids.items():
        if len(content) > 2 and content in template:
            used.setdefault(token, f"chat template token {content!r}")
    return used


def _optional(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _added_tokens(folder: Path) -> dict[str, int]:
    """Content -> id of the added tokens (special ones and others)."""
    import json

    path = folder / "tokenizer.json"
    if not path.is_file() or path.stat().st_size > _TOKENIZER_JSON_LIMIT:
        return {}
    try:
        entries = json.loads(path.read_text(encoding="utf-8")).get("added_tokens") or []
        return {entry["content"]: entry["id"] for entry in entries}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PEagleError(f"{path} cannot be read: {error}", "its special tokens are needed", "download it again") from error


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template") or ""
    if isinstance(template, list):
        return "\n".join(str(entry.get("template", "")) for entry in template if isinstance(entry, dict))
    return str(template)


def target_embedding(path_or_id: str, revision: Optional[str] = None) -> tuple[Path, TensorInfo]:
    """Where a target's token embedding is: folder and tensor. Downloads the one file that holds it.

    Raises:
        PEagleError: It cannot be found, or there are several candidates.
    """
    folder = target_folder(path_or_id, revision)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json_object(index).get("weight_map") or {}
        files = sorted({f for name, f in weight_map.items() if name.endswith("embed_tokens.weight")})
    else:
        files = ["model.safetensors"]
    found = [info for name in files for info in read_headers(_weight_file(folder, name, path_or_id, revision))]
    found = [info for info in found if info.name.endswith("embed_tokens.weight")]
    if len(found) != 1:
        raise PEagleError(
            f"{path_or_id}: {len(found)} tensors are called embed_tokens.weight",
            "the target's embedding is needed, and only one can be it",
            "give a text model in safetensors format as --target",
        )
    return folder, found[0]


def _weight_file(folder: Path, name: str, path_or_id: str, revision: Optional[str]) -> Path:
    if Path(name).name != name:
        raise PEagleError(f"{folder} names a file outside itself: {name}", "only its own files are read", "correct the index")
    if not (folder / name).is_file() and not Path(path_or_id).expanduser().is_dir():
        from huggingface_hub import hf_hub_download

        try:
            return Path(hf_hub_download(path_or_id, name, revision=revision))
        except Exception as error:  # the hub's many ways to fail, all of them the same to the user
            raise PEagleError(
                f"{path_or_id}: {name} cannot be had", f"the hub says: {error}", "check the network and the id"
            ) from error
    if not (folder / name).is_file():
        raise PEagleError(f"{folder / name} does not exist", "it holds the target's embedding", "download the target again")
    return folder / name
