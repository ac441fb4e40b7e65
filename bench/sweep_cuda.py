"""Import SGLang without initialising CUDA, so that forks of the importing process can use the GPU.

SGLang and its kernel packages ask torch for the device's properties while they are imported (to choose a library, for
one), and that initialises CUDA. Here the answers come from another process until CUDA is in use.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from types import SimpleNamespace
from typing import Any, Callable, Optional

_QUERY = """
import json, torch
p = torch.cuda.get_device_properties(0)
values = {n: getattr(p, n) for n in dir(p) if not n.startswith("_")}
values = {n: v if isinstance(v, (int, float, bool, str)) else str(v) for n, v in values.items() if not callable(v)}
print("PROPERTIES " + json.dumps(values))
"""


def device_properties() -> dict[str, Any]:
    """``torch.cuda.get_device_properties(0)`` as another process sees it.

    Raises:
        RuntimeError: There is no usable GPU.
    """
    result = subprocess.run([sys.executable, "-c", _QUERY], capture_output=True, text=True, timeout=180)
    for line in result.stdout.splitlines():
        if line.startswith("PROPERTIES "):
            return json.loads(line.removeprefix("PROPERTIES "))
    raise RuntimeError(f"torch sees no GPU: {result.stderr.strip().splitlines()[-1:]}")


def answer_for_torch(properties: dict[str, Any]) -> Callable[[], Optional[str]]:
    """Answer torch's questions about the first GPU from ``properties`` wherever CUDA is not in use yet.

    Returns:
        A function that says where CUDA was initialised nevertheless (a stack), or None.
    """
    import torch

    major, minor = properties["major"], properties["minor"]
    # flashinfer's CuTe kernels ask for it while they are imported, and would initialise the driver to find out.
    os.environ.setdefault("CUTE_DSL_ARCH", f"sm_{major}{minor}" + ("a" if major >= 9 else ""))
    cuda, stacks = torch.cuda, []
    known = SimpleNamespace(**properties)
    answers: dict[str, Any] = {
        "current_device": 0,
        "get_device_properties": known,
        "get_device_capability": (major, minor),
        "get_device_name": properties["name"],
    }

    def replaced(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def answer(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) if cuda.is_initialized() else answers[name]

        return answer

    for name in answers:
        setattr(cuda, name, replaced(name, getattr(cuda, name)))
    lazy_init, owner = cuda._lazy_init, os.getpid()

    def watched() -> None:
        if os.getpid() == owner and not cuda.is_initialized():
            stacks.append("".join(traceback.format_stack(limit=12)))
        lazy_init()

    cuda._lazy_init = watched
    return lambda: stacks[0] if stacks else None


def fork_can_use_cuda(timeout: float = 60) -> bool:
    """Whether a fork of this process can compute on the GPU."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            import torch

            code = 0 if int(torch.ones(4, device="cuda").sum()) == 4 else 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.05)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return False
