"""bench/serve.py: a real server, measured by SGLang's benchmark client."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pair
from server import ENV

SCRIPT = Path(__file__).parent.parent / "bench" / "serve.py"


def serve(out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--target", str(pair.TARGET), "--out", str(out), "--no-baseline", "--k", "3"]
    command += ["--concurrency", "2", "--prompts-per-cell", "4", "--input-tokens", "24", "--output-tokens", "64"]
    return subprocess.run([*command, *more], env=os.environ | ENV, capture_output=True, text=True, timeout=280)


def test_client_measures_a_peagle_server(tmp_path: Path) -> None:
    out = tmp_path / "serve.json"
    small = ["--server-arg=--context-length", "--server-arg=512"]
    done = serve(out, "--peagle", str(pair.HEAD), *small)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    (cell,) = report["cells"]
    assert (cell["method"], cell["k"], cell["concurrency"], cell["client"]["completed"]) == ("peagle", 3, 2, 4)
    assert cell["output_tokens_per_s"] > 0 and cell["acceptance_length"] > 1
    assert cell["client"]["total_output_tokens"] == 4 * 64 and list(report["heads_sha256"]) == ["peagle head"]
    assert str(tmp_path) not in out.read_text() and not report["failed"]
    assert serve(out, "--peagle", str(pair.HEAD), *small).stdout == "", "a finished cell was measured again"


def test_failed_server_is_recorded(tmp_path: Path) -> None:
    out = tmp_path / "serve.json"
    done = serve(out, "--peagle", str(tmp_path / "nothing"))
    assert done.returncode == 3 and "peagle K=3: FAILED" in done.stdout
    report = json.loads(out.read_text())
    assert list(report["failed"]) == ["peagle K=3"] and report["cells"] == []
