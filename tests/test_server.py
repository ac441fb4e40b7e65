"""HTTP, as users run it: ``python -m sglang.launch_server`` with the package merely installed.

Two servers run side by side on two ports, without and with PEAGLE; what the second answers is compared with the first.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import random
import re
import subprocess
import time
from pathlib import Path
from typing import Any, Iterator

import pytest
import requests
from conftest import TALLY
from pair import greedy, prompts
from server import ENV, PEAGLE, command, free_port, running

K = 5


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    folder: Path = tmp_path_factory.mktemp("servers")
    with running(folder / "plain.log") as plain:
        with running(folder / "peagle.log", *PEAGLE, "--speculative-num-draft-tokens", str(K + 1)) as peagle:
            yield plain, peagle


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    answer = requests.post(url + path, json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    TALLY["HTTP requests"] += 1
    return answer.json()


def generate(url: str, prompt: tuple[int, ...], **params: Any) -> Any:
    extra = {key: params.pop(key) for key in ("return_logprob", "top_logprobs_num", "logprob_start_len") if key in params}
    sampling = {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True} | params
    return post(url, "/generate", {"input_ids": list(prompt), "sampling_params": sampling} | extra)


def test_completion_equals_transformers(servers: tuple[str, str]) -> None:
    for prompt in prompts(8):
        answer = generate(servers[1], prompt)
        assert tuple(answer["output_ids"]) == greedy(prompt, 32)
        meta = answer["meta_info"]
        assert meta["spec_accept_length"] > 1.0
        histogram = meta["spec_correct_drafts_histogram"]
        assert sum(histogram) == meta["spec_verify_ct"] and len(histogram) <= K + 1


def test_chat_and_streaming(servers: tuple[str, str]) -> None:
    chat = [{"role": "user", "content": "hello"}]
    body = {"model": "x", "messages": chat, "temperature": 0, "max_tokens": 24}
    plain, whole = (post(url, "/v1/chat/completions", body) for url in servers)
    text = whole["choices"][0]["message"]["content"]
    assert text and text == plain["choices"][0]["message"]["content"]
    assert whole["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
    with requests.post(servers[1] + "/v1/chat/completions", json=body | {"stream": True}, timeout=60, stream=True) as r:
        lines = [line[6:] for line in r.iter_lines(decode_unicode=True) if line.startswith("data: {")]
    assert "".join(json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines) == text


@pytest.mark.parametrize(
    "params",
    [
        {"n": 3},
        {"stop": [" the", "\n"]},
        {"seed": 7},
        {"frequency_penalty": 0.8},
        {"presence_penalty": 1.5},
        {"repetition_penalty": 1.3},
        {"logit_bias": {"40": 5.0, "41": -100.0}},
        {"min_tokens": 20, "ignore_eos": False},
        {"logprobs": 3},
    ],
    ids=lambda params: next(iter(params)),
)
def test_completions_api_answers_as_without_speculation(params: dict[str, Any], servers: tuple[str, str]) -> None:
    for prompt in prompts(12)[2:6]:
        body = {"model": "x", "prompt": list(prompt), "temperature": 0, "max_tokens": 24} | params
        plain, fast = (post(url, "/v1/completions", body) for url in servers)
        assert [c["text"] for c in plain["choices"]] == [c["text"] for c in fast["choices"]]
        assert [c["finish_reason"] for c in plain["choices"]] == [c["finish_reason"] for c in fast["choices"]]
        assert plain["usage"] == fast["usage"]


def test_logprobs_equal_those_without_speculation(servers: tuple[str, str]) -> None:
    for prompt in prompts(24)[12:18]:
        plain, fast = (
            generate(url, prompt, return_logprob=True, top_logprobs_num=4)["meta_info"] for url in servers
        )
        for key in ("output_token_logprobs", "output_top_logprobs"):
            flat = [[], []]
            for side, meta in zip(flat, (plain, fast)):
                for entry in meta[key]:
                    side += entry if key == "output_top_logprobs" else [entry]
            assert [e[1] for e in flat[0]] == [e[1] for e in flat[1]], key
            assert all(abs(a[0] - b[0]) < 1e-4 for a, b in zip(*flat)), key


SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}}, "required": ["a", "b"]}
GRAMMARS = {
    "json_schema": (json.dumps(SCHEMA), lambda text: set(json.loads(text)) == {"a", "b"}),
    "regex": (r"(cat|dog)s? [0-9]{2,4}!", lambda text: re.fullmatch(r"(cat|dog)s? [0-9]{2,4}!", text)),
    "ebnf": ('root ::= "yes" | "no" " " [a-c]+ "."', lambda text: re.fullmatch(r"yes|no [a-c]+\.", text)),
}


@pytest.mark.parametrize("kind", GRAMMARS)
def test_structured_output(kind: str, servers: tuple[str, str]) -> None:
    grammar, valid = GRAMMARS[kind]
    finished = 0
    for prompt in prompts(12)[2:8]:
        params = {kind: grammar, "ignore_eos": False, "max_new_tokens": 200}
        plain, fast = (generate(url, prompt, **params) for url in servers)
        assert plain["text"] == fast["text"]
        if fast["meta_info"]["finish_reason"]["type"] == "stop":
            finished += 1
            assert valid(fast["text"]), fast["text"]
    assert finished, "no output ended by itself"


def test_a_grammar_costs_no_acceptance(servers: tuple[str, str]) -> None:
    """A grammar that allows everything changes neither the output nor the acceptance at any position."""
    for prompt in prompts(20)[12:18]:
        free = generate(servers[1], prompt)
        bound = generate(servers[1], prompt, regex=r"(.|\n)*")
        assert bound["output_ids"] == free["output_ids"]
        key = "spec_correct_drafts_histogram"
        assert bound["meta_info"][key] == free["meta_info"][key]


def test_metrics_show_acceptance_and_the_plugins_counters(servers: tuple[str, str]) -> None:
    def counters() -> dict[str, float]:
        text = requests.get(servers[1] + "/metrics", timeout=30).text
        found = re.findall(r"^(sgl_peagle:\w+?)(?:_total)?\{[^}]*\} ([0-9.e+]+)$", text, re.MULTILINE)
        assert "sglang:spec_accept_length" in text
        return {name.removeprefix("sgl_peagle:"): float(value) for name, value in found}

    generate(servers[1], prompts(1)[0], max_new_tokens=8)
    before = counters()
    rounds = generate(servers[1], prompts(3)[2])["meta_info"]["spec_verify_ct"]
    after = counters()
    assert after["rounds"] - before["rounds"] == rounds
    assert after["draft_tokens"] - before["draft_tokens"] == K * rounds
    assert 31 - rounds <= after["accepted_draft_tokens"] - before["accepted_draft_tokens"] <= K * rounds
    assert after.get("fallback_draft_tokens", 0) == 0


def test_disconnecting_aborts(servers: tuple[str, str]) -> None:
    body = {"input_ids": list(prompts(1)[0]), "stream": True,
            "sampling_params": {"temperature": 0, "max_new_tokens": 450, "ignore_eos": True}}  # fmt: skip
    with requests.post(servers[1] + "/generate", json=body, stream=True, timeout=60) as stream:
        next(stream.iter_lines())
    deadline = time.monotonic() + 30
    while True:  # the request is gone from the running batch long before its 450 tokens
        text = requests.get(servers[1] + "/metrics", timeout=30).text
        running_now = re.findall(r"^sglang:num_running_reqs\{[^}]*\} ([0-9.]+)$", text, re.MULTILINE)
        if all(float(value) == 0 for value in running_now):
            break
        assert time.monotonic() < deadline
        time.sleep(0.2)
    prompt = prompts(4)[3]
    assert tuple(generate(servers[1], prompt)["output_ids"]) == greedy(prompt, 32)


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": list(range(4, 484)) * 2, "sampling_params": {"max_new_tokens": 4}},
        {"input_ids": [], "sampling_params": {"max_new_tokens": 4}},
        # Ids beyond the vocabulary are not checked by SGLang 0.5.23: without PEAGLE, too, they end a CPU server.
        {"input_ids": ["x"], "sampling_params": {"max_new_tokens": 4}},
        {"text": "a", "sampling_params": {"max_new_tokens": -3}},
    ],
    ids=["too long", "empty", "bad ids", "bad length"],
)
def test_requests_that_cannot_be_served(body: dict[str, Any], servers: tuple[str, str]) -> None:
    """SGLang's own error, and the next request works."""
    plain, fast = (requests.post(url + "/generate", json=body, timeout=60) for url in servers)
    assert fast.status_code == plain.status_code >= 400
    prompt = prompts(4)[3]
    assert tuple(generate(servers[1], prompt)["output_ids"]) == greedy(prompt, 32)


