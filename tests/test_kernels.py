"""The Triton kernels against their torch references: interpreted on the CPU, compiled for a GPU, and run on one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent


def check_all(device: str, seeds: int, *under: str, timeout: float = 600, **variables: str) -> str:
    """Run ``kernel_cases.py`` in a process of its own, perhaps ``under`` a tool; returns what it printed."""
    env = os.environ | variables
    env["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [*under, sys.executable, str(HERE / "kernel_cases.py"), device, str(seeds)],
        env=env, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    names = ("expand_decode", "expand_prefill", "window_hidden", "window_attention")
    assert all(f"{name}: " in done.stdout for name in names)
    return done.stdout


def test_kernels_equal_the_references_under_the_interpreter() -> None:
    check_all("cpu", 1, TRITON_INTERPRET="1", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")


@pytest.mark.gpu
@pytest.mark.skipif(not os.path.exists("/dev/nvidia0"), reason="needs a CUDA GPU; this machine has none")
def test_kernels_equal_the_references_on_the_gpu_without_synchronising() -> None:
    check_all("cuda", 3)


@pytest.mark.gpu
@pytest.mark.skipif(not os.path.exists("/dev/nvidia0"), reason="needs a CUDA GPU; this machine has none")
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="compute-sanitizer (CUDA toolkit) is not on the PATH")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_kernels_under_compute_sanitizer(tool: str) -> None:
    """Every tensor is an allocation of its own, so that memcheck sees an access that is out of bounds of one."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "7"]
    if tool == "memcheck":
        # Triton asks the driver for a mode of shared memory that it may not know, and falls back: an error of the API, which
        # memcheck would count beside those of memory.
        command += ["--report-api-errors", "no"]
    said = check_all("cuda", 1, *command, timeout=580, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", said)
    print(tool, summary)
    assert summary and all(" 0 " in line for line in summary)


def compiled(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int, divisible: tuple[str, ...] = ()
) -> str:
    """The kernel's PTX for compute capability 9.0; needs Triton's own compiler only, no GPU and no driver."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    place = kernel.arg_names.index
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(place(name),): value for name, value in constants.items()},
        attrs={(place(n),): [["tt.divisibility", 16]] for n, t in types.items() if t[0] == "*" or n in divisible},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm["ptx"]


@pytest.mark.parametrize("integers", ["i32", "i64"])
def test_expansion_compiles_for_hopper(integers: str) -> None:
    from sgl_peagle.kernels import expand_triton as module

    inputs = dict.fromkeys(("predicted", "accept_lens", "seq_lens", "req_pool_indices"), f"*{integers}")
    outputs = {"rows": "*i64", "flags": "*u8", "sampled": "*i64", "starts": "*i64", "lengths": "*i64"}
    sizes = dict.fromkeys(("num_rows", "table_width", "table_stride"), "i32")
    constants = {"K": 7, "MASK_ID": 128255, "PRIVATE": True, "SHARED": -1, "PADDING": 0, "BLOCK": 128}
    assert compiled(module._decode_kernel, inputs | {"req_to_token": "*i32"} | outputs | sizes, constants, 4)

    inputs = dict.fromkeys(("prompt_ids", "tail_tokens", "cache_locs"), f"*{integers}") | {"table": "*i64"}
    outputs = {"rows": "*i64", "flags": "*u8", "sampled": "*i64"}
    sizes = dict.fromkeys(("num_rows", "num_requests"), "i32")
    constants = {"K": 7, "MASK_ID": 128255, "SHARED": -1, "PADDING": 0, "BLOCK": 1024, "BLOCK_K": 8}
    assert compiled(module._prefill_kernel, inputs | outputs | sizes, constants, 4)


@pytest.mark.parametrize("width", [576, 2880, 4096])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_hidden_kernel_moves_16_bytes_at_a_time(dtype: str, width: int) -> None:
    """Narrower accesses would still be right, and miss the bandwidth target."""
    from sgl_peagle.kernels import hidden_triton as module

    types = dict.fromkeys(("projected", "shared", "out"), f"*{dtype}") | {"hidden_rows": "*i64"}
    ptx = compiled(module._window_hidden_kernel, types, {"D": width, "BLOCK": module.BLOCK}, module.NUM_WARPS)
    assert set(re.findall(r"st\.global\.([\w.]+)", ptx)) == {"v4.b32"}
    assert set(re.findall(r"ld\.global\.([\w.]+)", ptx)) == {"v4.b32", "b64"}  # b64: the row's index


@pytest.mark.parametrize("name", ["expand_decode", "expand_prefill", "window_hidden"])
def test_cpu_tensors_take_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from sgl_peagle.kernels import expand, hidden

    module = hidden if name == "window_hidden" else expand
    monkeypatch.setattr(module, f"{name}_reference", lambda *a, **k: "reference")
    one = torch.zeros(1, 1)
    options: dict[str, Any] = {"k": 1, "mask_token_id": 1}
    if name == "expand_decode":
        result = expand.expand_decode(one, one, one, one, one, private_mask_slots=False, **options)
    elif name == "expand_prefill":
        result = expand.expand_prefill(one, one, one, extend_lens=[1], prefix_lens=[0], num_masks=[0], **options)
    else:
        result = hidden.window_hidden(one, one, one)
    assert result == "reference"
