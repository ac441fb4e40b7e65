"""The draft model's config as SGLang sees it.

SGLang would give a P-EAGLE head its EAGLE-3 class (the published architecture name is the same), which loads it
silently wrong. Its official model-config factory hook lets the plugin hand over a config in which the
architecture is ours and the aux layer ids are in SGLang's convention; every other config is SGLang's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

from sgl_peagle.aux_layers import capture_points, to_sglang
from sgl_peagle.backends import drafter_backend
from sgl_peagle.heads import Head, read_head
from sgl_peagle.layout import window_width

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig

#: The name under which the drafter class is registered.
ARCHITECTURE = "PEagleLlamaForCausalLM"


def model_config_factory(
    server_args: Any,
    model_path: Optional[str] = None,
    model_revision: Optional[str] = None,
    is_draft_model: bool = False,
    context_length: Optional[int] = None,
    **kwargs: Any,
) -> "ModelConfig":
    """Same contract as ``ModelConfig.from_server_args``, which it calls through a view that has no factory."""
    from sglang.srt.arg_groups.model_override_base import model_config_of, resolving_view
    from sglang.srt.configs.model_config import ModelConfig

    cfg = resolving_view(server_args)
    config = ModelConfig.from_server_args(
        cfg,
        model_path=model_path,
        model_revision=model_revision,
        is_draft_model=is_draft_model,
        context_length=context_length,
        **kwargs,
    )
    if is_draft_model and (cfg.speculative_algorithm or "").upper() == "PEAGLE":
        path = model_path or cfg.speculative_draft_model_path
        adapt(config.hf_config, read_head(path, model_revision), model_config_of(server_args))
        _widen_for_cache_reading_backends(config, cfg)
    return config


def _widen_for_cache_reading_backends(config: "ModelConfig", cfg: Any) -> None:
    """Room for a window at the context end, where the drafter's backend reads it back from the cache.

    Such a backend (fa3) sizes its page table by the drafter's context length, while a window reaches up to 2K
    positions behind the committed length; SGLang's request row is wide enough for that (:mod:`sgl_peagle.layout`).
    """
    k, name = cfg.speculative_num_steps, cfg.speculative_draft_attention_backend
    if k is None or name is None:  # asked before PEAGLE decided its values: only the shape matters then
        return
    if not drafter_backend(name, str(cfg.device).split(":")[0]).reads_window_densely:
        config.context_len += window_width(k)
        config.hf_config.context_len = config.context_len


def adapt(hf_config: Any, head: Head, target: "ModelConfig") -> None:
    """Write the head's values into ``hf_config`` in SGLang's terms.

    Args:
        hf_config: The head's Hugging Face config, changed in place.
        head: The checked head.
        target: The target's model config.
    """
    config = head.config
    layers = target.hf_text_config.num_hidden_layers
    points = capture_points(config.aux_layer_ids, layers)
    hf_config.architectures = [ARCHITECTURE]
    hf_config.eagle_config = {
        "use_aux_hidden_state": True,
        "eagle_aux_hidden_state_layer_ids": to_sglang(points, target.hf_config.architectures[0], layers),
    }
    hf_config.num_aux_hidden_states = config.num_aux
    hf_config.target_hidden_size = config.target_hidden_size
    hf_config.draft_vocab_size = config.draft_vocab_size
    hf_config.peagle_head_path = str(head.folder)
