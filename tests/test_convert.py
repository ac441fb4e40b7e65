"""``sgl-peagle convert``: same bytes, same meaning, nothing lost, nothing half-written."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from formats_for_tests import ALL, with_target_rows, write_as
from heads_for_tests import random_head
from pair import HEAD, TARGET
from safetensors.torch import load_file
from test_malformed import shard

from sgl_peagle.cli import main
from sgl_peagle.errors import PEagleError
from sgl_peagle.heads import Head, read_head
from sgl_peagle.heads import convert as conversion

MASK = 3

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one layer, no LM head": {"num_hidden_layers": 1, "drop": ("lm_head.weight",)},
    "no embedding": {"drop": ("embed_tokens.weight",)},
    "biases, other residual": {"attention_bias": True, "norm_before_residual": True},
    "norm per aux layer, five layers": {"fc_norm": True, "eagle_aux_hidden_state_layer_ids": [0, 1, 3, 5, 7]},
    "norm over all aux": {"norm_before_fc": True},
    "default aux layers": {"eagle_aux_hidden_state_layer_ids": None},
    "reduced vocabulary": {"draft_vocab_size": 200},
    "llama3 RoPE": {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                     "original_max_position_embeddings": 64}},
    "yarn RoPE": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": False,
                                                      "original_max_position_embeddings": 512}},
    "K and target recorded": {"num_depths": 10, "target_model_name_or_path": "openai/gpt-oss-20b"},
}  # fmt: skip


def run(*args: Any, code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["convert", *map(str, args)])
    assert result.exit_code == code, result.output
    return result


def bits(head: Head) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Canonical name -> dtype, shape, bytes."""
    found = {}
    for canonical, info in head.tensors.items():
        data = (head.folder / info.file).read_bytes()[info.start : info.end]
        found[canonical] = (info.dtype, info.shape, data)
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=lambda name: name.replace(" ", "-"))
def test_round_trip(shape: str, tmp_path: Path) -> None:
    """vllm -> speculators -> peagle -> vllm: tensors to the bit, the same meaning."""
    first = random_head(tmp_path / "first", mask_token_id=MASK, **SHAPES[shape])
    run(first, tmp_path / "a", "--to", "speculators")
    run(tmp_path / "a", tmp_path / "b", "--to", "peagle")
    run(tmp_path / "b", tmp_path / "c", "--to", "vllm")
    heads = [read_head(str(tmp_path / name)) for name in ("first", "a", "b", "c")]
    assert [head.format.name for head in heads] == ["vllm", "speculators", "peagle", "vllm"]
    assert all(head.config == heads[0].config for head in heads)
    assert all(bits(head) == bits(heads[0]) for head in heads)
    original, final = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "c"))
    assert original.keys() == final.keys() and all(torch.equal(original[name], final[name]) for name in original)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("to", ["peagle", "vllm", "speculators"])
def test_every_format_converts(name: str, to: str, tmp_path: Path) -> None:
    judge = with_target_rows(HEAD, tmp_path / "judge", TARGET)
    source = write_as(judge, tmp_path / "source", name)
    mask = ["--mask-token-id", MASK] if name == "specforge" else []
    run(source, tmp_path / "out", "--to", to, "--target", TARGET, *mask)
    found, truth = read_head(str(tmp_path / "out")), bits(read_head(str(judge)))
    if name == "compact" and to == "peagle":
        assert found.has("embed_mask_row") and not found.has("embed_tokens.weight")
        truth["embed_mask_row"] = ("BF16", (128,), truth.pop("embed_tokens.weight")[2][256 * MASK : 256 * (MASK + 1)])
    assert bits(found) == truth
    assert found.config.aux_layer_ids == (2, 4, 5) and found.config.mask_token_id == MASK


def test_compact_and_back_is_exact(tmp_path: Path) -> None:
    judge = with_target_rows(HEAD, tmp_path / "judge", TARGET)
    run(judge, tmp_path / "small", "--to", "peagle", "--embed-from-target", "--target", TARGET)
    small = read_head(str(tmp_path / "small"))
    assert small.config.embed_from_target and small.tensors["embed_mask_row"].shape == (128,)
    run(tmp_path / "small", tmp_path / "full", "--to", "vllm", "--target", TARGET)
    assert bits(read_head(str(tmp_path / "full"))) == bits(read_head(str(judge)))
    refused = run(tmp_path / "small", tmp_path / "no", "--to", "vllm", code=1)
    assert "--target" in refused.output and not (tmp_path / "no").exists()
    # The MASK row may lie on either side of a piece's edge.
    info = small.tensors["embed_mask_row"]
    from sgl_peagle.heads import pieces
    from sgl_peagle.heads.target import target_embedding

    row = (small.folder / info.file).read_bytes()[info.start : info.end]
    folder, table = target_embedding(str(TARGET))
    whole = (folder / table.file).read_bytes()[table.start : table.end]
    expected = whole[: 256 * MASK] + row + whole[256 * (MASK + 1) :]
    original = pieces.read_chunks
    for size in (100, 256, 1000, 1 << 20):
        pieces.read_chunks = lambda file, info, size=size: original(file, info, size)
        try:
            rebuilt = pieces.Rebuilt(folder, table, "BF16", row, MASK)
            assert b"".join(bytes(piece) for piece in rebuilt.pieces()) == expected
        finally:
            pieces.read_chunks = original


