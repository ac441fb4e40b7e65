"""A real ``python -m sglang.launch_server`` process for tests."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Iterator

import requests
from pair import HEAD, TARGET

ENV = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
ARGS = ["--device", "cpu", "--dtype", "float32", "--max-total-tokens", "8192", "--context-length", "512",
        "--max-running-requests", "16", "--disable-cuda-graph", "--skip-server-warmup", "--enable-metrics",
        "--constrained-json-disable-any-whitespace", "--log-level", "warning"]  # fmt: skip
PEAGLE = ["--speculative-algorithm", "PEAGLE", "--speculative-draft-model-path", str(HEAD)]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def command(port: int, *extra: str) -> list[str]:
    """The command line of a server of the tiny target on ``port``."""
    return [sys.executable, "-m", "sglang.launch_server", "--model-path", str(TARGET), "--port", str(port), *ARGS, *extra]


@contextlib.contextmanager
def running(log_path: Path, *extra: str) -> Iterator[str]:
    """The base URL of a server that answers; it is ended afterwards."""
    port = free_port()
    with log_path.open("w") as log:
        process = subprocess.Popen(
            command(port, *extra), env=os.environ | ENV, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        url = f"http://127.0.0.1:{port}"
        try:
            deadline = time.monotonic() + 300
            while not _healthy(url):
                assert process.poll() is None and time.monotonic() < deadline, log_path.read_text()[-5000:]
                time.sleep(0.3)
            yield url
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 15)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)


def _healthy(url: str) -> bool:
    try:
        return requests.get(url + "/health", timeout=5).status_code == 200
    except requests.ConnectionError:
        return False
