"""The command ``sgl-peagle``."""

from __future__ import annotations

import click

from sgl_peagle import __version__
from sgl_peagle.errors import PEagleError


@click.group()
@click.version_option(__version__, prog_name="sgl-peagle")
def main() -> None:
    """Tools around P-EAGLE heads for SGLang."""


@main.command()
def doctor() -> None:
    """Check that the installed SGLang is one that this release supports."""
    from sgl_peagle.host import HOST_SYMBOLS, check_host, sglang_version

    try:
        check_host()
    except PEagleError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"SGLang {sglang_version()}: supported, {len(HOST_SYMBOLS)} host symbols as expected")


@main.command()
@click.argument("head")
@click.option("--revision", help="Revision of a Hugging Face repository.")
def check(head: str, revision: str | None) -> None:
    """Check the head in folder or hub id HEAD without starting a server."""
    from sgl_peagle.heads import read_head

    try:
        found = read_head(head, revision)
    except PEagleError as error:
        raise click.ClickException(str(error)) from error
    config = found.config
    click.echo(f"{found.folder}: P-EAGLE head, {config.num_layers} layers, {len(found.tensors)} tensors")
    click.echo(f"  mask token id {config.mask_token_id}, trained for K={config.k_trained or 'not recorded'}")
    click.echo(f"  reads {config.num_aux} target layers (capture points {config.aux_layer_ids or 'default'})")
    own = [name for name in ("embed_tokens.weight", "lm_head.weight") if found.has(name)]
    click.echo(f"  own: {', '.join(own) or 'neither embedding nor LM head (the target’s are used)'}")