def _soak(url: str, count: int, seconds: float) -> int:
    """Concurrent requests of random lengths; returns how many answered rightly."""
    chooser = random.Random(0)
    jobs = [(prompts(24)[chooser.randrange(24)], chooser.randint(1, 40)) for _ in range(count)]
    deadline = time.monotonic() + seconds

    def one(job: tuple[tuple[int, ...], int]) -> bool:
        prompt, length = job
        assert time.monotonic() < deadline, "the soak took too long"
        return tuple(generate(url, prompt, max_new_tokens=length)["output_ids"]) == greedy(prompt, 40)[:length]

    for prompt in prompts(24):
        greedy(prompt, 40)  # computed once, before the threads ask
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        return sum(pool.map(one, jobs))


def test_concurrent_requests(servers: tuple[str, str]) -> None:
    assert _soak(servers[1], 60, 120) == 60


@pytest.mark.slow
def test_soak_of_500_requests(servers: tuple[str, str]) -> None:
    assert _soak(servers[1], 500, 500) == 500


def test_a_refusal_reaches_the_terminal() -> None:
    """A contradiction ends the server with the three-part message, not with a mere log line."""
    extra = [*PEAGLE, "--speculative-num-draft-tokens", "6", "--speculative-num-steps", "6"]
    done = subprocess.run(command(free_port(), *extra), env=os.environ | ENV, capture_output=True, text=True, timeout=240)
    assert done.returncode != 0
    assert "contradict each other" in done.stderr and "why:" in done.stderr and "fix:" in done.stderr
    TALLY["refusals"] += 1


def test_excluded_by_sglang_plugins_the_algorithm_is_unknown() -> None:
    """With SGLANG_PLUGINS naming another plugin, SGLang behaves as if the package were not installed."""
    env = os.environ | ENV | {"SGLANG_PLUGINS": "another"}
    env["SGLANG_USE_CPU_ENGINE"] = "0"  # the CPU platform is excluded too, so let argument checks run without it
    code = (
        "import sys; from sglang.srt.plugins import load_plugins; load_plugins(); "
        "from sglang.srt.speculative.spec_registry import get_spec; "
        "print(get_spec('PEAGLE'), 'sgl_peagle.algorithm' in sys.modules, 'sgl_kernel' in sys.modules)"
    )
    import sys

    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == "None False False", done.stderr[-2000:]
