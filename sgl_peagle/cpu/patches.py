"""Every change that the reference CPU platform makes to SGLang 0.5.23 and torch, in one table (:data:`PATCHES`)."""

from __future__ import annotations

import functools
import importlib.machinery
import os
import sys
import types
from dataclasses import dataclass
from typing import Any, Callable

import torch

# SGLang falls back to this name by itself on a CPU without AMX, and switches graphs off for it.  A name of our
# own would have to be typed by the user and would get neither.
BACKEND_NAME = "torch_native"


@dataclass(frozen=True)
class Patch:
    """One change.  Early ones run in the middle of ``import sglang`` and must not import it."""

    name: str
    reason: str
    apply: Callable[[], None]
    early: bool = False


def _provide_sgl_kernel() -> None:
    from . import sgl_kernel_ops

    module = types.ModuleType("sgl_kernel", sgl_kernel_ops.__doc__)
    # With a spec, importlib.util.find_spec() works.  With neither loader nor search path there is no submodule to
    # find: `import sgl_kernel.anything` fails with the ImportError that the host's own fallbacks expect.
    module.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", loader=None, origin=sgl_kernel_ops.__name__)
    module.__version__ = "0.0.0+sgl.peagle.reference"
    module.__all__ = list(sgl_kernel_ops.EXPORTS)
    module.__dict__.update(sgl_kernel_ops.EXPORTS)
    sys.modules["sgl_kernel"] = module


def _disable_dynamo() -> None:
    if os.environ.setdefault("TORCHDYNAMO_DISABLE", "1") != "1":
        return  # the user wants it on
    # torch.compile reads the variable when it decorates a function.  Functions decorated before this point are
    # reached through the config instead.
    config = sys.modules.get("torch._dynamo.config")
    if config is not None:
        config.disable = True


def _let_idle_threads_sleep() -> None:
    # Read when torch loads its OpenMP runtime, so this reaches the processes that SGLang spawns, not this one.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _register_attention_backend() -> None:
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    def create(runner: Any) -> Any:
        from .attention import ReferenceAttnBackend

        return ReferenceAttnBackend(runner)

    register_attention_backend(BACKEND_NAME)(create)


def _extend_draft_backend_factory() -> None:
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    original = DraftBackendFactory._create_backend

    def _create_backend(
        self: Any, backend_name: str, backend_map: dict, error_template: str, stamps_children: bool = False
    ) -> Any:
        def create() -> tuple[str, Any]:
            from .attention import ReferenceAttnBackend, ReferenceMultiStepDraftBackend

            # Only the container of the step-by-step drafter has children to stamp.
            if stamps_children:
                return BACKEND_NAME, ReferenceMultiStepDraftBackend(
                    self.draft_model_runner, self.topk, self.speculative_num_steps
                )
            return BACKEND_NAME, ReferenceAttnBackend(self.draft_model_runner)

        backend_map = {**backend_map, BACKEND_NAME: create}
        return original(self, backend_name, backend_map, error_template, stamps_children)

    DraftBackendFactory._create_backend = _create_backend


def _gather_without_triton() -> None:
    from sglang.srt.managers import overlap_utils

    from . import sgl_kernel_ops

    overlap_utils.gather_spec_extras = sgl_kernel_ops.gather_spec_extras


def _pack_linear_weights() -> None:
    from sglang.srt.layers.logits_processor import LogitsProcessor
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    from .linear import forget_packed_weights, linear

    apply, lm_head_of = UnquantizedLinearMethod.apply, LogitsProcessor._compute_lm_head

    def packed_apply(self: Any, layer: Any, x: Any, bias: Any = None) -> Any:
        return linear(x, layer.weight, bias) if x.is_cpu else apply(self, layer, x, bias)

    def packed_lm_head(self: Any, hidden: Any, lm_head: Any, embedding_bias: Any = None, **kwargs: Any) -> Any:
        weight = getattr(lm_head, "weight", None)
        plain = hidden.is_cpu and weight is not None and not hasattr(lm_head, "set_lora")
        if plain and hidden.dtype == weight.dtype == torch.float32:
            return linear(hidden, weight)
        return lm_head_of(self, hidden, lm_head, embedding_bias, **kwargs)

    def then_forget(update: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(update)
        def updated(*args: Any, **kwargs: Any) -> Any:
            try:
                return update(*args, **kwargs)
            finally:
                forget_packed_weights()

        return updated

    UnquantizedLinearMethod.apply = packed_apply
    LogitsProcessor._compute_lm_head = packed_lm_head
    updates = [f"update_weights_from_{source}" for source in ("disk", "distributed", "tensor", "ipc")]
    for name in (*updates, "resume_memory_occupation", "check_weights"):
        setattr(SchedulerWeightUpdaterManager, name, then_forget(getattr(SchedulerWeightUpdaterManager, name)))


PATCHES: tuple[Patch, ...] = (
    Patch(
        name="the module sgl_kernel",
        reason="the published wheel is for CUDA and the CPU build needs AMX; the host imports a few of its ops on CPU",
        apply=_provide_sgl_kernel,
        early=True,
    ),
    Patch(
        name="torch.compile (TORCHDYNAMO_DISABLE=1)",
        reason="a few small host functions are compiled on first use, which takes a C++ compiler and half a minute",
        apply=_disable_dynamo,
        early=True,
    ),
    Patch(
        name="OpenMP's busy waiting in spawned processes (OMP_WAIT_POLICY=PASSIVE)",
        reason="with any other process on the cores, spinning threads make every small op wait for the scheduler",
        apply=_let_idle_threads_sleep,
        early=True,
    ),
    Patch(
        name=f"attention backend {BACKEND_NAME!r} (through the backend registry)",
        reason="the stock one has no target verify and no draft extend, and reads the window back from the KV cache",
        apply=_register_attention_backend,
    ),
    Patch(
        name="DraftBackendFactory._create_backend",
        reason=f"its list of drafter backends is fixed and lacks {BACKEND_NAME!r}",
        apply=_extend_draft_backend_factory,
    ),
    Patch(
        name="overlap_utils.gather_spec_extras",
        reason="a Triton kernel with no CPU version; overlap scheduling calls it every round",
        apply=_gather_without_triton,
    ),
    Patch(
        name="UnquantizedLinearMethod.apply, LogitsProcessor._compute_lm_head (and weight updates, which unpack)",
        reason="F.linear packs a float32 weight in every call, so that verifying 8 tokens costs three decode steps",
        apply=_pack_linear_weights,
    ),
)
