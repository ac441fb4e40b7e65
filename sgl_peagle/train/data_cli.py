"""The commands ``sgl-peagle train data`` and ``sgl-peagle train evaluate``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Optional

import click

from sgl_peagle.errors import PEagleError

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command()
@click.option("--target", type=_FOLDER, required=True, help="Folder of the target; it answers all prompts itself.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="New folder, or one to go on with.")
@click.option("--gsm8k", type=_FILE, help="JSONL with GSM8K's training questions.")
@click.option("--prompts", "extra", type=_FILE, multiple=True, help="JSONL with further training prompts (repeatable).")
@click.option("--synthetic", type=click.IntRange(min=0), default=0, help="Prompts that the target makes up.")
@click.option("--tune", type=click.IntRange(min=0), default=500, show_default=True, help="Made-up prompts kept for tuning.")
@click.option("--code", type=click.IntRange(min=0), default=0, help="Short code tasks from the standard library.")
@click.option("--long", "long_", type=click.IntRange(min=0), default=0, help="Long code tasks (1000 to 1800 tokens).")
@click.option(
    "--held-out", type=_FILE, multiple=True,
    help="JSONL with evaluation prompts (repeatable): answered for evaluation, kept out of training.",
)  # fmt: skip
@click.option("--long-code", type=click.IntRange(min=0), default=16, show_default=True, help="Evaluation prompts per context length.")
@click.option("--gsm8k-test", type=click.IntRange(min=0), default=200, show_default=True, help="Prompts answered of a held-out gsm8k_test.")
@click.option("--backend", type=click.Choice(["auto", "sglang", "transformers"]), default="auto", show_default=True)
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=512, show_default=True)
@click.option("--mask-token-id", type=click.IntRange(min=0), default=16, show_default=True, help="The head's MASK id; no document may hold it.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--shard", type=click.IntRange(min=1), default=2048, show_default=True, help="Conversations per file.")
@click.option("--minutes", type=click.FloatRange(min=0), help="Begin no further shard after so long, and write what there is.")
def data(
    target: Path,
    out: Path,
    gsm8k: Optional[Path],
    extra: tuple[Path, ...],
    synthetic: int,
    tune: int,
    code: int,
    long_: int,
    held_out: tuple[Path, ...],
    long_code: int,
    gsm8k_test: int,
    backend: str,
    max_new_tokens: int,
    mask_token_id: int,
    seed: int,
    shard: int,
    minutes: Optional[float],
) -> None:
    """Make token files for training and evaluation: prompts, and the target's own answers to them.

    Interrupted runs go on where they stopped when the command is given again.
    """
    begun = time.monotonic()
    from sgl_peagle.train.regenerate import Run, Settings, file_hash, target_hash
    from sgl_peagle.train.synthesis import Sources

    try:
        sources = Sources(gsm8k, extra, held_out, gsm8k_test)
        files = {f"gsm8k {gsm8k.name}": file_hash(gsm8k)} if gsm8k else {}
        files |= {f"prompts {file.name}": file_hash(file) for file in extra}
        files |= {f"held out {file.name}": file_hash(file) for file in held_out}
        settings = Settings(
            target_hash(target), files, backend, seed, synthetic, tune, code, long_, long_code, gsm8k_test,
            max_new_tokens, mask_token_id, shard,
        )  # fmt: skip
        Run(out, target, settings, sources, minutes=minutes, begun=begun).everything()
    except PEagleError as error:
        raise click.ClickException(str(error)) from error


@click.group()
def main() -> None:
    """Data and evaluation of P-EAGLE heads."""


main.add_command(data)

if __name__ == "__main__":
    main()
