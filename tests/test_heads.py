"""The strict reader: everything is used, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from heads_for_tests import BASE, random_head
from safetensors.torch import load_file

from sgl_peagle.errors import PEagleError
from sgl_peagle.heads import read_head
from sgl_peagle.heads.config import IGNORE_KEYS_ENV
from sgl_peagle.heads.formats import format_named

MASK = 3


def head(tmp_path: Path, **kwargs) -> Path:
    return random_head(tmp_path / "head", mask_token_id=MASK, **kwargs)


def refusal(folder: Path) -> PEagleError:
    with pytest.raises(PEagleError) as error:
        read_head(str(folder))
    assert error.value.what and error.value.why and error.value.fix
    return error.value


def test_a_complete_head_is_read(tmp_path: Path) -> None:
    found = read_head(str(head(tmp_path, num_hidden_layers=4, attention_bias=True, fc_norm=True)))
    assert found.config.num_layers == 4 and found.config.mask_token_id == MASK
    assert found.config.aux_layer_ids == (2, 4, 5) and found.config.aux_width == 384
    assert found.has("layers.0.hidden_norm.weight") and found.has("layers.3.self_attn.o_proj.bias")
    assert found.tensors["layers.0.hidden_norm.weight"].name == "midlayer.hidden_norm.weight"


def test_tensor_problems_are_named(tmp_path: Path) -> None:
    error = refusal(head(tmp_path, extra={"layers.1.self_attn.q_norm.weight": torch.ones(32)}))
    assert "layers.1.self_attn.q_norm.weight" in error.what and "model.safetensors" in error.what
    assert "layers.1.input_layernorm.weight" in refusal(head(tmp_path, drop=("layers.1.input_layernorm.weight",))).what
    assert "EAGLE3" in refusal(head(tmp_path, drop=("mask_hidden",))).fix
    error = refusal(head(tmp_path, extra={"fc.weight": torch.ones(128, 256)}))
    assert "fc.weight has shape [128, 256]" in error.what and "[128, 384]" in error.why
    error = refusal(head(tmp_path, draft_vocab_size=100, drop=("d2t", "t2d")))
    assert "d2t" in error.what
    assert "lm_head" in refusal(head(tmp_path, tie_word_embeddings=True, drop=("lm_head.weight",))).what
    error = refusal(head(tmp_path, extra={"layers.0.hidden_norm.weight": torch.ones(128)}))
    assert "same tensor" in error.what


def test_file_problems_are_named(tmp_path: Path) -> None:
    folder = head(tmp_path)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    assert "truncated" in refusal(folder).why
    (folder / "model.safetensors").write_bytes(b"not a safetensors file")
    refusal(folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert "pytorch_model.bin" in refusal(folder).what and "code" in refusal(folder).why
    (folder / "config.json").write_text("{")
    assert "JSON" in refusal(folder).what
    (folder / "config.json").unlink()
    assert "config.json" in refusal(folder).what
    assert "nowhere" in refusal(tmp_path / "nowhere").what


def test_an_index_cannot_leave_the_folder(tmp_path: Path) -> None:
    folder = head(tmp_path)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": "../x.safetensors"}}))
    assert "outside its folder" in refusal(folder).what
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": "b.safetensors"}}))
    assert "b.safetensors" in refusal(folder).what
    index = {"weight_map": {"fc.weight": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "does not list" in refusal(folder).what
    index["weight_map"] = {name: "model.safetensors" for name in load_file(folder / "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_head(str(folder)).has("fc.weight")


def config(**changes):
    raw = dict(BASE, mask_token_id=MASK) | changes
    return format_named("vllm").parse({key: value for key, value in raw.items() if value is not None}, "config.json")


def test_unknown_keys_are_refused_unless_the_user_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PEagleError, match="norm_befor_fc"):
        config(norm_befor_fc=True)
    with pytest.raises(PEagleError, match="eagle_config"):
        config(eagle_config={"what": 1})
    monkeypatch.setenv(IGNORE_KEYS_ENV, "norm_befor_fc")
    assert config(norm_befor_fc=True) == config()
    assert config(transformers_version="5", torch_dtype="bfloat16", use_cache=True) == config()


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "qwen3"},
        {"parallel_drafting": False},
        {"hidden_act": "gelu"},
        {"mlp_bias": True},
        {"partial_rotary_factor": 0.5},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"sliding_window": 128},
        {"use_sliding_window": True},
        {"mask_token_id": None},
        {"hidden_size": None},
        {"norm_before_fc": True, "fc_norm": True},
        {"num_aux_hidden_states": 5},
        {"eagle_aux_hidden_state_layer_ids": [2, 2, 5]},
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}},
        {"eagle_config": {"use_aux_hidden_state": False}},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0}},
        {"rope_parameters": {"rope_theta": 5.0}},
    ],
    ids=str,
)
def test_configs_that_cannot_be_served_are_refused(changes) -> None:
    with pytest.raises(PEagleError):
        config(**changes)


def test_mask_id_precedence() -> None:
    keys = {"mask_token_id": 1, "dspark_noise_token_id": 2, "pard_token": 3, "ptd_token_id": 4}
    assert config(**keys, dflash_config={"mask_token_id": 9}).mask_token_id == 9
    for key in list(keys):
        assert config(**{"mask_token_id": None} | keys).mask_token_id == keys[key]
        keys.pop(key)
        if not keys:
            break


def test_aux_layer_conventions() -> None:
    assert config().aux_layer_ids == (2, 4, 5)
    nested = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}  # layers, as SGLang counts
    assert config(eagle_aux_hidden_state_layer_ids=None, eagle_config=nested).aux_layer_ids == (2, 4, 5)
    assert config(eagle_config=nested).aux_layer_ids == (2, 4, 5)
    assert config(eagle_aux_hidden_state_layer_ids=[5, 2, 4]).aux_layer_ids == (2, 4, 5)
    assert config(eagle_aux_hidden_state_layer_ids=None).aux_layer_ids is None


def test_both_rope_spellings_are_the_same() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
    old = config(rope_theta=5e5, rope_scaling={"type": "llama3", **scaling})
    new = config(rope_theta=None, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling})
    assert old == new and old.rope.theta == 5e5
    assert old.rope.host_scaling() == {"rope_type": "llama3", **scaling}
    assert config().rope.host_scaling() is None
