"""Small runs of the data pipeline on the tiny target, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pair
import pytest

from sgl_peagle.train.crew import Crew
from sgl_peagle.train.regenerate import Run, Settings, target_hash
from sgl_peagle.train.synthesis import Sources

MASK = 3  # of the tiny pair
PLANTED = "Anna had a red drum and gave it to Paul who took it home with him"


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    rows = {
        "train": [{"question": f"Count by {i} from {j}"} for i in (1, 2, 3) for j in (4, 5)] + [{"question": f"Well: {PLANTED}"}],
        "held": [{"turns": [PLANTED, "List more"], "category": "story"}, {"turns": ["Where does Anna live?"], "category": "qa"}],
    }
    for name, content in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    return {name: tmp_path / f"{name}.jsonl" for name in rows}


def make_run(
    out: Path, files: dict[str, Path], backend: str = "transformers", crew: Crew | None = None, **changes: Any
) -> Run:
    settings: dict[str, Any] = {
        "target": target_hash(pair.TARGET), "files": {}, "backend": backend, "long_code": 0, "max_new_tokens": 24,
        "mask_token_id": MASK, "shard": 4, "tune": 0,
    }  # fmt: skip
    sources = Sources(files["train"], (), (files["held"],))
    return Run(out, pair.TARGET, Settings(**settings | changes), sources, crew=crew)