def test_a_trained_embedding_is_not_thrown_away(tmp_path: Path) -> None:
    refused = run(HEAD, tmp_path / "out", "--to", "peagle", "--embed-from-target", "--target", TARGET, code=1)
    assert "differs from the target's embedding in row" in refused.output
    assert "--target" in run(HEAD, tmp_path / "out", "--to", "peagle", "--embed-from-target", code=1).output
    refused = run(HEAD, tmp_path / "out", "--to", "vllm", "--embed-from-target", "--target", TARGET, code=1)
    assert "cannot express" in refused.output
    assert not (tmp_path / "out").exists()


def test_what_a_format_cannot_express_is_refused(tmp_path: Path) -> None:
    norms = {f"{layer}.self_attn.{part}_norm.weight": torch.ones(32) for layer in ("midlayer", "layers.1") for part in "qk"}
    source = random_head(tmp_path / "source", mask_token_id=MASK, extra=norms)
    head = write_as(source, tmp_path / "head", "peagle", qk_norm=True)
    assert "q/k norms" in run(head, tmp_path / "out", "--to", "vllm", code=1).output
    run(head, tmp_path / "out", "--to", "speculators")
    assert read_head(str(tmp_path / "out")).config == read_head(str(head)).config
    biased = random_head(tmp_path / "biased", mask_token_id=MASK, extra={"fc.bias": torch.ones(128)})
    assert "bias of fc" in run(biased, tmp_path / "out2", "--to", "speculators", code=1).output


def test_speculators_get_the_mask_of_the_vocabulary(tmp_path: Path) -> None:
    head = random_head(tmp_path / "head", mask_token_id=MASK, draft_vocab_size=200, drop=("t2d",))
    run(head, tmp_path / "out", "--to", "speculators")
    found = load_file(tmp_path / "out" / "model.safetensors")
    ids = found["d2t"] + torch.arange(200)
    assert found["t2d"].dtype == torch.bool and found["t2d"].nonzero().flatten().tolist() == ids.tolist()


def test_record_licence_and_model_card(tmp_path: Path) -> None:
    source = random_head(tmp_path / "source", mask_token_id=MASK)
    for name in ("LICENSE", "README.md", "NOTICE.txt"):
        (source / name).write_text(f"the {name}")
    (source / "optimizer.pt").write_bytes(b"x")
    output = json.loads(run(source, tmp_path / "out", "--to", "peagle", "--json").output)
    record = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert output["ok"] and output["source"] == record["source"]
    hashes = {entry["file"]: entry["sha256"] for entry in record["source"]["files"]}
    for name in ("model.safetensors", "config.json", "LICENSE", "README.md", "NOTICE.txt"):
        assert hashes[name] == hashlib.sha256((source / name).read_bytes()).hexdigest()
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {"model.safetensors", "config.json", "LICENSE", "README.md", "NOTICE.txt", "conversion.json"}
    assert (tmp_path / "out" / "LICENSE").read_text() == "the LICENSE"
    run(tmp_path / "out", tmp_path / "again", "--to", "vllm")
    again = json.loads((tmp_path / "again" / "conversion.json").read_text())
    assert again["source"]["conversion"] == record


def test_shards_behind_links_as_in_the_hub_cache(tmp_path: Path) -> None:
    source = random_head(tmp_path / "source", mask_token_id=MASK)
    truth = bits(read_head(str(source)))
    shard(source)
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "models--a--b" / "snapshots" / commit
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(source.iterdir())):
        shutil.move(file, blobs / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    run(snapshot, tmp_path / "out", "--to", "peagle")
    assert bits(read_head(str(tmp_path / "out"))) == truth
    assert json.loads((tmp_path / "out" / "conversion.json").read_text())["source"]["revision"] == commit


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    source = random_head(tmp_path / "source", mask_token_id=MASK)
    out = tmp_path / "out"
    run(source, out, "--to", "vllm")
    before = (out / "config.json").read_bytes()
    assert "--force" in run(source, out, "--to", "peagle", code=1).output
    assert (out / "config.json").read_bytes() == before
    run(source, out, "--to", "peagle", "--force")
    assert read_head(str(out)).format.name == "peagle"
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("precious")
    assert "not a converted head" in run(source, mine, "--to", "peagle", "--force", code=1).output
    assert (mine / "thesis.txt").read_text() == "precious"
    (tmp_path / "file").write_text("x")
    run(source, tmp_path / "file", "--to", "peagle", "--force", code=1)
    (tmp_path / "link").symlink_to(out)
    run(source, tmp_path / "link", "--to", "peagle", "--force", code=1)
    for inside in (source, source / "deeper", tmp_path):
        assert "overlaps" in run(source, inside, "--to", "peagle", "--force", code=1).output
    assert {p.name for p in tmp_path.iterdir()} == {"source", "out", "mine", "file", "link"}


def test_dry_run_writes_nothing(tmp_path: Path) -> None:
    source = random_head(tmp_path / "source", mask_token_id=MASK)
    output = run(source, tmp_path / "out", "--to", "peagle", "--dry-run").output
    assert "would write" in output and [p.name for p in tmp_path.iterdir()] == ["source"]
    (tmp_path / "out").mkdir()
    run(source, tmp_path / "out", "--to", "peagle", "--dry-run", code=1)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit, OSError])
