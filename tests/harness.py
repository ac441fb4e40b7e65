"""Real SGLang engines for tests: import SGLang once, fork one process per engine.

Importing SGLang takes most of a minute on a small machine, starting an engine of a tiny model two seconds. So the
test process imports everything, and every case forks: the child starts ``sgl.Engine`` (whose own subprocesses are
forks too), runs a function on it, and sends the result back through a pipe.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, Callable, TypeVar

Result = TypeVar("Result")

ENGINE_DEFAULTS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "disable_cuda_graph": True,
    "max_total_tokens": 4096,
    "max_running_requests": 8,
    "context_length": 512,
    "skip_server_warmup": True,
    "random_seed": 0,
    "watchdog_timeout": 600,
    "log_level": "warning",
}


#: How an engine starts its subprocesses. ``spawn`` (SGLang's own way) imports everything again in each.
START_METHOD = "fork"


@functools.lru_cache(maxsize=1)
def import_sglang() -> None:
    """Import all that an engine and its subprocesses need, and make them start by ``START_METHOD``."""
    import conftest  # noqa: F401  (sets the environment, also outside pytest)
    import torch


    torch.set_num_threads(1)  # a forked child of a process with OpenMP threads can hang
    set_method = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda *_a, **_k: set_method(START_METHOD, force=True)
    import sglang  # noqa: F401
    import sglang.srt.entrypoints.engine  # noqa: F401
    import sglang.srt.managers.detokenizer_manager  # noqa: F401
    import sglang.srt.managers.scheduler  # noqa: F401
    import sglang.srt.models.llama  # noqa: F401
    import sglang.srt.models.registry  # noqa: F401
    import sglang.srt.speculative.eagle_worker_v2  # noqa: F401

    import sgl_peagle.plugin  # noqa: F401


class EngineFailed(RuntimeError):
    """The forked case raised, or did not finish in time; the message ends with its log."""


def in_fork(run: Callable[[], Result], *, env: dict[str, str] | None = None, timeout: float = 180) -> Result:
    """Run a function in a forked process group and return its (picklable) result.

    Raises:
        EngineFailed: With the child's traceback or the end of its log.
    """
    import_sglang()
    with tempfile.TemporaryDirectory() as scratch:
        result_file, log_file = Path(scratch, "result"), Path(scratch, "log")
        pid = os.fork()
        if pid == 0:
            _child(run, env or {}, result_file, log_file)
        status = _wait(pid, timeout)
        log = log_file.read_text(errors="replace") if log_file.exists() else ""
        if not result_file.exists():
            raise EngineFailed(f"no result (status {status}):\n{log[-6000:]}")
        ok, value = pickle.loads(result_file.read_bytes())
        if not ok:
            raise EngineFailed(f"{value}\n--- log ---\n{log[-6000:]}")
        return value


def _child(run: Callable[[], Any], env: dict[str, str], result_file: Path, log_file: Path) -> None:
    os.setsid()
    log = os.open(log_file, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(env)
    try:
        outcome: tuple[bool, Any] = (True, run())
    except BaseException:
        outcome = (False, traceback.format_exc())
    partial = result_file.with_suffix(".part")
    partial.write_bytes(pickle.dumps(outcome))
    partial.rename(result_file)
    os._exit(0)


def _wait(pid: int, timeout: float) -> int | None:
    deadline, status = time.monotonic() + timeout, None
    while time.monotonic() < deadline and status is None:
        done, code = os.waitpid(pid, os.WNOHANG)
        if done:
            status = code
        else:
            time.sleep(0.05)
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    if status is None:
        os.waitpid(pid, 0)
    return status


def with_engine(
    use: Callable[[Any], Result],
    *,
    env: dict[str, str] | None = None,
    timeout: float = 180,
    **engine_kwargs: Any,
) -> Result:
    """Start an engine in a fork, call ``use(engine)`` there, return what it returns."""

    def run() -> Result:
        import sglang

        engine = sglang.Engine(**{**ENGINE_DEFAULTS, **engine_kwargs})
        try:
            return use(engine)
        finally:
            engine.shutdown()

    return in_fork(run, env=env, timeout=timeout)


def flush(engine: Any) -> None:
    """Empty the radix cache; SGLang refuses while the last request is still being wound up, so ask until it agrees."""
    deadline = time.monotonic() + 20
    while not engine.flush_cache().success:
        assert time.monotonic() < deadline, "the engine never became idle"
        time.sleep(0.02)
