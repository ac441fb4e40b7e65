"""The command ``sgl-peagle``.

Exit status of every subcommand: 0 all is well (warnings included), 1 refused or a check failed (the reason is on
stderr, or in the JSON with ``--json``), 2 wrong usage, 130 or 143 interrupted.
"""

from __future__ import annotations

import json
import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, NoReturn, Optional

import click

from sgl_peagle import __version__
from sgl_peagle.errors import PEagleError
from sgl_peagle.train.cli import train


@click.group()
@click.version_option(__version__, prog_name="sgl-peagle")
def main() -> None:
    """Tools around P-EAGLE heads for SGLang.

    Exit status: 0 all is well (warnings included), 1 refused or a check failed, 2 wrong usage.
    """


main.add_command(train)


@main.command()
def doctor() -> None:
    """Check that the installed SGLang is one that this release supports."""
    from sgl_peagle.host import HOST_SYMBOLS, check_host, sglang_version

    try:
        check_host()
    except PEagleError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"SGLang {sglang_version()}: supported, {len(HOST_SYMBOLS)} host symbols as expected")


def _fail(error: PEagleError, as_json: bool) -> NoReturn:
    if as_json:
        click.echo(json.dumps({"ok": False, "error": {"what": error.what, "why": error.why, "fix": error.fix}}, indent=2))
        sys.exit(1)
    raise click.ClickException(str(error)) from error


@contextmanager
def _signals_exit() -> Iterator[None]:
    """Let SIGINT and SIGTERM end the command through ``finally`` clauses, with the usual status 128 + number."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda n, _frame: sys.exit(128 + n)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@main.command()
@click.argument("head")
@click.option("--revision", help="Revision of a Hugging Face repository.")
@click.option("--target", help="Folder or hub id of the target, to check the head against (no weights are read).")
@click.option("--mask-token-id", type=click.IntRange(min=0), help="For heads that do not record it (SpecForge).")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def inspect(head: str, revision: Optional[str], target: Optional[str], mask_token_id: Optional[int], as_json: bool) -> None:
    """Describe and check the P-EAGLE head in folder or hub id HEAD, all weights included.

    Exit status: 0 no check failed, 1 the head is refused or a check failed, 2 wrong usage.
    """
    from sgl_peagle.heads.report import inspect_head

    try:
        report = inspect_head(head, revision=revision, mask_token_id=mask_token_id, target=target)
    except PEagleError as error:
        _fail(error, as_json)
    click.echo(json.dumps(report.as_json(), indent=2) if as_json else report.as_text())
    sys.exit(0 if report.ok else 1)


@main.command()
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST", type=click.Path(path_type=Path))
@click.option("--to", required=True, type=click.Choice(["peagle", "vllm", "speculators"]), help="Format to write.")
@click.option("--revision", help="Revision of a Hugging Face repository SRC.")
@click.option("--mask-token-id", type=click.IntRange(min=0), help="For heads that do not record it (SpecForge).")
@click.option("--target", help="Folder or hub id of the target: checked against the head, read where rows are needed.")
@click.option("--embed-from-target", is_flag=True, help="Keep only the MASK row of the embedding (--to peagle).")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Cast the weights.")
@click.option("--force", is_flag=True, help="Replace the result of an earlier conversion at DST.")
@click.option("--dry-run", is_flag=True, help="Check and say what would be written; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def convert(
    source: str,
    destination: Path,
    to: str,
    revision: Optional[str],
    mask_token_id: Optional[int],
    target: Optional[str],
    embed_from_target: bool,
    dtype: Optional[str],
    force: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Write the P-EAGLE head in folder or hub id SRC to folder DST in another format.

    Exit status: 0 written and read back (or, with --dry-run, could be), 1 refused, 2 wrong usage.
    """
    from sgl_peagle.heads import convert as conversion
    from sgl_peagle.heads.reader import read_head, revision_of

    try:
        head = read_head(source, revision, mask_token_id)
        plan = conversion.make_plan(head, to, target=target, embed_from_target=embed_from_target, dtype=dtype)
        if dry_run:
            conversion.check_destination(plan, destination.expanduser().absolute(), force)
            result: dict[str, Any] = {"tensors": len(plan.outputs), "bytes": plan.size}
        else:
            with _signals_exit():
                result = conversion.convert(
                    plan, destination, origin=source, revision=revision_of(head.folder), force=force
                )
    except PEagleError as error:
        _fail(error, as_json)
    if as_json:
        click.echo(json.dumps({"ok": True, "dry_run": dry_run, "notes": plan.notes, **result}, indent=2))
        return
    for note in plan.notes:
        click.echo(f"note: {note}")
    done = "would write" if dry_run else "wrote and verified"
    click.echo(
        f"{done} {destination}: {plan.head.format.title} -> {plan.to.title}, {len(plan.outputs)} tensors, "
        f"{plan.size / 1e6:.1f} MB"
    )


if __name__ == "__main__":
    main()
