"""What a format has to say: how its config reads, and what its tensors are called.

Canonical tensor names: ``embed_tokens.weight`` or ``embed_mask_row``, ``fc.weight``, ``fc.bias``, ``input_norm.weight``,
``fc_norm.{i}.weight``, ``mask_hidden``, ``layers.{i}.*`` (layer 0 with ``hidden_norm``), ``norm.weight``,
``lm_head.weight``, ``d2t``, ``t2d``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Mapping, Optional

from sgl_peagle.errors import PEagleError
from sgl_peagle.heads.config import PEagleHeadConfig


class HeadFormat(ABC):
    """One on-disk format.

    Attributes:
        name: Short name, as in ``--to``.
        title: What it is called in messages.
        evidence: What in a config.json identifies it, for messages.
        writable: Whether ``sgl-peagle convert`` writes it.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    evidence: ClassVar[str]
    writable: ClassVar[bool] = False

    @abstractmethod
    def parse(self, raw: Mapping[str, Any], source: str, given_mask_id: Optional[int] = None) -> PEagleHeadConfig:
        """Parse a config.json of this format.

        Args:
            raw: The decoded object.
            source: What to call the file in messages.
            given_mask_id: The user's mask token id, for files that do not record one.

        Raises:
            PEagleError: An unknown, missing, malformed, contradictory or unsupported key.
        """

    def canonical(self, file_name: str) -> str:
        """The canonical name of a tensor called ``file_name`` in the files."""
        return file_name

    def file_name(self, canonical: str) -> str:
        """The name under which this format stores a canonical tensor."""
        return canonical

    def write(self, config: PEagleHeadConfig, dtype: str) -> dict[str, Any]:
        """The config.json of a head in this format.

        Args:
            config: What the head is.
            dtype: Its weights' dtype as transformers spells it, for ``torch_dtype``.

        Raises:
            PEagleError: The format has no way to say it.
        """
        raise PEagleError(
            f"the {self.title} format cannot be written", "nothing but its own trainer reads it", "use --to vllm"
        )


def cannot_express(title: str, what: str, instead: str) -> PEagleError:
    """The refusal to write what a format has no word for."""
    return PEagleError(
        f"the {title} format cannot express {what}",
        "its readers would compute something else, or refuse the head",
        instead,
    )
