"""NeMo Automodel's ``LlamaEagle3DraftModel`` with ``parallel_drafting``: body under ``model.``, the rest at top level."""

from __future__ import annotations

from typing import Any, Mapping, Optional

from sgl_peagle.errors import PEagleError
from sgl_peagle.heads.config import PEagleHeadConfig
from sgl_peagle.heads.formats.base import HeadFormat
from sgl_peagle.heads.formats.vllm import parse_eagle3_like

ARCHITECTURE = "LlamaEagle3DraftModel"


class NemoFormat(HeadFormat):
    """Heads as NeMo Automodel's P-EAGLE recipe saves them; ``num_depths`` is the K trained."""

    name, title = "nemo", "NeMo Automodel"
    evidence = f'architectures ["{ARCHITECTURE}"]'

    def parse(self, raw: Mapping[str, Any], source: str, given_mask_id: Optional[int] = None) -> PEagleHeadConfig:
        if raw.get("parallel_drafting") is not True:
            raise PEagleError(
                f"{source}: parallel_drafting is {raw.get('parallel_drafting')!r}",
                "NeMo uses the same architecture name for EAGLE-3 heads, which draft one token at a time",
                "serve an EAGLE-3 head with --speculative-algorithm EAGLE3; a P-EAGLE head has parallel_drafting true",
            )
        return parse_eagle3_like(raw, source, given_mask_id, top_counts=None)

    def canonical(self, file_name: str) -> str:
        return file_name.removeprefix("model.")
