"""Every format: published heads by their manifests, layer id conventions, inspect, and configs at random."""

from __future__ import annotations

import json
import math
import string
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from formats_for_tests import ALL, write_as
from harness import import_sglang
from heads_for_tests import BASE, random_head
from hypothesis import given, settings
from hypothesis import strategies as st
from pair import HEAD, TARGET

from sgl_peagle.aux_layers import capture_points, to_sglang
from sgl_peagle.cli import main
from sgl_peagle.draft_config import llama_config, parse_config
from sgl_peagle.errors import PEagleError
from sgl_peagle.heads import read_head
from sgl_peagle.heads.config import MASK_ID_ENV, PEagleHeadConfig, RopeConfig
from sgl_peagle.heads.formats import FORMATS, config_format, format_named

MASK = 3
MANIFESTS = sorted((Path(__file__).parent / "manifests").glob("*.json"))


def sparse_head(folder: Path, manifest: dict[str, Any]) -> Path:
    """A head of a manifest's names and shapes whose gigabytes of zeros take no disk space."""
    sizes, header, at = {"BF16": 2, "I64": 8, "BOOL": 1}, {}, 0
    for name, (dtype, shape) in manifest["tensors"].items():
        end = at + sizes[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    (folder / "config.json").write_text(json.dumps(manifest["config"]))
    return folder


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_published_heads_are_read(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = json.loads(path.read_text())
    expect, folder = manifest["expect"], sparse_head(tmp_path / "head", manifest)
    if expect["mask_token_id"] is None:
        with pytest.raises(PEagleError, match="no mask token id"):
            read_head(str(folder))
        monkeypatch.setenv(MASK_ID_ENV, "77")
    head = read_head(str(folder))
    assert head.format.name == expect["format"] and head.config.num_layers == expect["layers"]
    assert head.config.num_aux == expect["aux"] and head.config.qk_norm == expect["qk_norm"]
    assert head.config.mask_token_id == (expect["mask_token_id"] or 77)
    assert head.config.k_trained == expect.get("k") and head.config.target == expect.get("target")
    assert list(head.config.aux_layer_ids or []) == expect.get("aux_layer_ids", [])
    assert len(head.tensors) == len(manifest["tensors"])
    assert all(head.has(f"layers.{i}.input_layernorm.weight") for i in range(expect["layers"]))
    # The data is all zeros, which the checks of the data must refuse, whatever the format.
    run = CliRunner().invoke(main, ["convert", str(folder), str(tmp_path / "out"), "--to", "peagle", "--dry-run"])
    assert run.exit_code == 1 and "t2d and d2t disagree" in run.output


# -- which layers ---------------------------------------------------------------------------------------------------

#: target class -> (module, layers); every family PEAGLE is used with.
FAMILIES = {
    "LlamaForCausalLM": ("llama", 32),
    "Qwen2ForCausalLM": ("qwen2", 28),
    "Qwen3ForCausalLM": ("qwen3", 36),
    "Qwen3MoeForCausalLM": ("qwen3_moe", 48),
    "GptOssForCausalLM": ("gpt_oss", 24),
}

#: format -> how ids stand in its config.json, and the layers whose outputs they mean.
CONVENTIONS: dict[str, list[tuple[dict[str, Any], list[int]]]] = {
    "vllm": [
        ({"eagle_aux_hidden_state_layer_ids": [2, 10, 18]}, [1, 9, 17]),
        ({"eagle_aux_hidden_state_layer_ids": [18, 2, 10]}, [1, 9, 17]),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 9, 17]}}, [1, 9, 17]),
        ({"eagle_aux_hidden_state_layer_ids": [0, 5, 7, 11, 13]}, [-1, 4, 6, 10, 12]),
    ],
    "speculators": [
        ({"eagle_aux_hidden_state_layer_ids": [2, 10, 18]}, [1, 9, 17]),
        ({"eagle_aux_hidden_state_layer_ids": [2, 6, 10, 14, 18]}, [1, 5, 9, 13, 17]),
    ],
    "specforge": [({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 9, 17]}}, [1, 9, 17])],
    "nemo": [({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 9, 17]}}, [1, 9, 17])],
    "peagle": [({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 9, 17]}}, [1, 9, 17])],
}  # fmt: skip


