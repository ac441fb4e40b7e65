"""Reference CPU platform: runs SGLang's engine with speculative decoding on a CPU without AMX.

Stock SGLang can serve from a CPU, but its speculative path there needs the AMX build of ``sgl_kernel``.  This
package supplies what is missing in plain torch: the ops (:mod:`.sgl_kernel_ops`), one attention backend for every
forward mode (:mod:`.attention`) and a few host patches (:mod:`.patches`).  It exists for tests and demos.

There are two moments to act, because SGLang imports ``sgl_kernel`` while its engine modules are being imported,
which is before it loads general plugins:

* :func:`early_setup` must run before those imports.  It is an entry point of group ``sglang.srt.platforms``, which
  SGLang evaluates during ``import sglang``, in every process (spawned ones too).
* :func:`install` does the rest and belongs in a general plugin (group ``sglang.srt.plugins``).

Code that calls :func:`install` before it touches ``sglang.Engine`` needs neither entry point, as long as child
processes are forked.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os

logger = logging.getLogger("sgl_peagle.cpu")

_early_done = False
_installed = False


def is_needed() -> bool:
    """True if SGLang was told to use the CPU engine here and could not do so alone.

    That is: ``SGLANG_USE_CPU_ENGINE=1`` (the host's own test), no accelerator visible, and no CPU build of
    ``sgl_kernel`` to import.  Costs one environment lookup where the CPU engine is not asked for.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") != "1":
        return False
    if _early_done:
        return True
    import torch

    return not torch.accelerator.is_available() and not _has_real_kernels()


def early_setup() -> None:
    """Apply the changes that must precede the import of SGLang's engine.  Idempotent; nothing unless needed.

    Returns None, which tells SGLang's platform discovery that no out-of-tree platform is activated: the host stays
    on its own CPU platform.  Imports nothing of SGLang, since it runs in the middle of ``import sglang``.
    """
    global _early_done
    if _early_done or not is_needed():
        return
    _apply(early=True)
    _early_done = True


def install() -> None:
    """Activate the platform in this process.  Idempotent; call only where :func:`is_needed` says so."""
    global _installed
    if _installed:
        return
    early_setup()
    _apply(early=False)
    _installed = True
    logger.warning("reference CPU platform active: plain-torch stand-ins, for tests and demos, not for speed")


def _apply(early: bool) -> None:
    from .patches import PATCHES

    for patch in PATCHES:
        if patch.early == early:
            patch.apply()
            logger.info("reference CPU platform replaces %s: %s", patch.name, patch.reason)


def _has_real_kernels() -> bool:
    """Whether an installed ``sgl_kernel`` is its CPU build.  A CUDA wheel fails to import here or lacks the ops."""
    if importlib.util.find_spec("sgl_kernel") is None:
        return False
    try:
        module = importlib.import_module("sgl_kernel")
    except Exception:  # a CUDA wheel without CUDA libraries may raise anything, not only ImportError
        return False
    return hasattr(module, "assign_req_to_token_pool_cpu")
