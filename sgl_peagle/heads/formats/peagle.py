"""Our own canonical format: everything explicit, canonical tensor names, and a compact form for small heads.

* ``architectures ["PEagleLlamaForCausalLM"]``, ``model_type "peagle"``, ``format_version 1``.
* ``eagle_config.eagle_aux_hidden_state_layer_ids`` in SGLang's convention: id i = output of target layer i.
* ``qk_norm`` and ``embed_from_target`` are flags. With ``embed_from_target`` the file holds ``embed_mask_row`` [D]
  in place of ``embed_tokens.weight`` [V, D]; every other row is the target's. That is exact for heads trained with
  the rest of the embedding frozen.
"""

from __future__ import annotations

from typing import Any, Mapping, Optional

from sgl_peagle.heads import llama
from sgl_peagle.heads.config import PEagleHeadConfig, check_config
from sgl_peagle.heads.formats.base import HeadFormat
from sgl_peagle.heads.formats.vllm import flat_fields
from sgl_peagle.heads.keys import Keys

#: Architecture name in config.json, and the name under which SGLang finds the drafter class.
ARCHITECTURE = "PEagleLlamaForCausalLM"
MODEL_TYPE = "peagle"
VERSION = 1


class PEagleFormat(HeadFormat):
    """The canonical format of this package."""

    name, title, writable = "peagle", "sgl-peagle", True
    evidence = f'architectures ["{ARCHITECTURE}"]'

    def parse(self, raw: Mapping[str, Any], source: str, given_mask_id: Optional[int] = None) -> PEagleHeadConfig:
        keys = Keys(raw, source)
        keys.skip("architectures")
        version = keys.integer("format_version", VERSION)
        if version != VERSION:
            keys.refuse(
                f"format_version is {version}",
                f"this release reads version {VERSION}",
                "upgrade sgl-peagle, or convert the head with the release that wrote it",
            )
        fields = llama.decoder_fields(keys, (MODEL_TYPE,))
        fields["qk_norm"] = keys.flag("qk_norm")
        ids = llama.aux_layer_ids(keys, top_counts=None)
        config = PEagleHeadConfig(
            **fields,
            target_hidden_size=keys.required("target_hidden_size"),
            draft_vocab_size=keys.required("draft_vocab_size"),
            **llama.head_fields(keys, ids, given_mask_id),
            embed_from_target=keys.flag("embed_from_target"),
            k_trained=keys.integer("k_trained"),
            target=keys.text("target"),
        )
        keys.finish()
        return check_config(config, source)

    def write(self, config: PEagleHeadConfig, dtype: str) -> dict[str, Any]:
        raw: dict[str, Any] = {
            "architectures": [ARCHITECTURE],
            "model_type": MODEL_TYPE,
            "format_version": VERSION,
            **flat_fields(config),
            "qk_norm": config.qk_norm,
            "embed_from_target": config.embed_from_target,
            "mask_token_id": config.mask_token_id,
            "num_aux_hidden_states": config.num_aux,
            "torch_dtype": dtype,
        }
        if config.aux_layer_ids is not None:
            raw["eagle_config"] = {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": [i - 1 for i in config.aux_layer_ids],
            }
        if config.k_trained is not None:
            raw["k_trained"] = config.k_trained
        if config.target is not None:
            raw["target"] = config.target
        return raw
