"""PEAGLE through SGLang's Python API: a batch of prompts, the answers and the acceptance length.

    python examples/offline_engine.py                              # the tiny pair of this repository, any machine
    python examples/offline_engine.py --target T --head H "prompt" # your models, on a CUDA GPU
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

# SGLang decides at import time which device it has. Without an NVIDIA device node there is no CUDA GPU.
ON_GPU = os.path.exists("/dev/nvidia0")
if not ON_GPU:
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

PAIR = Path(__file__).parent / "tiny_pair"
CPU = {"device": "cpu", "dtype": "float32", "disable_cuda_graph": True, "max_total_tokens": 4096}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="*", default=["monday: anna", "count: 3 4 5", "a gift for"])
    parser.add_argument("--target", default=str(PAIR / "target"))
    parser.add_argument("--head", default=str(PAIR / "head"))
    parser.add_argument("--k", type=int, default=5, help="draft tokens per round")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args()

    import sglang as sgl

    engine = sgl.Engine(
        model_path=options.target,
        speculative_algorithm="PEAGLE",
        speculative_draft_model_path=options.head,
        speculative_num_draft_tokens=options.k + 1,  # K drafts and the bonus token
        log_level="error",
        **({} if ON_GPU else CPU),
    )
    try:
        sampling = {"temperature": 0, "max_new_tokens": options.max_new_tokens}
        for prompt, output in zip(options.prompts, engine.generate(options.prompts, sampling), strict=True):
            meta = output["meta_info"]
            rounds = meta["spec_verify_ct"]
            # The prefill makes the first token, the rounds make the others.
            length = (meta["completion_tokens"] - 1) / rounds if rounds else 1.0
            print(f"> {prompt}{output['text']}\n  {meta['completion_tokens']} tokens, acceptance length {length:.2f}\n")
    finally:
        engine.shutdown()


if __name__ == "__main__":  # SGLang's subprocesses import this file again
    main()
