"""SGLang's way in: the entry point of group ``sglang.srt.plugins``.

SGLang calls :func:`activate` once in every process, and swallows any exception. Nothing here may therefore fail
quietly: a problem found while registering is kept and raised when PEAGLE is asked for.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

_activated = False


def activate() -> None:
    """Register the PEAGLE algorithm, and the CPU reference platform where SGLang has no kernels of its own."""
    global _activated
    if _activated:
        return
    _activated = True
    from sgl_peagle import cpu

    if cpu.is_needed():
        cpu.install()
    try:
        from sgl_peagle.algorithm import register

        register()
    except Exception as error:  # a host too different to register with: SGLang must still start without PEAGLE
        logger.exception("sgl-peagle could not register PEAGLE")
        _register_refusal(error)


def _register_refusal(error: Exception) -> None:
    """Make ``--speculative-algorithm PEAGLE`` fail with the reason instead of "unknown algorithm"."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sgl_peagle.errors import PEagleError
    from sgl_peagle.host import check_host

    def refusal() -> PEagleError:
        return PEagleError(
            "sgl-peagle could not register with this SGLang",
            str(error),
            "report it with both versions; servers without PEAGLE are not affected",
        )

    def refuse(_server_args: object) -> None:
        check_host()
        raise refusal() from error

    @SpeculativeAlgorithm.register("PEAGLE", supports_overlap=True, validate_server_args=refuse)
    def _worker(_server_args: object) -> type:
        raise refusal()
