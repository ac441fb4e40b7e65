"""The draft model's config as SGLang sees it. Two official extension points lead there.

1. SGLang reads the draft's config.json with transformers' ``AutoConfig`` before it asks any plugin, and ends when
   transformers does not know the ``model_type``. Heads saved by speculators have none (or ``speculator_model``), ours
   have ``peagle``. A plugin hook around SGLang's config parser (``HookRegistry``, applied when plugins load) builds
   a LLaMA config in memory for such heads, from what the head's own format says; every other config is left to
   SGLang. Registering a class with ``AutoConfig`` would not help a config without ``model_type``. Heads that name
   Python code (``auto_map``) take this way too, so that no code of theirs can run.
2. SGLang would give a P-EAGLE head its EAGLE-3 class (the published architecture name is the same), which loads it
   silently wrong. Its model-config factory lets the plugin hand over a config in which the architecture is ours and
   the aux layer ids are in SGLang's convention; every other config is SGLang's own.

Nothing is written to disk: all formats are served from the files as they were published.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Mapping, Optional

from sgl_peagle.aux_layers import capture_points, to_sglang
from sgl_peagle.backends import device_kind, drafter_backend
from sgl_peagle.errors import PEagleError
from sgl_peagle.layout import window_width

# The readers of heads are imported where they are used: this module is loaded at every start of SGLang, they are
# needed only where a head is served.
if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig

    from sgl_peagle.heads import Head, PEagleHeadConfig

_PARSER = "sglang.srt.utils.hf_transformers.config.HfModelConfigParser.parse"

#: Keys that tell a P-EAGLE head from a plain EAGLE-3 head of the same architecture name.
_PARALLEL_KEYS = ("parallel_drafting", "ptd_token_id")


def register_config_hook() -> None:
    """Ask SGLang to run :func:`parse_config` around its config parser."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_PARSER, parse_config, HookType.AROUND)


def parse_config(
    original: Callable[..., Any],
    parser: Any,
    model: Any,
    trust_remote_code: bool = False,
    revision: Optional[str] = None,
    **kwargs: Any,
) -> Any:
    """SGLang's ``HfModelConfigParser.parse``, and a LLaMA config for heads that transformers cannot read.

    Raises:
        PEagleError: The config says that it is a P-EAGLE head, and it cannot be parsed.
    """
    from transformers import PretrainedConfig

    raw, _ = PretrainedConfig.get_config_dict(model, revision=revision, **kwargs)
    if _needs_help(raw):
        from sgl_peagle.heads.formats import config_format
        from sgl_peagle.heads.reader import given_mask_id

        source = f"{model}: config.json"
        raw = {key: value for key, value in raw.items() if key not in ("_commit_hash",)}
        return llama_config(config_format(raw, source).parse(raw, source, given_mask_id()))
    return original(parser, model, trust_remote_code=trust_remote_code, revision=revision, **kwargs)


def _needs_help(raw: Mapping[str, Any]) -> bool:
    """Whether a config is a P-EAGLE head's that transformers does not know, or that it might run code for."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if raw.get("model_type") in CONFIG_MAPPING and "auto_map" not in raw:
        return False
    from sgl_peagle.heads.formats import config_format

    try:
        name = config_format(raw, "config.json").name
    except PEagleError:  # a target, or another kind of draft: SGLang's to judge
        return False
    return name not in ("vllm", "nemo") or any(raw.get(key) for key in _PARALLEL_KEYS)


def llama_config(config: "PEagleHeadConfig") -> Any:
    """A transformers ``LlamaConfig`` that describes a head to SGLang."""
    from transformers import LlamaConfig

    from sgl_peagle.heads.formats.peagle import ARCHITECTURE

    return LlamaConfig(
        architectures=[ARCHITECTURE],
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=config.rope.parameters(),
        attention_bias=config.attention_bias,
        tie_word_embeddings=False,
    )


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
        from sgl_peagle.heads import read_head

        path = model_path or cfg.speculative_draft_model_path
        head, target = read_head(path, model_revision), model_config_of(server_args)
        adapt(config.hf_config, head, target)
        # With --dtype auto SGLang would take the head's own dtype, and fc would meet hidden states of another.
        config.dtype = target.dtype
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
    if not drafter_backend(name, device_kind(cfg.device)).reads_window_densely:
        config.context_len += window_width(k)
        config.hf_config.context_len = config.context_len


def adapt(hf_config: Any, head: "Head", target: "ModelConfig") -> None:
    """Write the head's values into ``hf_config`` in SGLang's terms.

    Args:
        hf_config: The head's Hugging Face config, changed in place.
        head: The checked head.
        target: The target's model config.
    """
    from sgl_peagle.heads.formats.peagle import ARCHITECTURE

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
