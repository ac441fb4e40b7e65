"""Which format a head is in, by what its config says; what is not P-EAGLE is refused by name."""

from __future__ import annotations

from typing import Any, Iterable, Mapping

from sgl_peagle.errors import PEagleError
from sgl_peagle.heads.formats import nemo, peagle, specforge, vllm
from sgl_peagle.heads.formats.base import HeadFormat
from sgl_peagle.heads.formats.speculators import SpeculatorsFormat

#: Every format that is read.
FORMATS: tuple[HeadFormat, ...] = (
    vllm.VllmFormat(),
    SpeculatorsFormat(),
    specforge.SpecForgeFormat(),
    nemo.NemoFormat(),
    peagle.PEagleFormat(),
)

_BY_ARCHITECTURE = {
    vllm.ARCHITECTURE: "vllm",
    specforge.ARCHITECTURE: "specforge",
    nemo.ARCHITECTURE: "nemo",
    peagle.ARCHITECTURE: "peagle",
}

#: Architectures that speculators writes or has written for its P-EAGLE heads.
_SPECULATORS_ARCHITECTURES = ("PEagleDraftModel", "PEagleSpeculator")


def format_named(name: str) -> HeadFormat:
    """The format of a short name."""
    return next(found for found in FORMATS if found.name == name)


def config_format(raw: Mapping[str, Any], source: str) -> HeadFormat:
    """The format that a config.json says it is in.

    Raises:
        PEagleError: It says nothing, two things at once, or that it is another kind of draft model.
    """
    architectures = raw.get("architectures")
    if architectures is not None and not (
        isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)
    ):
        raise PEagleError(f"{source}: architectures is {architectures!r}", "a list of names is needed", "correct it")
    _refuse_other_methods(raw, architectures or [], source)
    if "speculators_model_type" in raw:
        foreign = [name for name in architectures or [] if name not in _SPECULATORS_ARCHITECTURES]
        if foreign:
            raise PEagleError(
                f"{source}: speculators_model_type says speculators, architectures says {', '.join(foreign)}",
                "the two formats differ in names and in what their layer ids count; neither is guessed",
                "use the head as its trainer saved it, or remove the wrong key",
            )
        return format_named("speculators")
    known = [name for name in architectures or [] if name in _BY_ARCHITECTURE]
    if len(architectures or []) == 1 and known:
        return format_named(_BY_ARCHITECTURE[known[0]])
    expected = "; ".join(f"{found.title}: {found.evidence}" for found in FORMATS)
    raise PEagleError(
        f"{source}: architectures is {architectures!r}, which names no format of P-EAGLE heads",
        f"known are {expected}",
        "check that the path is a P-EAGLE head and not its target or another draft model",
    )


def detect(raw: Mapping[str, Any], names: Iterable[str], source: str) -> HeadFormat:
    """The format of a head, by its config, checked against its tensor names.

    Args:
        raw: The decoded config.json.
        names: Names of the tensors in the files.
        source: What to call the config in messages.

    Raises:
        PEagleError: As :func:`config_format`; or the tensors are not P-EAGLE's, or another format's.
    """
    found, names = config_format(raw, source), list(names)
    if not any(found.canonical(name) == "mask_hidden" for name in names):
        raise PEagleError(
            f"{source}: the weights have no tensor mask_hidden",
            "without its learned h_shared a head cannot draft in parallel; this is a plain EAGLE-3 head",
            "serve it with --speculative-algorithm EAGLE3, or use a P-EAGLE head",
        )
    styles = {
        "prefix model. (NeMo Automodel)": (any(n.startswith("model.") for n in names), ("nemo",)),
        "midlayer (vLLM/Amazon)": (any(n.startswith("midlayer.") for n in names), ("vllm",)),
        "embed_mask_row (sgl-peagle)": ("embed_mask_row" in names, ("peagle",)),
    }
    for style, (present, formats) in styles.items():
        if present and found.name not in formats:
            raise PEagleError(
                f"{source} says {found.title} ({found.evidence}), but the tensors have {style}",
                "the formats differ in more than names; neither is guessed",
                "use the config.json that belongs to the weights",
            )
    return found


def _refuse_other_methods(raw: Mapping[str, Any], architectures: list[str], source: str) -> None:
    """Refuse draft models of other methods by name."""

    def refuse(what: str, why: str, fix: str) -> None:
        raise PEagleError(f"{source}: {what}", why, fix)

    kind = raw.get("speculators_model_type", "peagle")
    if kind == "eagle3":
        refuse(
            "speculators_model_type is 'eagle3': a plain EAGLE-3 head",
            "it drafts one token at a time and has no mask_hidden",
            "serve it with --speculative-algorithm EAGLE3",
        )
    if kind != "peagle":
        refuse(
            f"speculators_model_type is {kind!r}, not 'peagle'",
            "other methods need other drafters",
            "use the algorithm that the head was made for",
        )
    for word, name in (("dflash", "DFlash"), ("dspark", "DSpark")):
        if any(word in architecture.lower() for architecture in architectures):
            refuse(
                f"architectures is {architectures}: a {name} head",
                f"{name} drafts whole blocks with bidirectional attention",
                f"serve it with --speculative-algorithm {name.upper()}",
            )
    if raw.get("parallel_draft_step") is not None:
        refuse(
            f"parallel_draft_step is {raw['parallel_draft_step']!r}: a Medusa-style parallel head",
            "it predicts several tokens from one row with extra heads, instead of mask rows",
            "serve it with the engine that it was made for",
        )
    if "medusa_num_heads" in raw or any("medusa" in architecture.lower() for architecture in architectures):
        refuse("a Medusa model", "it has no mask rows", "serve it with the engine that it was made for")
    whole = [a for a in architectures if a.endswith("ForCausalLM") and a not in _BY_ARCHITECTURE]
    if whole:
        pard = raw.get("pard_token") is not None
        refuse(
            f"architectures is {architectures}: a whole language model" + (" (PARD, by its pard_token)" if pard else ""),
            "a P-EAGLE head reads the target's hidden states; "
            + ("a PARD model drafts on its own" if pard else "this looks like a target or a stand-alone draft model"),
            "give the path of a P-EAGLE head",
        )
