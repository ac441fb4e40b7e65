"""What a benchmark result says about where it was measured, and writing it."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
from pathlib import Path
from typing import Any, Optional

ROOT = Path(__file__).resolve().parent.parent

#: Names the commit where the checkout was copied without its history.
COMMIT_ENV = "SGL_PEAGLE_COMMIT"


def _output(*command: str) -> str:
    try:
        return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL, cwd=ROOT).strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def commit() -> str:
    """The commit of this checkout (``+`` if files differ from it), or ``SGL_PEAGLE_COMMIT``, or ``unknown``."""
    given = os.environ.get(COMMIT_ENV, "")
    if given:
        return given
    head = _output("git", "rev-parse", "HEAD")
    if not head:
        return "unknown"
    return head + ("+" if _output("git", "status", "--porcelain", "--untracked-files=no") else "")


def environment(gpu: Optional[str] = None) -> dict[str, str]:
    """GPU, driver, versions, commit and date. Never initialises CUDA, so a process that forks may call it.

    Args:
        gpu: Index of the GPU for ``nvidia-smi``; the first one by default.
    """
    import torch
    from importlib import metadata

    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "-i", gpu or "0"]
    name, _, driver = _output(*query).partition(", ")

    def version(distribution: str) -> str:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            return "unknown"

    return {
        "gpu": name or "none",
        "driver": driver,
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        "triton": version("triton"),
        "sglang": version("sglang"),
        "sgl_peagle_commit": commit(),
        "cpu_count": str(os.cpu_count()),
        "date": datetime.date.today().isoformat(),
    }


def write_report(file: Path, report: dict[str, Any]) -> None:
    """Write a result file whole or not at all; an earlier one of the same run is replaced."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(file.name + ".part")
    partial.write_text(json.dumps(report, indent=1) + "\n")
    partial.replace(file)