def layers_captured(architecture: str, ids: list[int], num_layers: int) -> list[int]:
    """Layers whose outputs SGLang's own model class captures for these ids (the index it stores, less one)."""
    import importlib

    import_sglang()
    module = importlib.import_module(f"sglang.srt.models.{FAMILIES[architecture][0]}")
    inner = SimpleNamespace(layers=[SimpleNamespace() for _ in range(num_layers)], layers_to_capture=[])
    if hasattr(module, "Qwen2MoeModel"):  # the flag is set by the inner model there
        method = module.Qwen2MoeModel.set_eagle3_layers_to_capture
        inner.set_eagle3_layers_to_capture = lambda points: method(inner, points)
    model = SimpleNamespace(
        pp_group=SimpleNamespace(is_last_rank=True), config=SimpleNamespace(num_hidden_layers=num_layers), model=inner
    )
    getattr(module, architecture).set_eagle3_layers_to_capture(model, ids)
    assert model.capture_aux_hidden_states
    return [point - 1 for point in inner.layers_to_capture]


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("name", CONVENTIONS)
def test_ids_lead_to_exactly_these_layers(name: str, architecture: str, tmp_path: Path) -> None:
    num_layers = FAMILIES[architecture][1]
    for number, (keys, layers) in enumerate(CONVENTIONS[name]):
        head = random_head(tmp_path / f"s{number}", mask_token_id=MASK, eagle_aux_hidden_state_layer_ids=layers)
        cleared = {"eagle_config": None, "eagle_aux_hidden_state_layer_ids": None, "num_aux_hidden_states": None}
        folder = write_as(head, tmp_path / f"h{number}", name, **(cleared | keys))
        config = read_head(str(folder), mask_token_id=MASK if name == "specforge" else None).config
        ids = to_sglang(capture_points(config.aux_layer_ids, num_layers), architecture, num_layers)
        assert layers_captured(architecture, ids, num_layers) == layers


@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_default_and_the_last_layer(architecture: str) -> None:
    num_layers = FAMILIES[architecture][1]
    ids = to_sglang(capture_points(None, num_layers), architecture, num_layers)
    expected = [1, num_layers // 2 - 1, num_layers - 4]
    assert layers_captured(architecture, ids, num_layers) == expected
    if architecture == "GptOssForCausalLM":
        last = to_sglang((2, 12, num_layers), architecture, num_layers)
        assert layers_captured(architecture, last, num_layers) == [1, 11, num_layers - 1]
    else:
        with pytest.raises(PEagleError, match="last layer"):
            to_sglang((2, 12, num_layers), architecture, num_layers)


# -- SGLang's config parser -------------------------------------------------------------------------------------------


def parsed_by(folder: Path) -> str:
    """Who parses a folder's config: "host", or the architecture that the plugin's hook answers with."""

    def host(*_args: Any, **_kwargs: Any) -> Any:
        return SimpleNamespace(architectures=["host"])

    return parse_config(host, None, str(folder), trust_remote_code=True, revision=None).architectures[0]


def test_only_heads_that_need_it_bypass_the_hosts_config_parser(tmp_path: Path) -> None:
    code = {"AutoConfig": "evil.Config"}
    for name in ("speculators", "peagle", "compact"):
        assert parsed_by(write_as(HEAD, tmp_path / name, name)) == "PEagleLlamaForCausalLM"
    for name in ("vllm", "nemo"):
        assert parsed_by(write_as(HEAD, tmp_path / name, name)) == "host"
        assert parsed_by(write_as(HEAD, tmp_path / f"{name}-code", name, auto_map=code)) == "PEagleLlamaForCausalLM"
    assert parsed_by(TARGET) == "host"
    eagle3 = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "auto_map": code}
    others = [eagle3, {"architectures": ["XForCausalLM"], "model_type": "x"}, {"speculators_model_type": "eagle3"}]
    for number, raw in enumerate(others):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "config.json").write_text(json.dumps(raw))
        assert parsed_by(tmp_path / str(number)) == "host"
    bad = write_as(HEAD, tmp_path / "bad", "peagle", hidden_size="128")
    with pytest.raises(PEagleError, match="hidden_size"):
        parsed_by(bad)


