"""The speculative algorithm ``PEAGLE`` as SGLang's registry sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo
from sglang.srt.speculative.spec_registry import get_spec as registered_algorithm

from sgl_peagle.host import check_host
from sgl_peagle.layout import verify_width

if TYPE_CHECKING:
    from sglang.srt.managers.overlap_utils import FutureMap

NAME = "PEAGLE"


class PEagleAlgorithm(CustomSpecAlgo):
    """EAGLE-3's answers to the host's questions, and P-EAGLE's own sizes.

    The host treats PEAGLE as EAGLE-3 wherever it asks: bigram radix keys, aux hidden states, KV budget of the
    draft layers, verify graphs.
    """

    def is_eagle(self) -> bool:
        return True

    def is_eagle3(self) -> bool:
        return True

    def supports_grammar_overlap(self) -> bool:
        return True  # run_eagle_verify takes the grammar barrier

    # The next three are called by the 0.5.23 scheduler but missing from CustomSpecAlgo.
    def need_topk(self) -> bool:
        return True

    def carries_draft_hidden_states(self) -> bool:
        return False

    def create_future_map(self, device: Any, req_to_token_pool: Any, **kwargs: Any) -> "FutureMap":
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(device, self, req_to_token_pool, **kwargs)

    def resolve_max_speculative_num_draft_tokens(self, server_args: Any) -> Optional[int]:
        """Slots per request and decode step: SGLang allocates what this returns (see :mod:`sgl_peagle.layout`)."""
        from sglang.srt.arg_groups.model_override_base import resolving_view

        from sgl_peagle.backends import device_kind, drafter_backend

        cfg = resolving_view(server_args)
        if cfg.speculative_num_steps is None:
            return None
        backend = drafter_backend(cfg.speculative_draft_attention_backend, device_kind(cfg.device))
        return backend.plan(cfg.speculative_num_steps).alloc

    def get_num_tokens_per_req_for_target_verify(self, num_draft_tokens: int, is_draft_worker: bool) -> int:
        """Verify rows stay K+1 also where the allocation is larger."""
        from sglang.srt.runtime_context import get_spec

        return min(num_draft_tokens, get_spec().speculative_num_draft_tokens)

    def handle_server_args(self, server_args: Any) -> None:
        """Write the decided values; SGLang records each assignment."""
        from sgl_peagle.settings import decide, head_of

        settings = decide(server_args, head_of(server_args))
        server_args.speculative_num_steps = settings.k
        server_args.speculative_eagle_topk = 1
        server_args.speculative_num_draft_tokens = verify_width(settings.k)
        server_args.speculative_draft_attention_backend = settings.backend.name
        server_args.page_size = settings.page_size
        server_args.disable_overlap_schedule = not settings.overlap
        if server_args.max_running_requests is None:
            server_args.max_running_requests = 48  # SGLang's default for its own EAGLE
        if not server_args._speculative_draft_quantization_explicitly_set:
            # SGLang hands the target's quantization down; published heads are not quantized.
            server_args.speculative_draft_model_quantization = None


def _validate(server_args: Any) -> None:
    from sgl_peagle.refusals import check_server

    check_host()
    check_server(server_args)


def register() -> None:
    """Register PEAGLE with SGLang (idempotent)."""
    from sglang.srt.configs.model_config import register_model_config_factory
    from sglang.srt.server_args import ServerArgs

    from sgl_peagle.draft_config import model_config_factory, register_config_hook

    if registered_algorithm(NAME) is not None:
        return
    register_model_config_factory(ServerArgs, model_config_factory)
    register_config_hook()

    @SpeculativeAlgorithm.register(
        NAME, supports_overlap=True, validate_server_args=_validate, spec_class=PEagleAlgorithm
    )
    def worker_class(_server_args: Any) -> type:
        # Imported here: this pulls in SGLang's workers and models, which only the scheduler process needs.
        from sgl_peagle.model import register_model
        from sgl_peagle.worker import PEagleWorker

        register_model()
        return PEagleWorker

