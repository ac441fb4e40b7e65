"""Time ``sgl-peagle convert`` on a synthetic head of the gpt-oss-20b shape (3.6 GB) against ``cp``, and its memory.

Both run in turn, several times, from a warm page cache, each followed by ``sync`` inside the timed part, so that
neither gains by leaving its bytes unwritten (convert flushes its file itself; cp does not). Needs about 11 GB of disk under ``--scratch``; removes what it wrote.

    python bench/convert_head.py --scratch /var/tmp --out bench/results/convert_head.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from environment import environment, write_report

from sgl_peagle.heads.formats import format_named
from sgl_peagle.heads.names import expected_shapes, optional_shapes
from sgl_peagle.heads.safetensors_io import Planned, header_bytes

CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 2880,
    "intermediate_size": 14336,
    "num_hidden_layers": 4,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201088,
    "draft_vocab_size": 201088,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_theta": 150000.0,
    "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192},
    "ptd_token_id": 201020,
    "parallel_drafting": True,
}  # fmt: skip


def write_head(folder: Path) -> int:
    """Write the synthetic head; bytes of weights."""
    vllm = format_named("vllm")
    config = vllm.parse(CONFIG, "synthetic")
    shapes = expected_shapes(config) | {
        name: shape for name, shape in optional_shapes(config).items() if name in ("embed_tokens.weight", "lm_head.weight")
    }
    planned = [Planned(vllm.file_name(name), "BF16", allowed[0]) for name, allowed in shapes.items()]
    folder.mkdir(parents=True)
    noise = torch.randn(8 << 20).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header_bytes(planned, {"format": "pt"}))
        for tensor in planned:
            left = tensor.size
            while left:
                left -= file.write(noise[: min(left, len(noise))])
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return sum(tensor.size for tensor in planned)


#: Runs the command line and leaves its peak resident memory behind. (``ru_maxrss`` would count this process's own
#: memory from before the exec.)
CHILD = """
import atexit, sys
def peak():
    lines = open("/proc/self/status").read().splitlines()
    open(sys.argv.pop(), "w").write(next(l.split()[1] for l in lines if l.startswith("VmHWM")))
path = sys.argv[-1]
atexit.register(peak)
from sgl_peagle.cli import main
main(sys.argv[1:-1])
"""


def run(command: list[str]) -> tuple[float, float]:
    """Seconds of a command with and without a final sync."""
    os.sync()
    start = time.perf_counter()
    subprocess.run(command, check=True)
    unsynced = time.perf_counter() - start
    os.sync()
    return time.perf_counter() - start, unsynced


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--out", type=Path, default=Path("bench/results/convert_head.json"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--to", default="speculators")
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="convert-bench-", dir=args.scratch))
    try:
        size = write_head(work / "head")
        copies, conversions, peak = [], [], 0
        for _ in range(args.rounds):
            copies.append(run(["cp", "-r", str(work / "head"), str(work / "copy")]))
            shutil.rmtree(work / "copy")
            command = [sys.executable, "-c", CHILD, "convert", str(work / "head"), str(work / "out"), "--to", args.to]
            conversions.append(run([*command, str(work / "peak")]))
            peak = max(peak, int((work / "peak").read_text()))
            shutil.rmtree(work / "out")
    finally:
        shutil.rmtree(work)
    copied, converted = [s for s, _ in copies], [s for s, _ in conversions]
    result = {
        "environment": environment(),
        "head_bytes": size,
        "to": args.to,
        "cp_seconds": [round(s, 2) for s in copied],
        "convert_seconds": [round(s, 2) for s in converted],
        "ratio_of_medians": round(statistics.median(converted) / statistics.median(copied), 3),
        "ratio_per_round": [round(c / p, 3) for c, p in zip(converted, copied)],
        "cp_seconds_before_sync": [round(s, 2) for _, s in copies],
        "convert_seconds_before_sync": [round(s, 2) for _, s in conversions],
        "peak_rss_mb": round(peak / 1024, 1),
        "load_average_after": [round(x, 2) for x in os.getloadavg()],
        "python": platform.python_version(),
    }
    write_report(args.out, result)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
