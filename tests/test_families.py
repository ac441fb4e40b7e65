"""Targets of other families on the CPU engine: experts, sliding windows with sinks, query-key norms."""

from __future__ import annotations

from pathlib import Path

import families
import pytest
from test_gpu import check_family


@pytest.mark.parametrize("family", families.FAMILIES)
def test_target_families_on_the_cpu(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_family(family, tmp_path, monkeypatch, {}, {"max_running_requests": 12})
