"""Small targets, documents and heads for the tests of the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from sgl_peagle.train.attention import sdpa_plan
from sgl_peagle.train.batches import Batch, Document, training_batch
from sgl_peagle.train.corpus import Corpus
from sgl_peagle.train.loop import Trainer
from sgl_peagle.train.model import Head, Shape
from sgl_peagle.train.partition import LossSettings
from sgl_peagle.train.rows import Cod, supervised
from sgl_peagle.train.settings import Settings
from sgl_peagle.train.target import Target

VOCAB, MASK = 61, 60


def save_target(folder: Path) -> Path:
    """A random target of 7 layers whose sizes all differ; its hidden states are far from unit scale."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=40, num_hidden_layers=7, num_attention_heads=6,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(7)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def load_target(folder: Path) -> Target:
    return Target(str(folder), torch.device("cpu"), torch.float32)


def documents(count: int, n: int, seed: int = 0, strict: bool = True) -> list[Document]:
    """Random texts of different lengths up to n + 1 tokens, the last two thirds of each the target's."""
    random = np.random.default_rng(seed)
    found = []
    for sample in range(count):
        length = n + 1 - sample * (n // (2 * count))
        marks = np.arange(length) >= length // 3
        found.append(Document(sample, random.integers(3, MASK, length), supervised(marks, strict)))
    return found


def corpus(count: int, n: int, seed: int = 0) -> Corpus:
    texts = documents(count, n, seed)
    return Corpus.of(
        ((d.tokens.tolist(), (np.arange(len(d.tokens)) >= len(d.tokens) // 3).tolist()) for d in texts), {"what": "test"}
    )


def make_head(target: Target, layers: int = 2, mask: int | None = MASK, seed: int = 0, **options: Any) -> Head:
    """A head with random norms, so that a forgotten one shows."""
    shape = Shape.of_target(target.config, layers, len(target.aux_layer_ids))
    head = Head(shape, target.embedding, mask_token_id=mask, positions=256, **options)
    random = torch.Generator().manual_seed(seed)
    head.start(torch.randn(50, 3 * shape.hidden_size, generator=random) * 3, target.norm, random)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn(parameter.shape, generator=random) * 0.3)
            elif parameter.dim() == 2 and name != "fc.weight" and not name.startswith("embed"):
                parameter.mul_(10)  # real differences between rows
    return head


def gradients(head: Head) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in head.named_parameters() if p.grad is not None}


def batch_of(texts: list[Document], cod: Cod, seed: int = 0) -> Batch:
    return training_batch(texts, seed, 0, cod)


def loss_settings(target: Target, **options: Any) -> LossSettings:
    return LossSettings(target.lm_head, **options)


planner = sdpa_plan


def place_of(folder: Path) -> Path:
    """A folder with a target and a corpus."""
    save_target(folder / "target")
    corpus(12, 40).write(folder / "corpus")
    return folder


def settings_of(place: Path, **changes: Any) -> Settings:
    options: dict[str, Any] = dict(
        target=str(place / "target"), corpus=str(place / "corpus"), layers=2, depths=4, mask_token_id=MASK, steps=6,
        tokens_per_step=80, max_length=64, log_every=2, device="cpu", seed=3, refused_weight=1.0,
    )  # fmt: skip
    if changes.get("method") == "eagle3":
        options |= {"layers": 1, "mask_token_id": None}
    return Settings(**(options | changes))


def quiet(_: str) -> None:
    pass


def run(settings: Settings, out: Path, stop_after: int = 0, **options: Any) -> Trainer:
    trainer = Trainer(settings, out, echo=quiet, **options)
    trainer.run(lambda step: trainer.interrupt() if step == stop_after else None)
    return trainer