@pytest.mark.parametrize("rope", [None, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}])
def test_what_sglang_is_told(rope: Any, tmp_path: Path) -> None:
    source = random_head(tmp_path / "head", mask_token_id=MASK, rope_scaling=rope, num_hidden_layers=3)
    config = read_head(str(write_as(source, tmp_path / "spec", "speculators"))).config
    told = llama_config(config)
    for ours, theirs in {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads", "num_kv_heads":
                         "num_key_value_heads"}.items():  # fmt: skip
        assert getattr(told, theirs) == getattr(config, ours)
    for name in ("hidden_size", "intermediate_size", "head_dim", "vocab_size", "rms_norm_eps", "max_position_embeddings"):
        assert getattr(told, name) == getattr(config, name)
    assert told.rope_parameters["rope_theta"] == 10000.0
    assert told.rope_parameters["rope_type"] == (rope or {"rope_type": "default"})["rope_type"]


# -- inspect --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_inspect(name: str, tmp_path: Path) -> None:
    folder = write_as(HEAD, tmp_path / "head", name)
    mask = ["--mask-token-id", str(MASK)] if name == "specforge" else []
    run = CliRunner().invoke(main, ["inspect", str(folder), "--target", str(TARGET), "--json", *mask])
    assert run.exit_code == 0, run.output
    report = json.loads(run.output)
    assert report["ok"] and report["format"] == name.replace("compact", "peagle")
    assert report["config"]["mask_token_id"] == MASK and "layer 1, layer 3, layer 4" in report["aux_layers"]
    assert {check["status"] for check in report["checks"]} <= {"pass", "skip", "warn"}
    assert report["tensors"]["mask_hidden"]["shape"] == [1, 1, 384]
    command = report["command"]
    assert "--speculative-algorithm PEAGLE" in command and str(folder) in command and str(TARGET) in command
    assert ("SGL_PEAGLE_MASK_TOKEN_ID=3" in command) == (name == "specforge")
    text = CliRunner().invoke(main, ["inspect", str(folder), *mask]).output
    for words in ("aux layers", "outputs of layer 1", "PASS MASK embedding row", "serve with", "mask token id  3"):
        assert words in text
    assert max(map(len, text.splitlines())) < 400


def test_inspect_names_what_fails_and_exits_with_1(tmp_path: Path) -> None:
    folder = random_head(tmp_path / "head", mask_token_id=1, eagle_aux_hidden_state_layer_ids=[2, 4, 50])
    run = CliRunner().invoke(main, ["inspect", str(folder), "--target", str(TARGET), "--json"])
    assert run.exit_code == 1
    failed = {c["name"]: c for c in json.loads(run.output)["checks"] if c["status"] == "fail"}
    assert set(failed) == {"mask token id unused by the target", "aux layers exist in the target"}
    assert all(check["why"] and check["fix"] for check in failed.values())
    text = CliRunner().invoke(main, ["inspect", str(folder), "--target", str(TARGET)])
    assert text.exit_code == 1 and text.output.count("FAIL") == 2
    assert CliRunner().invoke(main, ["inspect"]).exit_code == 2


def test_a_token_of_the_chat_template_is_no_mask(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text((TARGET / "config.json").read_text())
    (target / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 3, "content": "<|im_start|>"}]}))
    (target / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ '<|im_start|>' + x }}"}))
    run = CliRunner().invoke(main, ["inspect", str(HEAD), "--target", str(target)])
    assert run.exit_code == 1 and "chat template token '<|im_start|>'" in run.output


