"""One process per engine, without importing SGLang again for each.

``fork``: this process imports SGLang once, without initialising CUDA, and forks a process per engine. SGLang starts the
scheduler of an engine as a process of its own, after it has asked CUDA for the device's properties, so that one must not
be a fork of the engine's process. It is therefore forked by a server that was forked off earlier, before CUDA: Python's own
``forkserver``, except that the server is a fork of the imported process instead of a fresh interpreter.

``spawn``: a fresh interpreter per engine, and SGLang's own way (spawn) behind it. Slower by two imports per engine, and
the fallback where ``fork`` does not start.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Callable, Optional

#: In the log of an engine: a fork met a CUDA that was already in use.
FORK_SIGNS = ("Cannot re-initialize CUDA", "initialization error", "driver initialization failed", "CUDA_ERROR_NOT_INITIALIZED")


def fork_server() -> None:
    """Make ``multiprocessing`` start processes by a fork server that is a fork of this process.

    SGLang asks for ``spawn``; that request is answered by this server. Call before CUDA is touched. SGLang's newer way to bind a
    scheduler to a NUMA node changes the interpreter that ``spawn`` starts; its older way binds in the scheduler itself.
    """
    os.environ.setdefault("SGLANG_NUMA_BIND_V2", "0")
    from multiprocessing import connection, forkserver, resource_tracker, util

    server = forkserver._forkserver
    resource_tracker.ensure_running()
    with socket.socket(socket.AF_UNIX) as listener:
        address = connection.arbitrary_address("AF_UNIX")
        listener.bind(address)
        listener.listen()
        alive_read, alive_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(alive_write)
                forkserver.main(os.dup(listener.fileno()), alive_read, [])
            except SystemExit:
                pass  # the engine's process is gone
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        os.close(alive_read)
    if not util.is_abstract_socket_namespace(address):
        os.chmod(address, 0o600)
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, alive_write, pid
    set_method = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda *_a, **_k: set_method("forkserver", force=True)
    set_method("forkserver", force=True)


def import_sglang() -> None:
    """Import what an engine and its subprocesses need, with CUDA untouched."""
    import torch

    torch.set_num_threads(1)  # a forked child of a process with OpenMP threads can hang
    import sglang  # noqa: F401
    import sglang.srt.entrypoints.engine  # noqa: F401
    import sglang.srt.managers.detokenizer_manager  # noqa: F401
    import sglang.srt.managers.scheduler  # noqa: F401
    import sglang.srt.models.registry  # noqa: F401
    import sglang.srt.speculative.eagle_worker_v2  # noqa: F401


def use_simulated_acceptance() -> None:
    """Read SGLang's simulation variables again: SGLang did so when it was imported, before this process was forked."""
    from sglang.srt.environ import envs
    from sglang.srt.speculative import spec_utils

    spec_utils.SIMULATE_ACC_LEN = envs.SGLANG_SIMULATE_ACC_LEN.get()
    spec_utils.SIMULATE_ACC_METHOD = envs.SGLANG_SIMULATE_ACC_METHOD.get()
    spec_utils.SIMULATE_ACC_TOKEN_MODE = envs.SGLANG_SIMULATE_ACC_TOKEN_MODE.get()


class EngineProcess:
    """A running engine job in a process group of its own.

    Args:
        job: Path of the job's JSON file; the worker writes ``result`` lines beside it.
        log: Receives its output.
        env: Added to its environment.
        run: With ``fork``: the worker's main function. None: ``spawn``.
    """

    def __init__(self, job: Path, log: Path, env: dict[str, str], run: Optional[Callable[[Path], None]]) -> None:
        self._popen: Optional[subprocess.Popen[bytes]] = None
        self._status: Optional[int] = None
        if run is None:
            worker = [sys.executable, str(Path(__file__).with_name("sweep_engine.py")), str(job)]
            with log.open("wb") as file:
                self._popen = subprocess.Popen(
                    worker, stdout=file, stderr=file, env=os.environ | env, start_new_session=True
                )
            self.pid = self._popen.pid
            return
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._child(job, log, env, run)

    def _child(self, job: Path, log: Path, env: dict[str, str], run: Callable[[Path], None]) -> None:
        code = 1
        try:
            os.setsid()
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(file, 1)
            os.dup2(file, 2)
            os.environ.update(env)
            use_simulated_acceptance()
            fork_server()
            run(job)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def poll(self) -> Optional[int]:
        """Exit status, or None while it runs."""
        if self._popen is not None:
            return self._popen.poll()
        if self._status is None:  # a process is reaped once
            done, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if done else None
        return self._status

    def end(self, patience: float = 15) -> None:
        """Kill what is left of the group, and wait until it is gone (its GPU memory with it)."""
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                return
            self.poll()
            time.sleep(0.1)


def log_tail(log: Path, characters: int = 3000) -> str:
    """The end of a log."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return text[-characters:]


#: Says that another process of the engine failed, not why.
_CONSEQUENCES = ("scheduler died during initialization", "subprocess", "EOFError")


def reason(log: Path) -> str:
    """The line of a log that says best why an engine ended: its last exception that is a cause, or its last line."""
    lines = [line.strip() for line in log_tail(log, 200_000).splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.match(line)]
    causes = [line for line in errors if not any(text in line for text in _CONSEQUENCES)]
    return (causes or errors or lines or ["no output"])[-1][:400]


def explained(failure: str, log: Path) -> str:
    """What went wrong with an engine, and the reason by its log unless it just said nothing."""
    return failure if failure.startswith("no result") else f"{failure}: {reason(log)}"


#: A traceback's last line.
_ERROR = re.compile(r"^[\w.]*(Error|Exception|Timeout|Interrupt)\b.*")


def append_line(path: Path, value: dict[str, Any]) -> None:
    """One JSON line, flushed."""
    with path.open("a") as file:
        file.write(json.dumps(value) + "\n")


def read_lines(path: Path, begin: int) -> tuple[list[dict[str, Any]], int]:
    """Complete JSON lines behind offset ``begin``, and the offset behind them."""
    if not path.exists():
        return [], begin
    with path.open("rb") as file:
        file.seek(begin)
        data = file.read()
    end = data.rfind(b"\n") + 1
    return [json.loads(line) for line in data[:end].splitlines() if line], begin + end
