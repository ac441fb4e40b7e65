"""What a benchmark result says about where it was measured, and writing it."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any, Iterable, Optional

from sgl_peagle.errors import PEagleError

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


def head_hashes(heads: Iterable[tuple[str, Path]]) -> dict[str, str]:
    """SHA-256 of the weights by ``"method folder"``, for (method, head) pairs: a folder's name alone says little.

    Of the file, or of the files' hashes where there are several.

    Raises:
        PEagleError: A folder without safetensors weights.
    """
    from sgl_peagle.heads.reader import weight_files
    from sgl_peagle.train.regenerate import file_hash

    found = {}
    for method, head in heads:
        hashes = [file_hash(file) for file in weight_files(head)]
        found[f"{method} {head.name}"] = hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
    return found


def refuse_other_settings(file: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Results that go on must be results of the same things.

    Raises:
        PEagleError: A setting that both name differs (of dicts: an entry that both have), or the file lacks it.
    """
    for name, value in new.items():
        before = old.get(name)
        if isinstance(value, dict) and isinstance(before, dict):
            same = all(before.get(key, item) == item for key, item in value.items())
        else:
            same = name in old and before == value
        if not same:
            raise PEagleError(
                f"{file} was measured with {name} {before!r}, not {value!r}",
                "its cells would be taken for results of this run",
                "give the same settings, or another --out",
            )


def write_report(file: Path, report: dict[str, Any]) -> None:
    """Write a result file whole or not at all; an earlier one of the same run is replaced."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(file.name + ".part")
    partial.write_text(json.dumps(report, indent=1) + "\n")
    partial.replace(file)
