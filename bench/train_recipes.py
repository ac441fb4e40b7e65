"""Training recipes on the tiny pair's target, on a CPU: held-out acceptance against steps, each recipe from nothing.

    python bench/train_recipes.py --out bench/results/train-recipes.json

Recipes differ in optimiser, learning rate, sampling of rows, layers or method, and share text, target, seed, steps and tokens per
step. One process and one thread per recipe. The walk is the acceptance length that an engine would reach along held-out
text (bonus included). ``--sampled T`` takes the target's own samples in place of the text it was trained on, and ``--recipes`` some
of the recipes (the default are all of :data:`RECIPES`). A width of 128 says little about the best learning rate of a wide head, except that Muon's does not
depend on the width. Finished recipes are kept in --out; the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "examples" / "tiny_pair")]

TARGET = ROOT / "examples" / "tiny_pair" / "target"
LENGTH = 192

_MUON: dict[str, Any] = {"optimizer": "muon", "matrix_lr": 0.03}
_REFUSED = _MUON | {"refused_weight": 0.1}

RECIPES: dict[str, dict[str, Any]] = {
    "muon 0.03": _MUON,
    "muon 0.015": {"optimizer": "muon", "matrix_lr": 0.015},
    "muon 0.06": {"optimizer": "muon", "matrix_lr": 0.06},
    "adamw 0.001": {"optimizer": "adamw", "lr": 1e-3},
    "adamw 0.003": {"optimizer": "adamw", "lr": 3e-3},
    "adamw 0.01": {"optimizer": "adamw", "lr": 1e-2},
    "eagle3 muon 0.03": _MUON | {"method": "eagle3"},
    "eagle3 muon 0.03 refused 0.1": _REFUSED | {"method": "eagle3"},
    "muon 0.03 r 0.9": _MUON | {"cod_ratio": 0.9, "cod_floor": 0.3},
    "muon 0.03 refused 0.3": _MUON | {"refused_weight": 0.3},
    "muon 0.03 refused 0.1": _REFUSED,
    "muon 0.03 refused 0": _MUON | {"refused_weight": 0.0},
    "muon 0.03 4 layers refused 0.1": _REFUSED | {"layers": 4},
    "muon 0.03 r 0.9 refused 0.1": _REFUSED | {"cod_ratio": 0.9, "cod_floor": 0.3},
    "muon 0.03 r 0.8 refused 0.1": _REFUSED | {"cod_ratio": 0.8, "cod_floor": 0.2},
    # As many parameters as two layers of the target's intermediate size have (five layers: 3 % more).
    "muon 0.03 3 narrow layers refused 0.1": _REFUSED | {"layers": 3, "intermediate_size": 128},
    "muon 0.03 4 narrow layers refused 0.1": _REFUSED | {"layers": 4, "intermediate_size": 64},
    "muon 0.03 4 narrow layers r 0.8 refused 0.1": _REFUSED | {"layers": 4, "intermediate_size": 64, "cod_ratio": 0.8, "cod_floor": 0.2},
    "muon 0.03 5 narrow layers refused 0.1": _REFUSED | {"layers": 5, "intermediate_size": 32},
    # As many parameters as four layers of the target's intermediate size have.
    "muon 0.03 8 narrow layers refused 0.1": _REFUSED | {"layers": 8, "intermediate_size": 64},
    "muon 0.03 1 layer": _MUON | {"layers": 1},
    "muon 0.03 4 layers": _MUON | {"layers": 4},
    "muon 0.03 whole embedding": _MUON | {"embedding": "full"},
}


def write_corpus(folder: Path, documents: int, sampled: float | None) -> None:
    """Windows of the tiny pair's text, or the target's own samples behind 16 tokens of it; every token counts as the target's."""
    import torch
    from make_text import TextMaker
    from pair_target import Windows, continue_text, load_target
    from transformers import AutoTokenizer

    from sgl_peagle.train.corpus import Corpus

    tokenizer, maker = AutoTokenizer.from_pretrained(TARGET), TextMaker(0)
    texts = [maker.document() for _ in range(3 * documents)]
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    windows = Windows(torch.tensor([i for ids in encoded for i in ids]), 1)
    if sampled is None:
        batch = windows.batch(documents, LENGTH + 1)
    else:
        target, random = load_target(TARGET), torch.Generator().manual_seed(0)
        parts = windows.batch(documents, 16).split(250)
        batch = torch.cat([continue_text(target, part, LENGTH + 1 - 16, sampled, random) for part in parts])
    kind = "windows of the tiny pair's text" if sampled is None else f"the target's samples at temperature {sampled}"
    Corpus.of(((row, [True] * len(row)) for row in batch.tolist()), {"text": kind}).write(folder)


