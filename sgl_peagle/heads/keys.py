"""Reading a JSON config so that every key is accounted for: used, irrelevant with a reason, or refused by name."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, Mapping, Optional

from sgl_peagle.errors import PEagleError
from sgl_peagle.heads.config import IGNORE_KEYS_ENV

#: A head's config.json has a few kilobytes and an index a few hundred; more is not a head's.
_LARGEST_JSON = 16 << 20

#: Known keys that cannot change a draft, and why. Every format accepts them.
IRRELEVANT = {
    key: reason
    for reason, keys in {
        "text generation belongs to the target": "bos_token_id eos_token_id pad_token_id use_cache "
        "generation_config max_length min_length do_sample temperature top_k top_p",
        "the dtype is the server's --dtype": "torch_dtype dtype",
        "provenance": "_name_or_path transformers_version name_or_path tokenizer_class training_commit data_manifest training",
        "names Python code, which is never run": "auto_map",
        "training only": "initializer_range attention_dropout pretraining_tp hidden_dropout gradient_checkpointing "
        "cod_ratio cod_floor down_sample_ratio down_sample_ratio_min embed_requires_grad",
        "no sliding window is used without layer_types or use_sliding_window": "max_window_layers",
        "feeds an autoregressive drafter's next step, which a parallel drafter does not have": "norm_output",
        "transformers' own output switches": "return_dict output_hidden_states output_attentions "
        "chunk_size_feed_forward is_encoder_decoder id2label label2id problem_type is_decoder "
        "add_cross_attention cross_attention_hidden_size torchscript",
    }.items()
    for key in keys.split()
}


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        PEagleError: The file is missing, too large, no JSON, no object, or names a key twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice = sorted({key for key, _ in pairs if sum(key == other for other, _ in pairs) > 1})
            raise PEagleError(
                f"{path}: {', '.join(twice)} stands there twice", "only one of the values can hold", "remove one"
            )
        return found

    if not path.is_file():
        raise PEagleError(f"{path} does not exist", "a head is a folder with a config.json", "check the path of the head")
    if path.stat().st_size > _LARGEST_JSON:
        raise PEagleError(
            f"{path} has {path.stat().st_size} bytes",
            f"a head's JSON files have kilobytes; more than {_LARGEST_JSON >> 20} MiB is not read",
            "check that the file belongs to the head",
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PEagleError(f"{path} is not JSON: {error}", "it cannot be read", "download it again") from error
    if not isinstance(raw, dict):
        raise PEagleError(f"{path} holds a JSON {type(raw).__name__}", "an object is needed", "download it again")
    return raw


class Keys:
    """The keys of one JSON object; what nobody took is an error in the end.

    Args:
        raw: The object.
        source: What to call it in messages.
    """

    def __init__(self, raw: Mapping[str, Any], source: str) -> None:
        self.raw, self.source, self._taken = raw, source, set(IRRELEVANT)

    def take(self, key: str, default: Any = None) -> Any:
        """The value of a key; the default where it is missing or null."""
        self._taken.add(key)
        value = self.raw.get(key)
        return default if value is None else value

    def skip(self, *keys: str) -> None:
        """Account for keys that need not be read (the caller says why)."""
        self._taken.update(keys)

    def integer(self, key: str, default: Optional[int] = None, *, least: int = 1) -> Optional[int]:
        """An integer of at least ``least``; the default where it is missing."""
        return self._checked(key, default, lambda v: type(v) is int and v >= least, f"an integer of at least {least}")

    def required(self, key: str) -> int:
        """A positive integer that must be there."""
        if self.raw.get(key) is None:
            raise PEagleError(
                f"{self.source}: {key} is missing",
                "the drafter cannot be built without it",
                f"add {key} as the head was trained with, or download the head again",
            )
        return self.integer(key)  # type: ignore[return-value]

    def number(self, key: str, default: float) -> float:
        """A positive finite number."""

        def good(value: Any) -> bool:
            return type(value) in (int, float) and 0 < value < math.inf

        return float(self._checked(key, default, good, "a positive number"))

    def flag(self, key: str, default: bool = False) -> bool:
        """A boolean."""
        return self._checked(key, default, lambda v: type(v) is bool, "true or false")

    def text(self, key: str, default: Optional[str] = None) -> Optional[str]:
        """A string."""
        return self._checked(key, default, lambda v: type(v) is str, "a string")

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings; empty where it is missing."""
        found = self._checked(key, [], lambda v: type(v) is list and all(type(i) is str for i in v), "a list of strings")
        return tuple(found)

    def integers(self, key: str) -> Optional[tuple[int, ...]]:
        """A list of integers, or None."""
        found = self._checked(
            key, None, lambda v: type(v) is list and all(type(i) is int for i in v), "a list of integers"
        )
        return None if found is None else tuple(found)

    def nested(self, key: str) -> Optional["Keys"]:
        """A nested object, or None."""
        found = self._checked(key, None, lambda v: isinstance(v, dict), "an object")
        return None if found is None else Keys(found, f"{self.source}, {key}")

    def _checked(self, key: str, default: Any, good: Any, kind: str) -> Any:
        value = self.take(key)
        if value is None:
            return default
        if not good(value):
            raise PEagleError(f"{self.source}: {key} is {_short(value)}", f"it must be {kind}", f"correct {key}")
        return value

    def refuse(self, what: str, why: str, fix: str) -> None:
        """Raise a PEagleError about this object."""
        raise PEagleError(f"{self.source}: {what}", why, fix)

    def finish(self) -> None:
        """Refuse every key that was not taken.

        Raises:
            PEagleError: Naming the keys.
        """
        ignored = {key.strip() for key in os.environ.get(IGNORE_KEYS_ENV, "").split(",")}
        unknown = sorted(set(self.raw) - self._taken - ignored)
        if unknown:
            self.refuse(
                f"unknown key{'s' if len(unknown) > 1 else ''} {', '.join(unknown)}",
                "a key that is not understood may change what the head computes, which would only show as bad drafts",
                f"remove the key, or set {IGNORE_KEYS_ENV}={','.join(unknown)} if it cannot matter",
            )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
