"""Broken heads: each is refused with the file, the tensor or key, and a fix; by inspect, convert and the server's checks."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from click.testing import CliRunner
from formats_for_tests import write_as
from heads_for_tests import random_head
from safetensors.torch import load_file, save_file

from sgl_peagle.cli import main
from sgl_peagle.errors import PEagleError
from sgl_peagle.heads import read_head
from sgl_peagle.heads.checks import quick_checks, require

MASK = 3
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
NAN = float("nan")

Change = Callable[[Path], None]


def tensors(**edits: Any) -> Change:
    """Edit tensors: a function of the old one, a new one, or None to drop it (names with ``__`` for dots)."""

    def change(folder: Path) -> None:
        found = load_file(folder / WEIGHTS)
        for key, edit in edits.items():
            name = key.replace("__", ".")
            value = edit(found[name]) if callable(edit) else edit
            found.pop(name, None)
            if value is not None:
                found[name] = value
        save_file(found, folder / WEIGHTS)

    return change


def config(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        raw = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(raw))

    return change


def file(name: str, content: bytes | str | None) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        if content is not None:
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return change


def cut(bytes_left: Callable[[int], int]) -> Change:
    def change(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(data[: bytes_left(len(data))])

    return change


def header(text: str) -> Change:
    data = text.encode()
    return file(WEIGHTS, struct.pack("<Q", len(data)) + data)


def shard(folder: Path) -> None:
    """Split the weights into two files with an index."""
    found = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names, weight_map = sorted(found), {}
    for i, part in enumerate((names[::2], names[1::2]), 1):
        save_file({name: found[name] for name in part}, folder / f"model-{i}-of-2.safetensors")
        weight_map |= {name: f"model-{i}-of-2.safetensors" for name in part}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def sharded(then: Change) -> Change:
    def change(folder: Path) -> None:
        shard(folder)
        then(folder)

    return change


def swap(folder: Path) -> None:
    first, second = folder / "model-1-of-2.safetensors", folder / "model-2-of-2.safetensors"
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)


def index(edit: Callable[[dict[str, Any]], Any]) -> Change:
    def change(folder: Path) -> None:
        raw = json.loads((folder / INDEX).read_text())
        edit(raw["weight_map"])
        (folder / INDEX).write_text(json.dumps(raw))

    return change


def row(index_: int, value: float, width: int | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
    def edit(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor[index_, :width] = value
        return tensor

    return edit


def at(position: int, value: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def edit(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[position] = value
        return tensor

    return edit


#: name -> (how to break a head with a reduced vocabulary, words that the refusal must contain)
CASES: dict[str, tuple[Change, tuple[str, ...]]] = {
    # files
    "truncated in the middle": (cut(lambda n: n // 2), (WEIGHTS, "truncated")),
    "last byte missing": (cut(lambda n: n - 1), (WEIGHTS,)),
    "empty file": (file(WEIGHTS, b""), (WEIGHTS,)),
    "no safetensors": (file(WEIGHTS, b"PK\x03\x04 not this"), (WEIGHTS,)),
    "header is no JSON": (header("{"), (WEIGHTS,)),
    "header length beyond the file": (file(WEIGHTS, struct.pack("<Q", 1 << 40)), (WEIGHTS,)),
    "offsets beyond the file": (header('{"fc.weight":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'), (WEIGHTS,)),
    "only a pickle": (lambda f: (f / WEIGHTS).rename(f / "pytorch_model.bin"), ("pytorch_model.bin", "code")),
    "no weights": (file(WEIGHTS, None), ("no safetensors file",)),
    "config missing": (file("config.json", None), ("config.json", "does not exist")),
    "config is bad JSON": (file("config.json", '{"a": '), ("config.json", "JSON")),
    "config is no object": (file("config.json", "[]"), ("config.json", "list")),
    "config is not UTF-8": (file("config.json", b'{"a": "\xff"}'), ("config.json", "JSON")),
    "config nests too deeply": (file("config.json", "[" * 100_000), ("config.json", "JSON")),
    "config is huge": (file("config.json", b" " * (17 << 20)), ("config.json", "bytes")),
    "config names a key twice": (file("config.json", '{"hidden_size": 1, "hidden_size": 2}'), ("hidden_size", "twice")),
    # shards
    "shards swapped": (sharded(swap), (INDEX, "swapped")),
    "shard missing": (sharded(file("model-2-of-2.safetensors", None)), ("model-2-of-2.safetensors", "missing")),
    "index escapes upwards": (sharded(index(lambda m: m.update({"fc.weight": "../x.safetensors"}))), ("outside its folder",)),
    "index escapes by an absolute path": (sharded(index(lambda m: m.update({"fc.weight": "/etc/passwd"}))), ("outside its folder",)),
    "index names a pickle": (sharded(index(lambda m: m.update({"fc.weight": "x.bin"}))), ("x.bin", "code")),
    "index lists a tensor that is nowhere": (sharded(index(lambda m: m.update({"x": "model-1-of-2.safetensors"}))), (INDEX, "x is in")),
    "index leaves a tensor out": (sharded(index(lambda m: m.pop("fc.weight"))), ("fc.weight", "does not list")),
    "a file beside the index": (sharded(lambda f: save_file({"x": torch.ones(1)}, f / "more.safetensors")), ("more.safetensors",)),
    "index without weight_map": (sharded(file(INDEX, "{}")), (INDEX, "weight_map")),
    "index is huge": (sharded(file(INDEX, b" " * (17 << 20))), (INDEX, "bytes")),
    # tensors
    "fc missing": (tensors(fc__weight=None), ("fc.weight", "missing")),
    "a norm of layer 1 missing": (tensors(layers__1__input_layernorm__weight=None), ("layers.1.input_layernorm.weight",)),
    "unknown tensor": (tensors(layers__1__hidden_norm__weight=torch.ones(128)), (WEIGHTS, "layers.1.hidden_norm.weight")),
    "wrong shape": (tensors(fc__weight=torch.ones(128, 256)), (WEIGHTS, "fc.weight", "[128, 256]")),
    "layer beyond num_hidden_layers": (config(num_hidden_layers=1), ("layers.1.", "num_hidden_layers")),
    "fewer layers than num_hidden_layers": (config(num_hidden_layers=3), ("layers.2.", "missing")),
    "quantized weights": (tensors(fc__weight=lambda t: t.to(torch.float8_e4m3fn)), ("fc.weight", "F8_E4M3", "quantized")),
    "integer weights": (tensors(norm__weight=lambda t: t.to(torch.int8)), ("norm.weight", "I8")),
    "d2t as floats": (tensors(d2t=lambda t: t.float()), ("d2t", "F32")),
    "NaN in a weight": (tensors(layers__1__mlp__up_proj__weight=at(777, NAN)), (WEIGHTS, "layers.1.mlp.up_proj.weight", "NaN")),
    "infinity in a weight": (tensors(lm_head__weight=at(5, float("inf"))), (WEIGHTS, "lm_head.weight", "infinity")),
    "infinity in bfloat16": (tensors(lm_head__weight=lambda t: at(-1, -float("inf"))(t.bfloat16())), ("lm_head.weight",)),
    "infinity in float16": (tensors(fc__weight=lambda t: at(9, float("inf"))(t.half())), ("fc.weight", "infinity")),
    "both names of layer 0": (tensors(layers__0__hidden_norm__weight=torch.ones(128)), ("same tensor", "midlayer.hidden_norm")),
    "names of another format": (tensors(model__fc__weight=torch.ones(128, 384)), ("model.", "NeMo")),
    # vocabulary and mask
    "d2t out of range": (tensors(d2t=at(-1, 10_000)), (WEIGHTS, "d2t", "outside 0 ... 511")),
    "d2t holds ids": (tensors(d2t=lambda t: t + torch.arange(len(t))), ("d2t", "absolute ids")),
    "d2t negative": (tensors(d2t=at(0, -1)), ("d2t", "target id -1")),
    "d2t repeats": (tensors(d2t=lambda t: torch.cat([t[:1], t[:1] - 1, t[2:]])), ("d2t", "several draft ids")),
    "d2t missing": (tensors(d2t=None, t2d=None), ("no tensor d2t",)),
    "t2d disagrees": (tensors(t2d=lambda t: ~t), ("t2d", "disagree")),
    "MASK row all zeros": (tensors(embed_tokens__weight=row(MASK, 0.0)), ("embed_tokens.weight", "row 3", "zeros")),
    "MASK row NaN": (tensors(embed_tokens__weight=row(MASK, NAN, 1)), ("embed_tokens.weight", "row 3", "not finite")),
    "mask_hidden NaN": (tensors(mask_hidden=at(0, NAN)), ("mask_hidden", "not finite")),
    "mask id beyond the vocabulary": (config(mask_token_id=512), ("512", "outside the vocabulary")),
    "mask id negative": (config(mask_token_id=-1), ("mask_token_id", "-1")),
    "mask id missing": (config(mask_token_id=None), ("no mask token id", "--mask-token-id")),
    # config
    "unknown key": (config(norm_befor_fc=True), ("norm_befor_fc",)),
    "size as text": (config(hidden_size="128"), ("hidden_size", "'128'")),
    "size as true": (config(num_attention_heads=True), ("num_attention_heads",)),
    "size zero": (config(intermediate_size=0), ("intermediate_size",)),
    "absurd layer count": (config(num_hidden_layers=10**9), ("num_hidden_layers",)),
    "heads not shared evenly": (config(num_key_value_heads=3), ("no multiple",)),
    "epsilon NaN": (config(rms_norm_eps=NAN), ("rms_norm_eps",)),
    "unknown RoPE parameter": (config(rope_scaling={"rope_type": "linear", "factor": 2.0, "what": 1}), ("what",)),
    "incomplete RoPE": (config(rope_scaling={"rope_type": "llama3", "factor": 8.0}), ("low_freq_factor",)),
    "two RoPEs": (
        config(rope_parameters={"rope_type": "default"}, rope_scaling={"rope_type": "linear", "factor": 2.0}),
        ("rope_parameters and rope_scaling differ",),
    ),
    "aux ids as text": (config(eagle_aux_hidden_state_layer_ids="2,4,5"), ("eagle_aux_hidden_state_layer_ids",)),
    "no aux ids in the list": (config(eagle_aux_hidden_state_layer_ids=[]), ("aux layer ids", "empty")),
    "draft vocabulary larger than the target's": (config(draft_vocab_size=1000), ("draft_vocab_size 1000",)),
    "architectures as text": (config(architectures="LlamaForCausalLMEagle3"), ("architectures",)),
    # other methods
    "plain EAGLE-3": (tensors(mask_hidden=None), ("plain EAGLE-3", "--speculative-algorithm EAGLE3")),
    "EAGLE-3 of speculators": (config(speculators_model_type="eagle3"), ("plain EAGLE-3", "EAGLE3")),
    "PARD model": (config(architectures=["Qwen3ForCausalLM"], pard_token=3), ("PARD", "whole language model")),
    "a target": (config(architectures=["LlamaForCausalLM"]), ("whole language model",)),
    "Medusa-style heads": (config(parallel_draft_step=4), ("Medusa-style", "parallel_draft_step")),
    "DFlash": (config(architectures=["DFlashDraftModel"]), ("DFlash", "--speculative-algorithm DFLASH")),
    "DFlash of speculators": (config(speculators_model_type="dflash"), ("'dflash'",)),
    "two formats at once": (config(speculators_model_type="peagle"), ("neither is guessed",)),
    "unknown architecture": (config(architectures=["SomethingElse"]), ("SomethingElse", "known are")),
    "sequential head": (config(parallel_drafting=False), ("parallel_drafting", "EAGLE3")),
}  # fmt: skip

#: Found only by reading all weights, which the server leaves to inspect and convert.
NEEDS_SCAN = {name for name in CASES if name.startswith(("NaN in a weight", "infinity"))}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_head(tmp_path_factory.mktemp("good") / "head", mask_token_id=MASK, draft_vocab_size=200)


def test_there_are_enough() -> None:
    assert len(CASES) >= 30


@pytest.mark.parametrize("name", CASES, ids=lambda name: name.replace(" ", "-"))
def test_broken_heads_are_refused(name: str, good: Path, tmp_path: Path) -> None:
    change, words = CASES[name]
    folder = tmp_path / "head"
    shutil.copytree(good, folder)
    change(folder)
    run = CliRunner().invoke(main, ["convert", str(folder), str(tmp_path / "out"), "--to", "peagle", "--json"])
    assert run.exit_code == 1, run.output
    error = json.loads(run.output)["error"]
    text = " ".join(error.values())
    assert all(error.values()) and all(word in text for word in words), text
    assert str(folder) in error["what"] or "aux" in name
    assert sorted(p.name for p in tmp_path.iterdir()) == ["head"], "a refused conversion left something behind"

    run = CliRunner().invoke(main, ["inspect", str(folder)])
    assert run.exit_code == 1 and all(word in run.output for word in words), run.output

    if name not in NEEDS_SCAN:
        with pytest.raises(PEagleError) as raised:
            require(quick_checks(read_head(str(folder))))
        assert raised.value.what == error["what"]


def test_the_head_that_is_broken_above_is_good(good: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke(main, ["inspect", str(good)])
    assert run.exit_code == 0, run.output
    shutil.copytree(good, tmp_path / "head")
    shard(tmp_path / "head")
    assert CliRunner().invoke(main, ["inspect", str(tmp_path / "head")]).exit_code == 0


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("specforge", {}, ("no mask token id", "SGL_PEAGLE_MASK_TOKEN_ID")),
        ("specforge", {"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [2, 4, 5]}, ("layers or capture points",)),
        ("nemo", {"parallel_drafting": None}, ("parallel_drafting", "EAGLE3")),
        ("speculators", {"transformer_layer_config": None}, ("transformer_layer_config",)),
        ("speculators", {"model_type": "llama"}, ("model_type",)),
        ("speculators", {"architectures": ["Eagle3Speculator"]}, ("neither is guessed",)),
        ("speculators", {"speculators_config": {"algorithm": "eagle3"}}, ("algorithm",)),
        ("peagle", {"format_version": 2}, ("format_version",)),
        ("peagle", {"qk_norm": True}, ("q_norm", "missing")),
        ("peagle", {"embed_from_target": True}, ("embed_tokens.weight",)),
        ("compact", {"embed_from_target": False}, ("embed_mask_row",)),
        ("compact", {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}, ("embed_mask_row",)),
    ],
    ids=str,
)
def test_refusals_of_one_format(name: str, changes: dict[str, Any], words: tuple[str, ...], tmp_path: Path) -> None:
    source = random_head(tmp_path / "source", mask_token_id=MASK)
    folder = write_as(source, tmp_path / "head", name, **changes)
    with pytest.raises(PEagleError) as error:
        read_head(str(folder))
    text = f"{error.value.what} {error.value.why} {error.value.fix}"
    assert all(word in text for word in words), text
