"""The commands ``sgl-peagle train data`` and ``sgl-peagle train evaluate``."""

from __future__ import annotations

import datetime
import json
import time
from pathlib import Path
from typing import Any, Optional

import click

from sgl_peagle import __version__
from sgl_peagle.errors import PEagleError
from sgl_peagle.train.crew import Workers

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


def key_values(entries: tuple[str, ...]) -> dict[str, Any]:
    """KEY=VALUE entries as keyword arguments."""
    found: dict[str, Any] = {}
    for entry in entries:
        key, _, value = entry.partition("=")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


@click.command()
@click.option("--target", type=_FOLDER, required=True, help="Folder of the target; it answers all prompts itself.")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), required=True,
    help="New folder, or one to go on with.",
)  # fmt: skip
@click.option("--gsm8k", type=_FILE, help="JSONL with GSM8K's training questions.")
@click.option("--prompts", "extra", type=_FILE, multiple=True, help="JSONL with further training prompts (repeatable).")
@click.option("--synthetic", type=click.IntRange(min=0), default=0, help="Prompts that the target makes up.")
@click.option(
    "--tune", type=click.IntRange(min=0), default=500, show_default=True,
    help="Made-up prompts kept for tuning.",
)  # fmt: skip
@click.option("--code", type=click.IntRange(min=0), default=0, help="Short code tasks from the standard library.")
@click.option("--long", "long_", type=click.IntRange(min=0), default=0, help="Long code tasks (1000 to 1800 tokens).")
@click.option(
    "--held-out", type=_FILE, multiple=True,
    help="JSONL with evaluation prompts (repeatable): answered for evaluation, kept out of training.",
)  # fmt: skip
@click.option("--skip-evaluation", is_flag=True, help="Do not answer the evaluation prompts, only keep them out.")
@click.option(
    "--long-code", type=click.IntRange(min=0), default=16, show_default=True,
    help="Evaluation prompts per context length.",
)  # fmt: skip
@click.option(
    "--gsm8k-test", type=click.IntRange(min=0), default=200, show_default=True,
    help="Prompts answered of a held-out gsm8k_test.",
)  # fmt: skip
@click.option("--backend", type=click.Choice(["auto", "sglang", "transformers"]), default="auto", show_default=True)
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=512, show_default=True)
@click.option(
    "--mask-token-id", type=click.IntRange(min=0), default=16, show_default=True,
    help="The head's MASK id; no document may hold it.",
)  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--shard", type=click.IntRange(min=1), default=512, show_default=True, help="Conversations per file.")
@click.option(
    "--engine", multiple=True, metavar="KEY=VALUE",
    help="Further argument of SGLang's engine (value as JSON or text).",
)  # fmt: skip
@click.option(
    "--workers", type=click.IntRange(min=1), default=1, show_default=True,
    help="Processes with a target each, spread over the visible GPUs.",
)  # fmt: skip
@click.option(
    "--minutes", type=click.FloatRange(min=0),
    help="Begin no further shard after so long, and write what there is.",
)  # fmt: skip
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
    skip_evaluation: bool,
    long_code: int,
    gsm8k_test: int,
    backend: str,
    max_new_tokens: int,
    mask_token_id: int,
    seed: int,
    shard: int,
    engine: tuple[str, ...],
    workers: int,
    minutes: Optional[float],
) -> None:
    """Make token files for training and evaluation: prompts, and the target's own answers to them.

    Interrupted runs go on where they stopped when the command is given again. A small target leaves a GPU idle between
    its steps: about three --workers per GPU keep it busy.
    """
    begun = time.monotonic()
    crew: Optional[Workers] = None
    if workers > 1 and (target / "config.json").is_file() and not (out / "train").exists():
        # Before anything else: a target takes about a minute to start.
        crew = Workers(workers, backend, target, seed, key_values(engine))
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
        Run(
            out, target, settings, sources, minutes=minutes, begun=begun, engine=key_values(engine),
            evaluate=not skip_evaluation, crew=crew,
        ).everything()  # fmt: skip
    except PEagleError as error:
        raise click.ClickException(str(error)) from error
    finally:
        if crew is not None:
            crew.close()


@click.command()
@click.option(
    "--head", "heads", type=_FOLDER, multiple=True, required=True,
    help="P-EAGLE or EAGLE-3 head (repeatable).",
)  # fmt: skip
@click.option("--target", required=True, help="Folder or hub id of the target.")
@click.option("--corpus", "corpora", type=_FOLDER, multiple=True, required=True, help="Evaluation corpus (repeatable).")
@click.option("--k", "ks", default="3,5,7", show_default=True, help="Drafts per round, comma separated.")
@click.option("--device", help="Default: cuda where there is a GPU, else cpu.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), help="Default: bfloat16 on a GPU, else float32.")
@click.option("--limit", type=click.IntRange(min=1), help="Only so many documents of each corpus.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="JSON file to write; must not exist.")
def evaluate(
    heads: tuple[Path, ...],
    target: str,
    corpora: tuple[Path, ...],
    ks: str,
    device: Optional[str],
    dtype: Optional[str],
    limit: Optional[int],
    out: Optional[Path],
) -> None:
    """Teacher-forced acceptance of heads along the target's own answers (no engine)."""
    import torch

    from sgl_peagle.train.acceptance import Evaluator, report, table
    from sgl_peagle.train.corpus import Corpus

    try:
        numbers = sorted({int(k) for k in ks.split(",")})
        assert numbers[0] >= 1
    except (ValueError, AssertionError) as error:
        raise click.BadParameter(
            f"{ks!r}\n  why: a head is judged at numbers of drafts\n  fix: give them, such as 3,5,7", param_hint="--k"
        ) from error
    if out is not None and out.exists():
        raise click.ClickException(f"{out} exists\n  why: it may hold earlier results\n  fix: choose another file")
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    results: dict[str, dict[str, Any]] = {}
    try:
        evaluator = Evaluator(target, heads, where, getattr(torch, dtype) if dtype else None)
        for folder in corpora:
            corpus = Corpus.open(folder)
            for path, documents in zip(heads, evaluator.run(corpus, numbers[-1], limit=limit)):
                results.setdefault(str(path), {})[folder.name] = report(documents, numbers)
    except PEagleError as error:
        raise click.ClickException(str(error)) from error
    short = results if len({path.name for path in heads}) < len(heads) else {Path(n).name: r for n, r in results.items()}
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        environment = {
            "tool": f"sgl-peagle {__version__}",
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(where) if where.startswith("cuda") else where,
            "dtype": dtype or ("bfloat16" if where.startswith("cuda") else "float32"),
            "documents_per_set_at_most": limit,
            "date": datetime.date.today().isoformat(),
        }
        written = {"kind": "teacher-forced", "environment": environment, "heads": short}
        out.write_text(json.dumps(written, indent=1) + "\n")
    click.echo(table(short))


@click.group()
def main() -> None:
    """Data and evaluation of P-EAGLE heads."""


main.add_command(data)
main.add_command(evaluate)

if __name__ == "__main__":
    main()


@click.command()
@click.argument("corpora", nargs=-1, required=True, type=_FOLDER)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="New folder.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the order in which the documents are mixed.")
def join(corpora: tuple[Path, ...], out: Path, seed: int) -> None:
    """Join CORPORA (folders of token files) into one, its documents mixed."""
    from sgl_peagle.train.corpus import Corpus

    try:
        joined = Corpus.join([Corpus.open(folder) for folder in corpora], seed)
        joined.write(out)
    except PEagleError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"{out}: {len(joined)} documents, {int(joined.assistant.sum())} assistant tokens")
