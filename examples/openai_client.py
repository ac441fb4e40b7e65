"""PEAGLE behind SGLang's OpenAI-compatible server: starts one, streams a completion from it, stops it.

    python examples/openai_client.py                               # the tiny pair of this repository, any machine
    python examples/openai_client.py --target T --head H "prompt"  # your models, on a CUDA GPU
    python examples/openai_client.py --url http://host:30000 "prompt"  # a server that runs already
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Iterator

from openai import OpenAI

PAIR = Path(__file__).parent / "tiny_pair"
CPU = ["--device", "cpu", "--dtype", "float32", "--disable-cuda-graph", "--max-total-tokens", "4096"]


@contextlib.contextmanager
def server(target: str, head: str, k: int) -> Iterator[str]:
    """The URL of a server that answers; it is stopped afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    on_gpu = os.path.exists("/dev/nvidia0")
    command = [
        sys.executable, "-m", "sglang.launch_server", "--model-path", target, "--port", str(port), "--log-level", "error",
        "--speculative-algorithm", "PEAGLE", "--speculative-draft-model-path", head,
        "--speculative-num-draft-tokens", str(k + 1), *([] if on_gpu else CPU),
    ]  # fmt: skip
    process = subprocess.Popen(command, env=os.environ | ({} if on_gpu else {"SGLANG_USE_CPU_ENGINE": "1"}), start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        print("-- starting the server", flush=True)
        while not _healthy(url):
            if process.poll() is not None:
                sys.exit(f"the server ended with status {process.returncode}; its messages are above")
            time.sleep(0.5)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def _healthy(url: str) -> bool:
    try:
        return urllib.request.urlopen(url + "/health", timeout=5).status == 200
    except (urllib.error.URLError, OSError):
        return False


def ask(url: str, prompt: str, max_tokens: int) -> None:
    """Stream one completion to the terminal."""
    client = OpenAI(base_url=url + "/v1", api_key="none")
    start, pieces = time.perf_counter(), 0
    print(f"> {prompt}", end="", flush=True)
    for chunk in client.completions.create(model="default", prompt=prompt, max_tokens=max_tokens, temperature=0, stream=True):
        print(chunk.choices[0].text, end="", flush=True)
        pieces += 1
    print(f"\n  {time.perf_counter() - start:.2f} s in {pieces} pieces: a round commits several tokens at once")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="monday: anna")
    parser.add_argument("--url", help="a server that runs already")
    parser.add_argument("--target", default=str(PAIR / "target"))
    parser.add_argument("--head", default=str(PAIR / "head"))
    parser.add_argument("--k", type=int, default=5, help="draft tokens per round")
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()
    with contextlib.nullcontext(options.url) if options.url else server(options.target, options.head, options.k) as url:
        ask(url, options.prompt, options.max_tokens)


if __name__ == "__main__":
    main()