def train(work: tuple[str, Path, argparse.Namespace]) -> tuple[str, dict[str, Any]]:
    """One recipe; its held-out results by step."""
    name, corpus, options = work
    import torch
    from pair_tokenizer import MASK_ID

    from sgl_peagle.train.loop import LOG, Trainer
    from sgl_peagle.train.settings import Settings

    torch.set_num_threads(1)
    ar = RECIPES[name].get("method") == "eagle3"
    own = {} if ar else {"mask_token_id": MASK_ID, "layers": 2, "refused_weight": 1.0}  # what a P-EAGLE recipe says otherwise, it names
    settings = Settings(
        target=str(TARGET), corpus=str(corpus), steps=options.steps, tokens_per_step=options.tokens_per_step, max_length=512,
        holdout=40, eval_every=max(1, options.steps // 6), device="cpu", seed=options.seed, **(own | RECIPES[name]),
    )  # fmt: skip
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        Trainer(settings, out, echo=lambda _: None).run()
        lines = [json.loads(line) for line in (out / LOG).read_text().splitlines()]
    curve = [{"step": line["step"], **line["holdout"]} for line in lines if "holdout" in line]
    return name, {"settings": RECIPES[name], "seconds": round(time.perf_counter() - begin), "curve": curve}


def plot(recipes: dict[str, Any], file: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    axes.set_prop_cycle(color=pyplot.get_cmap("tab20").colors[::2] + pyplot.get_cmap("tab20").colors[1::2])
    for name, result in recipes.items():
        axes.plot(
            [c["step"] for c in result["curve"]], [c["walk"][6] for c in result["curve"]], marker="o", ms=3, label=name
        )  # fmt: skip
    axes.set_xlabel("optimiser steps")
    axes.set_ylabel("held-out acceptance length, K=7 (walk, bonus included)")
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--tokens-per-step", type=int, default=2048)
    parser.add_argument("--documents", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sampled", type=float, metavar="T", help="train on the target's own samples at this temperature")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    from environment import environment, write_report

    shared = {name: getattr(options, name) for name in ("steps", "tokens_per_step", "documents", "seed")}
    if options.sampled is not None:
        shared["sampled"] = options.sampled
    report: dict[str, Any] = {"environment": environment(), "shared": shared, "recipes": {}}
    if options.out.exists():
        report = json.loads(options.out.read_text())
        if report["shared"] != shared:
            sys.exit(f"{options.out} was made with {report['shared']}: choose another --out, or these options")
    failed: list[str] = []
    todo = [name for name in options.recipes if name not in report["recipes"]]
    with tempfile.TemporaryDirectory() as folder:
        if todo:
            write_corpus(Path(folder) / "corpus", options.documents, options.sampled)
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(options.processes, mp_context=spawn, max_tasks_per_child=1) as pool:
            runs = {pool.submit(train, (name, Path(folder) / "corpus", options)): name for name in todo}
            for run in as_completed(runs):
                if run.exception() is not None:
                    failed.append(runs[run])
                    print(f"{runs[run]}: {type(run.exception()).__name__}: {run.exception()}", flush=True)
                    continue
                name, result = run.result()
                report["recipes"][name] = result
                write_report(options.out, report)
                last = result["curve"][-1]
                print(f"{name}: walk {last['walk'][6]:.3f} after {last['step']} steps, {result['seconds']} s", flush=True)
    title = f"tiny pair (width 128), {options.tokens_per_step} tokens a step, seed {options.seed}, CPU"
    ordered = {name: report["recipes"][name] for name in RECIPES if name in report["recipes"]}
    plot(ordered, options.out.with_suffix(".png"), title)
    if failed:
        sys.exit(f"not finished: {', '.join(failed)}")


if __name__ == "__main__":
    main()
