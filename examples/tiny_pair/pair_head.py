"""The P-EAGLE head: trained and exported by the package's own trainer, and read back for the evaluation."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from pair_target import LONG_WINDOW, SHORT_WINDOW, Windows
from pair_tokenizer import MASK_ID
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaForCausalLM

from sgl_peagle.train.corpus import Corpus
from sgl_peagle.train.loop import Trainer
from sgl_peagle.train.model import Head, Shape
from sgl_peagle.train.settings import Settings

K_TRAIN = 8
LAYERS = 2
TOKENS_PER_STEP = 1024
NUM_AUX = 3


def make_corpus(sources: Sequence[Windows], steps: int) -> Corpus:
    """Windows enough for ``steps`` steps, from each source in turn; every token counts as the target's.

    Every eighth step's worth is long, so that contexts beyond the short windows are trained as well.
    """
    documents = []
    for step in range(steps):
        length = LONG_WINDOW if step % 16 in (6, 15) else SHORT_WINDOW
        for window in sources[step % len(sources)].batch(TOKENS_PER_STEP // length, length + 1).tolist():
            documents.append((window, [True] * len(window)))
    return Corpus.of(documents, {"text": "windows of the tiny pair's text and of its target's own continuations"})


def train_head(target: Path, out: Path, sources: Sequence[Windows], steps: int, seed: int,
               learning_rate: float = 3e-3) -> None:
    """Train a head for the target in folder ``target``; write it to the new folder ``out``, in vLLM's layout."""
    work = out.with_name(out.name + ".run")
    make_corpus(sources, steps).write(work / "corpus")
    settings = Settings(
        target=str(target), corpus=str(work / "corpus"), layers=LAYERS, depths=K_TRAIN, embedding="full", refused_weight=1.0,
        mask_token_id=MASK_ID, lr=learning_rate, embedding_lr=learning_rate, warmup=0.05, epochs=1,
        tokens_per_step=TOKENS_PER_STEP, max_length=LONG_WINDOW + 1, seed=seed, device="cpu",
    )  # fmt: skip
    Trainer(settings, work / "run", formats=("vllm",)).run()
    (work / "run" / "head-vllm").rename(out)
    shutil.rmtree(work)


def load_head(folder: Path, target: LlamaForCausalLM) -> tuple[Head, Tensor]:
    """The saved (bf16-rounded) weights and LM head, in float32; every tensor is consumed and every parameter set."""
    loaded = load_file(folder / "model.safetensors")
    tensors = {name.replace("midlayer.", "layers.0."): t.float() for name, t in loaded.items()}
    lm_head = tensors.pop("lm_head.weight")
    shape = Shape.of_target(target.config, LAYERS, NUM_AUX)
    head = Head(
        shape, target.model.embed_tokens.weight, mask_token_id=MASK_ID, embedding="full",
        positions=shape.max_position_embeddings,
    )  # fmt: skip
    missing, unknown = head.load_state_dict(tensors, strict=False)
    assert missing == ["aux_scale"] and not unknown, (missing, unknown)  # aux_scale is folded into the file: it stays 1
    return head.eval().requires_grad_(False), lm_head