# -- configs at random ----------------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats() | st.text(string.printable, max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=3), inner, max_size=3),
    max_leaves=6,
)
known_keys = [
    *BASE, "mask_token_id", "ptd_token_id", "dflash_config", "eagle_config", "rope_scaling", "rope_parameters",
    "draft_vocab_size", "target_hidden_size", "num_aux_hidden_states", "fc_norm", "norm_before_fc", "layer_types",
    "sliding_window", "speculators_model_type", "transformer_layer_config", "speculators_config", "format_version",
    "qk_norm", "embed_from_target", "num_depths", "x",
]  # fmt: skip


@given(st.dictionaries(st.sampled_from(known_keys), json_values, max_size=4))
@settings(max_examples=300, deadline=None)
def test_any_json_is_parsed_or_refused(changes: dict[str, Any]) -> None:
    """Whatever stands in a config.json: a config or a PEagleError in three parts, never another exception."""
    raw = dict(BASE, mask_token_id=MASK) | changes
    attempts = [lambda: config_format(raw, "config.json")]
    attempts += [lambda found=found: found.parse(raw, "config.json", None) for found in FORMATS]
    nested = {"transformer_layer_config": raw, "mask_token_id": MASK, **{k: raw[k] for k in changes}}
    attempts.append(lambda: format_named("speculators").parse(nested, "config.json", None))
    for attempt in attempts:
        try:
            attempt()
        except PEagleError as error:
            assert error.what and error.why and error.fix


sizes = st.integers(1, 512)
ropes = st.sampled_from(
    [
        RopeConfig("default", 10000.0),
        RopeConfig("linear", 5e5, (("factor", 2.0),)),
        RopeConfig("llama3", 5e5, (("factor", 8), ("high_freq_factor", 4.0), ("low_freq_factor", 1.0),
                                   ("original_max_position_embeddings", 8192))),
        RopeConfig("yarn", 1e6, (("factor", 4.0), ("original_max_position_embeddings", 512), ("truncate", False))),
    ]
)  # fmt: skip


@st.composite
def configs(draw: Any) -> PEagleHeadConfig:
    kv, vocab = draw(st.integers(1, 8)), draw(st.integers(2, 1000))
    ids = draw(st.none() | st.sets(st.integers(0, 60), min_size=1, max_size=6).map(lambda s: tuple(sorted(s))))
    norm = draw(st.sampled_from(["", "fc_norm", "norm_before_fc"]))
    hidden, k = draw(sizes), draw(st.none() | st.integers(1, 16))
    return PEagleHeadConfig(
        hidden_size=hidden, target_hidden_size=hidden, intermediate_size=draw(sizes), num_layers=draw(st.integers(1, 8)),
        num_heads=kv * draw(st.integers(1, 4)), num_kv_heads=kv, head_dim=2 * draw(st.integers(1, 64)), vocab_size=vocab,
        draft_vocab_size=draw(st.integers(1, vocab)), rms_norm_eps=draw(st.floats(1e-8, 1e-2)),
        max_position_embeddings=draw(st.integers(1, 10**6)), rope=draw(ropes), aux_layer_ids=ids,
        num_aux=3 if ids is None else len(ids), mask_token_id=draw(st.integers(0, vocab - 1)),
        attention_bias=draw(st.booleans()), norm_before_residual=draw(st.booleans()), fc_norm=norm == "fc_norm",
        norm_before_fc=norm == "norm_before_fc", qk_norm=draw(st.booleans()), k_trained=k,
        target=draw(st.none() | st.just("a/b")) if k else None,
    )  # fmt: skip


@given(configs(), st.sampled_from(["peagle", "vllm", "speculators"]))
@settings(max_examples=300, deadline=None)
def test_what_is_written_is_read_back(config: PEagleHeadConfig, name: str) -> None:
    found = format_named(name)
    if name == "vllm" and config.qk_norm:
        with pytest.raises(PEagleError, match="cannot express"):
            found.write(config, "bfloat16")
        return
    raw = json.loads(json.dumps(found.write(config, "bfloat16")))
    assert config_format(raw, "config.json") is found
    assert found.parse(raw, "config.json") == config
