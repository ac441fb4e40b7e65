"""Everything PEAGLE refuses at start-up. A combination is either known to work or named here.

Each check raises :class:`~sgl_peagle.errors.PEagleError`: what was asked, why it cannot work, what to do instead.
"""

from __future__ import annotations

import json
import logging
from typing import Any, Callable, NamedTuple

from sgl_peagle.backends import device_kind
from sgl_peagle.errors import PEagleError
from sgl_peagle.heads import Head
from sgl_peagle.heads.checks import quick_checks, require, target_checks
from sgl_peagle.heads.target import TargetInfo, target_folder, used_token_ids
from sgl_peagle.settings import Settings, decide, head_of, view_of

logger = logging.getLogger(__name__)

_UNTESTED = "it has not been shown to work with P-EAGLE's drafter batch"


class _Refusal(NamedTuple):
    """One server feature: when it is on, why it is refused, and what to do instead."""

    flag: str
    is_on: Callable[[Any], bool]
    why: str
    fix: str


_REFUSED = (
    _Refusal(
        "DP attention (--attn-dp-size > 1, or --dp-size with --enable-dp-attention)",
        lambda a: a.attn_dp_size > 1,
        "token counts are synchronised between ranks before the mask rows are added",
        "serve with tensor parallelism only",
    ),
    _Refusal(
        "pipeline parallelism (--pp-size > 1)",
        lambda a: a.pp_size > 1,
        "drafts would have to be relayed between the stages",
        "serve with --pp-size 1 and tensor parallelism",
    ),
    _Refusal(
        "prefill/decode disaggregation (--disaggregation-mode)",
        lambda a: a.disaggregation_mode not in (None, "null"),
        "SGLang sends the drafter's hidden states with the KV cache, and a parallel drafter has none",
        "serve prefill and decode in one engine",
    ),
    _Refusal(
        "LoRA (--enable-lora, --lora-paths)",
        lambda a: bool(a.enable_lora or a.lora_paths),
        "the drafter was trained on the base model's hidden states",
        "merge the adapter into the target, or serve without speculation",
    ),
    _Refusal(
        "mixed chunked prefill (--enable-mixed-chunk)",
        lambda a: bool(a.enable_mixed_chunk),
        "a running request would be one row of a prefill batch, without its drafts",
        "leave out --enable-mixed-chunk",
    ),
    _Refusal(
        "rejection sampling (--speculative-use-rejection-sampling)",
        lambda a: bool(a.speculative_use_rejection_sampling),
        "it needs the drafter's distributions, and P-EAGLE proposes tokens",
        "leave the flag out: sampled output already follows the target's distribution",
    ),
    _Refusal(
        "accept thresholds other than 1.0 (--speculative-accept-threshold-single / -acc)",
        lambda a: a.speculative_accept_threshold_single != 1.0 or a.speculative_accept_threshold_acc != 1.0,
        "they accept tokens that the target did not choose, so output would differ from the target's",
        "leave both at 1.0",
    ),
    _Refusal(
        "adaptive speculation (--speculative-adaptive)",
        lambda a: bool(a.speculative_adaptive),
        "the drafter window is sized for one K",
        "leave the flag out and choose K with --speculative-num-draft-tokens",
    ),
    _Refusal(
        "--speculative-token-map",
        lambda a: a.speculative_token_map is not None,
        "a P-EAGLE head brings its own map (d2t) when its vocabulary is reduced",
        "leave the flag out",
    ),
    _Refusal(
        "--speculative-draft-window-size",
        lambda a: a.speculative_draft_window_size is not None,
        "the drafter attends to the whole context",
        "leave the flag out",
    ),
    _Refusal(
        "several tokenizer workers (--tokenizer-worker-num > 1)",
        lambda a: a.tokenizer_worker_num > 1,
        "SGLang does not load plugins in those processes, so they do not know the algorithm PEAGLE",
        "leave --tokenizer-worker-num at 1",
    ),
    _Refusal(
        "deterministic inference (--enable-deterministic-inference)",
        lambda a: bool(a.enable_deterministic_inference),
        "its attention kernel reads the drafter window back from the KV cache, where mask rows have no slots",
        "leave the flag out",
    ),
    *(
        _Refusal(f"--{field.replace('_', '-')}", lambda a, field=field: bool(getattr(a, field)), _UNTESTED, "leave it out")
        for field in (
            "enable_multi_layer_eagle",
            "enable_unified_memory",
            "enable_hisparse",
            "enable_two_batch_overlap",
            "enable_pdmux",
            "enable_attn_tp_input_scattered",
            "enable_flexkv",
            "enable_unified_cache_external_linker",
            "enable_single_batch_overlap",
            "enable_page_major_kv_layout",
        )
    ),
    *(
        _Refusal(f"--{field.replace('_', '-')} > 1", lambda a, field=field: getattr(a, field) > 1, _UNTESTED, "leave it at 1")
        for field in ("dcp_size", "attn_cp_size")
    ),
)  # fmt: skip


