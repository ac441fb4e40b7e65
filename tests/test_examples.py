"""The examples run as written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *args], capture_output=True, text=True, timeout=400,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_offline_engine() -> None:
    out = run("offline_engine.py", "--max-new-tokens", "24")
    lengths = [float(line.rsplit(" ", 1)[1]) for line in out.splitlines() if "acceptance length" in line]
    assert len(lengths) == 3 and max(lengths) > 1.3, out


@pytest.mark.slow
def test_server_and_openai_client() -> None:
    out = run("openai_client.py", "--max-tokens", "24")
    assert "> monday: anna" in out and "pieces" in out
