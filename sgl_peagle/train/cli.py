"""``sgl-peagle train``: subcommands by name, imported only when used."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Optional

import click

from sgl_peagle.errors import PEagleError

#: Subcommand -> where it is.
COMMANDS = {
    "run": "sgl_peagle.train.cli:run",
    "data": "sgl_peagle.train.data_cli:data",
    "join": "sgl_peagle.train.data_cli:join",
    "evaluate": "sgl_peagle.train.data_cli:evaluate",
}


class _Lazy(click.Group):
    """A group whose subcommands are imported on use: a missing one fails by itself."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> Optional[click.Command]:
        if cmd_name not in COMMANDS:
            return None
        module, name = COMMANDS[cmd_name].split(":")
        try:
            return getattr(importlib.import_module(module), name)
        except ImportError as error:
            reason = str(error)

            @click.command(cmd_name, short_help=f"not installed: {reason}", context_settings={"ignore_unknown_options": True})
            @click.argument("_rest", nargs=-1, type=click.UNPROCESSED)
            def missing(_rest: tuple[str, ...]) -> None:
                raise click.ClickException(
                    f"`train {cmd_name}` is not available\n  why: {reason}\n  fix: install what is missing; the trainer needs torch, transformers and tqdm"
                )

            return missing


@click.command(cls=_Lazy)
def train() -> None:
    """Train P-EAGLE heads, and the EAGLE-3 heads they are compared with."""


@click.command()
@click.option("--target", required=True, help="Folder or hub id of the target.")
@click.option("--target-name", help="Hub id to record in the head, where --target is a folder.")
@click.option("--corpus", required=True, type=click.Path(path_type=Path), help="Folder written by `train data`.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder of the run; must not exist.")
@click.option("--resume", is_flag=True, help="Go on with the interrupted run in --out.")
@click.option("--method", type=click.Choice(["peagle", "eagle3"]), default="peagle", show_default=True)
@click.option("--layers", type=int, help="Decoder layers of the head.  [default: 4; eagle3: 1]")
@click.option("--intermediate-size", type=int, help="Width of the layers' MLPs.  [default: the target's]")
@click.option("--depths", type=int, help="K, drafts learned per round; eagle3: unrolled steps.  [default: 8; eagle3: 7]")
@click.option("--cod-rate", type=float, default=0.7, show_default=True, help="Depth d keeps this to the power d of its rows ...")
@click.option("--cod-floor", type=float, default=0.2, show_default=True, help="... but no smaller share than this.")
@click.option("--reference-weight", is_flag=True, help="Also train the row behind the end of a turn.")
@click.option("--mask-token-id", type=int, help="Reserved id that never occurs in text (SmolLM2: 16).")
@click.option("--aux-layer", "aux_layers", type=int, multiple=True, help="Capture point; repeat.  [default: 2, L/2, L-3]")
@click.option("--embedding", type=click.Choice(["mask_row", "full"]),
              help="Train the MASK row alone (compact head), or a copy of the whole embedding.  [default: mask_row; eagle3: neither]")  # fmt: skip
@click.option("--loss", type=click.Choice(["kl", "ce"]), default="kl", show_default=True)
@click.option("--refused-weight", type=float,
              help="Factor of the rows behind a wrong draft of the head: an engine throws their drafts away.  [default: 0.1; eagle3: 1]")  # fmt: skip
@click.option("--optimizer", type=click.Choice(["muon", "adamw"]), default="muon", show_default=True,
              help="For the matrices; everything else is AdamW's.")  # fmt: skip
@click.option("--matrix-lr", type=float, default=0.02, show_default=True, help="Muon's peak learning rate.")
@click.option("--lr", type=float, default=2e-3, show_default=True, help="AdamW's peak learning rate.")
@click.option("--embedding-lr", type=float, default=1.5e-4, show_default=True)
@click.option("--clip", type=float, default=1.0, show_default=True, help="Largest norm of the gradient.")
@click.option("--weight-decay", type=float, default=0.0, show_default=True,
              help="Of matrices; norms, MASK row, mask_hidden and embedding never decay.")  # fmt: skip
@click.option("--noise", type=float, default=0.0, show_default=True,
              help="Uniform noise on the hidden states that are fed, +- so many times each channel's scale.")  # fmt: skip
@click.option("--ema", type=float, default=0.0, show_default=True,
              help="Decay of a running mean of the weights, say 0.999; the mean is what is evaluated and exported.")  # fmt: skip