def check_server(server_args: Any) -> None:
    """Refuse server arguments, heads and targets that PEAGLE cannot serve.

    Args:
        server_args: SGLang's resolving server arguments.

    Raises:
        PEagleError: The first thing found.
    """
    _check_device(server_args)
    _check_overrides(server_args)
    for refusal in _REFUSED:
        if refusal.is_on(server_args):
            raise PEagleError(refusal.flag + " with PEAGLE", refusal.why, refusal.fix)
    head = head_of(server_args)
    settings = decide(server_args, head)
    check_target(head, _target_config(server_args), settings, server_args)
    if server_args.enable_hierarchical_cache:
        logger.warning("PEAGLE with --enable-hierarchical-cache is untested")
    if device_kind(server_args.device) == "cpu":
        logger.warning("SGLang verifies greedily on CPU: temperature has no effect with speculation")


def _check_device(server_args: Any) -> None:
    import torch

    device = device_kind(server_args.device)
    if device not in ("cuda", "cpu") or torch.version.hip is not None:
        raise PEagleError(
            f"device {'ROCm' if torch.version.hip else device}",
            "kernels and verification were only shown to be right on CUDA GPUs (and on CPU for tests); elsewhere SGLang "
            "verifies greedily at any temperature",
            "serve on a CUDA GPU",
        )


#: What sizes the drafter's KV pool.
_DRAFTER_SHAPE = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")


def _check_overrides(server_args: Any) -> None:
    """SGLang applies --json-model-override-args to the head, too, while the drafter is built from its files."""
    overrides = json.loads(server_args.json_model_override_args or "{}")
    touched = [key for key in _DRAFTER_SHAPE if key in overrides]
    if touched:
        raise PEagleError(
            f"--json-model-override-args with {', '.join(touched)}",
            "SGLang applies it to target and head alike, so the drafter's KV pool would be sized wrongly",
            "change the target's own config.json instead",
        )


def _target_config(server_args: Any) -> Any:
    from sglang.srt.arg_groups.model_override_base import model_config_of

    return model_config_of(view_of(server_args))


def check_target(head: Head, target: Any, settings: Settings, server_args: Any) -> None:
    """Compare a head with its target.

    Args:
        head: The checked head.
        target: SGLang's ``ModelConfig`` of the target.
        settings: The decided values.
        server_args: For the context length asked for.

    Raises:
        PEagleError: They do not belong together, or the target is of a kind PEAGLE does not serve.
    """
    architecture = target.hf_config.architectures[0]
    if target.is_multimodal or target.model_is_mrope:
        raise PEagleError(
            f"target {architecture} is multimodal or uses M-RoPE",
            "the drafter sees text only: image tokens and 3-D positions do not reach it",
            "serve a text-only target",
        )
    if not _has_ordinary_attention(target):
        raise PEagleError(
            f"target {architecture} has latent (MLA), Mamba or linear attention",
            "SGLang sizes the drafter's KV pool by the target's, and numbers captured layers differently there; neither "
            "has been shown to work with a P-EAGLE head",
            "serve a target with ordinary attention in every layer",
        )
    require(quick_checks(head))
    require(target_checks(head, _target_info(target)))
    _check_context(head, target, settings, server_args)
    _warn_of_wide_kv(head, target, server_args.tp_size)


def _has_ordinary_attention(target: Any) -> bool:
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import AttentionArch

    return target.attention_arch == AttentionArch.MHA and mambaish_config(target) is None


def _warn_of_wide_kv(head: Head, target: Any, tp_size: int) -> None:
    """SGLang budgets the drafter's KV pool at the target's bytes per layer and token."""
    config = head.config
    wanted = 2 * max(1, config.num_kv_heads // tp_size) * config.head_dim
    budgeted = 2 * target.get_num_kv_heads(tp_size) * target.head_dim
    if wanted > budgeted:
        logger.warning(
            "PEAGLE: the head's KV is %.1f times as wide per layer as the target's, by which SGLang sizes its memory; if "
            "start-up runs out of memory, lower --mem-fraction-static or give --max-total-tokens",
            wanted / budgeted,
        )


def _target_info(target: Any) -> TargetInfo:
    """The target as the head's checks want it, from SGLang's ``ModelConfig``."""
    text, used = target.hf_text_config, {}
    for source in (text, target.hf_config, getattr(target, "hf_generation_config", None)):
        for key in ("bos_token_id", "eos_token_id"):
            value = getattr(source, key, None)
            for token in value if isinstance(value, (list, tuple)) else [value]:
                if token is not None:
                    used[int(token)] = key
    try:
        used = used_token_ids(target_folder(target.model_path, target.revision, local_only=True)) | used
    except PEagleError as error:  # e.g. an object store: the ids above have to do
        logger.warning("PEAGLE: the target's tokenizer files are not read (%s)", error.why)
    return TargetInfo(
        target.model_path,
        target.hf_config.architectures[0],
        text.hidden_size,
        text.vocab_size,
        text.num_hidden_layers,
        used_ids=used,
    )


def _check_context(head: Head, target: Any, settings: Settings, server_args: Any) -> None:
    served, limit = target.context_len, head.config.max_position_embeddings
    if served > limit:
        raise PEagleError(
            f"the target serves contexts of {served} tokens, the head was trained for {limit}",
            "beyond its training length a head's positions are unknown to it",
            f"pass --context-length {limit}",
        )
    if settings.k + 1 >= served:
        raise PEagleError(
            f"K={settings.k} drafts in a context of {served} tokens",
            "a round would not fit into the context",
            f"pass --speculative-num-draft-tokens {max(2, min(8, served // 4))} or a larger --context-length",
        )
