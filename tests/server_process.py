"""A real server process: started, waited for, ended. For the tests and for ``bench/serve.py``."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Iterator, Mapping, Sequence


class ServerFailed(RuntimeError):
    """The server ended early or never answered; the message ends with its log."""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextlib.contextmanager
def serving(
    command: Sequence[str], port: int, log: Path, env: Mapping[str, str], timeout: float = 300
) -> Iterator[str]:
    """The base URL of a server that answers on ``port``; it is ended afterwards, with all its processes.

    Args:
        command: Its command line.
        port: Where it listens.
        log: File for what it prints.
        env: Variables beside this process's own.
        timeout: Seconds until it must answer.

    Raises:
        ServerFailed: It does not.
    """
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, env={**os.environ, **env}, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + timeout
        while not _healthy(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise ServerFailed(f"no server on port {port}:\n{log.read_text(errors='replace')[-5000:]}")
            time.sleep(0.3)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False