@pytest.mark.parametrize("where", ["_write_weights", "_verify", "_record"])
def test_an_interrupted_run_leaves_nothing(
    where: str, interruption: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = random_head(tmp_path / "source", mask_token_id=MASK)
    run(source, tmp_path / "out", "--to", "vllm")
    before = bits(read_head(str(tmp_path / "out")))
    plan = conversion.make_plan(read_head(str(source)), "peagle")
    original = getattr(conversion, where)

    def interrupted(*args: Any) -> Any:
        original(*args)
        raise interruption("now")

    monkeypatch.setattr(conversion, where, interrupted)
    with pytest.raises(interruption):
        conversion.convert(plan, tmp_path / "out", origin="source", force=True)
    assert {p.name for p in tmp_path.iterdir()} == {"source", "out"}
    assert bits(read_head(str(tmp_path / "out"))) == before


SLOW = """
import sys, time
from sgl_peagle.cli import main
from sgl_peagle.heads import convert
def verify(*_):
    print("written", flush=True)
    for _ in range(600):  # a signal just before one long sleep would not end it
        time.sleep(0.1)
convert._verify = verify
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_clean_up(number: signal.Signals, tmp_path: Path) -> None:
    source = random_head(tmp_path / "source", mask_token_id=MASK)
    command = [sys.executable, "-c", SLOW, "convert", str(source), str(tmp_path / "out"), "--to", "vllm"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "written\n"
        assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".out.partial-")]
        process.send_signal(number)
        assert process.wait(30) == 128 + number
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("position", [0, 1000, -1])
def test_verification_sees_a_changed_byte(position: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = random_head(tmp_path / "source", mask_token_id=MASK)
    plan = conversion.make_plan(read_head(str(source)), "peagle")
    original = conversion._write_weights

    def damaged(plan: Any, path: Path, *pools: Any) -> Any:
        result = original(plan, path, *pools)
        data = bytearray(path.read_bytes())
        start = 8 + int.from_bytes(data[:8], "little")
        data[start + position if position >= 0 else -1] ^= 1
        path.write_bytes(data)
        return result

    monkeypatch.setattr(conversion, "_write_weights", damaged)
    with pytest.raises(PEagleError, match="differs after writing"):
        conversion.convert(plan, tmp_path / "out", origin="source")
    assert not (tmp_path / "out").exists()


def test_casting(tmp_path: Path) -> None:
    source = random_head(tmp_path / "source", mask_token_id=MASK, draft_vocab_size=200)
    run(source, tmp_path / "out", "--to", "vllm", "--dtype", "bfloat16")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("source", "out"))
    for name, tensor in before.items():
        expected = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert after[name].dtype == expected.dtype and torch.equal(after[name], expected)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    big = random_head(tmp_path / "big", mask_token_id=MASK, extra={"fc.weight": torch.full((128, 384), 1e6)})
    assert "beyond the range" in run(big, tmp_path / "no", "--to", "vllm", "--dtype", "float16", code=1).output
    assert not (tmp_path / "no").exists()


def test_mask_id_given_and_recorded(tmp_path: Path) -> None:
    head = write_as(HEAD, tmp_path / "head", "specforge")
    assert "--mask-token-id" in run(head, tmp_path / "out", "--to", "peagle", code=1).output
    run(head, tmp_path / "out", "--to", "peagle", "--mask-token-id", MASK)
    assert read_head(str(tmp_path / "out")).config.mask_token_id == MASK
    assert "3, and 4 was given" in run(HEAD, tmp_path / "no", "--to", "peagle", "--mask-token-id", 4, code=1).output


def test_the_target_is_checked(tmp_path: Path) -> None:
    other = random_head(tmp_path / "head", mask_token_id=1)  # the target's bos
    assert "bos_token" in run(other, tmp_path / "out", "--to", "peagle", "--target", TARGET, code=1).output
    wide = random_head(tmp_path / "wide", mask_token_id=MASK, target_hidden_size=64)
    assert "hidden size 64" in run(wide, tmp_path / "out", "--to", "peagle", "--target", TARGET, code=1).output
    default = random_head(tmp_path / "default", mask_token_id=MASK, eagle_aux_hidden_state_layer_ids=None)
    run(default, tmp_path / "out", "--to", "peagle", "--target", TARGET)
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert "target" not in raw, "a local path means nothing elsewhere"


def test_usage_errors_have_their_own_status(tmp_path: Path) -> None:
    run(HEAD, tmp_path / "out", "--to", "specforge", code=2)
    run(HEAD, tmp_path / "out", code=2)
    run(HEAD, tmp_path / "out", "--to", "peagle", "--mask-token-id", "-1", code=2)
