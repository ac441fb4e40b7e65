"""Every patch applies to the installed SGLang, and what it yields is Python that does what it says."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import triton.language as tl

PATCHES = sorted((Path(__file__).parent.parent / "patches").glob("*.patch"))


def installed(name: str | Path) -> Path:
    """A file or folder of the installed SGLang, by its path in SGLang's repository."""
    return Path(find_spec("sglang").origin).parent / Path(name).relative_to("python/sglang")


def patched(patch: Path, folder: Path) -> Path:
    """Copy the file that a patch changes into a tree like SGLang's repository, unless it is there, and apply it."""
    (name,) = re.findall(r"^\+\+\+ b/(\S+)$", patch.read_text(), re.MULTILINE)
    source, copy = installed(name), folder / name
    if not copy.exists():
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, copy)
    done = subprocess.run(["git", "apply", "--verbose", str(patch)], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert copy.read_text() != source.read_text()
    return copy


def test_there_are_patches() -> None:
    assert len(PATCHES) == 6


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name[:4])
def test_it_applies_and_gives_a_reason(patch: Path, tmp_path: Path) -> None:
    reason = patch.read_text().split("--- a/")[0].strip()
    assert len(reason.splitlines()) >= 3
    ast.parse(patched(patch, tmp_path).read_text())


def test_they_apply_one_after_the_other(tmp_path: Path) -> None:
    for patch in PATCHES:
        ast.parse(patched(patch, tmp_path).read_text())


def test_the_patched_row_is_wide_enough(tmp_path: Path) -> None:
    """The patched function, with SGLang's rules around it: no allocation overflows the row at page size 1."""
    tree = ast.parse(patched(PATCHES[1], tmp_path).read_text())
    wanted = ("get_req_to_token_extra_context_len", "get_alloc_reserve_per_decode")
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in wanted]
    code = compile(ast.Module(functions, []), "patched", "exec")
    for alloc in range(2, 20):
        names = {
            "get_alloc_len_per_decode": lambda: alloc,
            "max_speculative_num_draft_tokens": lambda: alloc,
            "get_alloc_page_size": lambda: 1,
            "get_spec": lambda: type("Spec", (), {"speculative_algorithm": "EAGLE3"}),
        }
        exec(code, names)
        assert names["get_req_to_token_extra_context_len"]() >= 2 * alloc - 4


def test_the_patched_decode_counts_the_new_token(tmp_path: Path) -> None:
    """Windows cut from lengths that count the new token, decode's, grow by one; those of prefixes stay."""
    copy = patched(PATCHES[4], tmp_path)
    source = installed(copy.relative_to(tmp_path))
    before, after = (window_calls(path.read_text()) for path in (source, copy))
    grown = [(*a[:2], b[2], a[2]) for b, a in zip(before, after, strict=True) if a != b]
    assert grown == [
        (function, lengths, "self.sliding_window_size", "self.sliding_window_size + 1")
        for function, lengths in (("_update_decode_kv_buffers", "seq_lens"), ("init_forward_metadata", "forward_batch.seq_lens"))
    ]
    assert len(after) - len(grown) >= 5
    # The buffer of a captured decode has room for one slot more per request.
    sizes = [path.read_text().count("(max_num_tokens * (self.sliding_window_size + 1)),") for path in (source, copy)]
    assert sizes == [0, 1] and "(max_num_tokens * self.sliding_window_size)" not in copy.read_text()


def test_the_patched_experts_keep_float32(tmp_path: Path) -> None:
    """The patched choice gives every dtype of the hidden states its own type; SGLang's gives float32 float16."""
    copy = patched(PATCHES[5], tmp_path)
    source = installed(copy.relative_to(tmp_path))
    chosen = []
    for path in (source, copy):
        (choice,) = (
            node.value for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "compute_type"
        )  # fmt: skip
        code = compile(ast.Expression(choice), str(path), "eval")
        chosen.append([
            str(eval(code, {"tl": tl, "torch": torch, "hidden_states": torch.empty(0, dtype=dtype)}))
            for dtype in (torch.bfloat16, torch.float16, torch.float32)
        ])  # fmt: skip
    assert chosen == [["bf16", "fp16", "fp16"], ["bf16", "fp16", "fp32"]]


def window_calls(code: str) -> list[tuple[str, str, str]]:
    """(function, lengths, window) of every call that cuts windows."""
    found = []
    for function in (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.FunctionDef)):
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            if ast.unparse(call.func) == "update_sliding_window_buffer":
                found.append((function.name, ast.unparse(call.args[5]), ast.unparse(call.args[4])))
    return found
