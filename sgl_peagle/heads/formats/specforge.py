"""SpecForge's ``PEagleDraftModel``: names without prefix, ``layers.0``, and no mask token id in the config."""

from __future__ import annotations

from typing import Any, Mapping, Optional

from sgl_peagle.heads.config import PEagleHeadConfig
from sgl_peagle.heads.formats.base import HeadFormat
from sgl_peagle.heads.formats.vllm import parse_eagle3_like

ARCHITECTURE = "PEagleDraftModel"


class SpecForgeFormat(HeadFormat):
    """Heads as SpecForge saves them. The user must give the mask token id."""

    name, title = "specforge", "SpecForge"
    evidence = f'architectures ["{ARCHITECTURE}"] without speculators_model_type'

    def parse(self, raw: Mapping[str, Any], source: str, given_mask_id: Optional[int] = None) -> PEagleHeadConfig:
        return parse_eagle3_like(raw, source, given_mask_id, top_counts=None)