@click.option("--minutes", type=float, help="Length of the whole command; the number of steps follows from the measured speed.")
@click.option("--steps", type=int, help="Length of the run in optimiser steps.")
@click.option("--epochs", type=float, help="Length of the run in passes over the corpus.")
@click.option("--tokens-per-step", type=int, default=16384, show_default=True)
@click.option("--max-length", type=int, default=2048, show_default=True, help="Documents are cut to so many tokens.")
@click.option("--holdout", type=int, default=0, show_default=True, help="Last documents, kept for evaluation.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--segments", type=int, default=1, show_default=True, help="Sequence partition: less memory, same gradient.")
@click.option("--partition", type=click.Choice(["recompute", "cached"]), default="recompute", show_default=True,
              help="With segments: run the context rows again, or keep their keys with gradient.")  # fmt: skip
@click.option("--attention", type=click.Choice(["auto", "flex", "sdpa"]), default="auto", show_default=True)
@click.option("--chunk", type=int, default=4096, show_default=True, help="Rows whose logits exist at once.")
@click.option("--compile-loss", is_flag=True, help="Fuse the loss with torch.compile.")
@click.option("--device", default="auto", show_default=True)
@click.option("--log-every", type=int, default=20, show_default=True)
@click.option("--checkpoint-every", type=int, default=1000, show_default=True)
@click.option("--eval-every", type=int, help="Steps between evaluations of the held-out documents.  [default: 1/8 of the run]")
@click.option("--select", type=click.Choice(["last", "best"]), default="last", show_default=True,
              help="Export the last step's weights, or those of the evaluation with the longest walk.")  # fmt: skip
@click.option("--served-k", type=int, help="Drafts per round that the walk is quoted and compared at.  [default: 7, or --depths]")
@click.option("--to", "formats", multiple=True, type=click.Choice(["peagle", "vllm", "speculators"]), default=["peagle"],
              help="Formats to export; repeat.  [default: peagle]")  # fmt: skip
def run(
    target: str, target_name: Optional[str], corpus: Path, out: Path, resume: bool, method: str, layers: Optional[int],
    intermediate_size: Optional[int], depths: Optional[int], cod_rate: float, cod_floor: float, reference_weight: bool, mask_token_id: Optional[int],
    aux_layers: tuple[int, ...], embedding: Optional[str], loss: str, refused_weight: Optional[float], optimizer: str, matrix_lr: float, lr: float,
    embedding_lr: float, clip: float, weight_decay: float, noise: float, ema: float, minutes: Optional[float], steps: Optional[int],
    epochs: Optional[float], tokens_per_step: int, max_length: int, holdout: int, seed: int, segments: int,
    partition: str, attention: str, chunk: int, compile_loss: bool, device: str, log_every: int, checkpoint_every: int,
    eval_every: Optional[int], select: str, served_k: Optional[int], formats: tuple[str, ...],
) -> None:  # fmt: skip
    """Train a head on a corpus of the target's own answers, and export it.

    The target runs in the same process, frozen. Ctrl-C finishes the step and writes a checkpoint; the same command with
    --resume goes on. Exit status: 0 trained and exported, 1 refused, 2 wrong usage, 130 or 143 interrupted.
    """
    from sgl_peagle.train.loop import Trainer
    from sgl_peagle.train.settings import Settings

    try:
        settings = Settings(
            target=target, corpus=str(corpus), method=method, layers=layers, intermediate_size=intermediate_size,
            depths=depths, cod_ratio=cod_rate, cod_floor=cod_floor, strict=not reference_weight,
            embedding=embedding, mask_token_id=mask_token_id, aux_layer_ids=aux_layers or None,
            loss=loss, refused_weight=refused_weight, optimizer=optimizer, matrix_lr=matrix_lr, lr=lr, embedding_lr=embedding_lr,
            clip=clip, weight_decay=weight_decay, noise=noise, ema=ema,
            minutes=minutes, steps=steps, epochs=epochs, tokens_per_step=tokens_per_step, max_length=max_length,
            holdout=holdout, seed=seed, segments=segments, partition=partition, attention=attention, chunk=chunk,
            compile_loss=compile_loss, device=device, log_every=log_every, checkpoint_every=checkpoint_every, eval_every=eval_every, select=select, served=served_k,
        )  # fmt: skip
        trainer = Trainer(
            settings, out, resume=resume, formats=tuple(formats), target_name=target_name, echo=click.echo
        )
        stopped = trainer.run()
    except PEagleError as error:
        raise click.ClickException(str(error)) from error
    if stopped is not None:
        sys.exit(128 + stopped)
