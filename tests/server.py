"""A real ``python -m sglang.launch_server`` process for tests."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Iterator

from pair import HEAD, TARGET
from server_process import free_port, serving

ENV = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
ARGS = ["--device", "cpu", "--dtype", "float32", "--max-total-tokens", "8192", "--context-length", "512",
        "--max-running-requests", "16", "--disable-cuda-graph", "--skip-server-warmup", "--enable-metrics",
        "--constrained-json-disable-any-whitespace", "--log-level", "warning"]  # fmt: skip
PEAGLE = ["--speculative-algorithm", "PEAGLE", "--speculative-draft-model-path", str(HEAD)]


def command(port: int, *extra: str) -> list[str]:
    """The command line of a server of the tiny target on ``port``."""
    return [sys.executable, "-m", "sglang.launch_server", "--model-path", str(TARGET), "--port", str(port), *ARGS, *extra]


@contextlib.contextmanager
def running(log_path: Path, *extra: str) -> Iterator[str]:
    """The base URL of a server that answers; it is ended afterwards."""
    port = free_port()
    with serving(command(port, *extra), port, log_path, ENV) as url:
        yield url
