"""The command line: ``python -m sglang.launch_server`` with the package merely installed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Iterator

import pytest
import requests
from pair import HEAD, TARGET, greedy, prompts, tokenizer

ENV = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
ARGS = ["--device", "cpu", "--dtype", "float32", "--max-total-tokens", "4096", "--context-length", "512",
        "--max-running-requests", "8", "--disable-cuda-graph", "--skip-server-warmup"]  # fmt: skip


def command(port: int, *extra: str) -> list[str]:
    return [sys.executable, "-m", "sglang.launch_server", "--model-path", str(TARGET), "--port", str(port), *ARGS, *extra]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    log_path: Path = tmp_path_factory.mktemp("server") / "log"
    with log_path.open("w") as log:
        extra = ["--speculative-algorithm", "PEAGLE", "--speculative-draft-model-path", str(HEAD),
                 "--speculative-num-draft-tokens", "6"]  # fmt: skip
        server = subprocess.Popen(
            command(port, *extra), env=os.environ | ENV, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        base = f"http://127.0.0.1:{port}"
        try:
            deadline = time.monotonic() + 300
            while True:
                try:
                    if requests.get(base + "/health", timeout=5).status_code == 200:
                        break
                except requests.ConnectionError:
                    pass
                assert server.poll() is None and time.monotonic() < deadline, log_path.read_text()[-5000:]
                time.sleep(0.5)
            yield base
        finally:
            os.killpg(server.pid, 15)
            server.wait(30)


def test_completion_equals_transformers(url: str) -> None:
    prompt = prompts(3)[2]
    body = {"input_ids": list(prompt), "sampling_params": {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True}}
    answer = requests.post(url + "/generate", json=body, timeout=60).json()
    assert tuple(answer["output_ids"]) == greedy(prompt, 32)
    assert answer["meta_info"]["spec_accept_length"] > 1.2


def test_chat_and_streaming(url: str) -> None:
    chat = [{"role": "user", "content": "hello"}]
    body = {"model": "x", "messages": chat, "temperature": 0, "max_tokens": 24}
    whole = requests.post(url + "/v1/chat/completions", json=body, timeout=60).json()
    text = whole["choices"][0]["message"]["content"]
    prompt = tuple(tokenizer().apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
    expected = tokenizer().decode(greedy(prompt, 24), skip_special_tokens=True)
    assert text and expected.startswith(text)
    with requests.post(url + "/v1/chat/completions", json=body | {"stream": True}, timeout=60, stream=True) as stream:
        import json

        lines = [line[6:] for line in stream.iter_lines(decode_unicode=True) if line.startswith("data: {")]
    deltas = [json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines]
    assert "".join(deltas) == text


def test_a_refusal_reaches_the_terminal() -> None:
    """A contradiction ends the server with the three-part message, not with a mere log line."""
    extra = ["--speculative-algorithm", "PEAGLE", "--speculative-draft-model-path", str(HEAD),
             "--speculative-num-draft-tokens", "6", "--speculative-num-steps", "6"]  # fmt: skip
    done = subprocess.run(
        command(free_port(), *extra), env=os.environ | ENV, capture_output=True, text=True, timeout=240
    )
    assert done.returncode != 0
    assert "contradict each other" in done.stderr and "why:" in done.stderr and "fix:" in done.stderr
