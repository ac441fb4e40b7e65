"""The teacher-forced walk: its toy, the oracle on the tiny pair, and EAGLE-3 by brute force."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pair
import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from sgl_peagle.errors import PEagleError
from sgl_peagle.oracle import OracleHead
from sgl_peagle.train import acceptance
from sgl_peagle.train.acceptance import Document, Evaluator, answer_rows, matches, summarise, walk
from sgl_peagle.train.corpus import Corpus
from sgl_peagle.train.data_cli import main
from sgl_peagle.train.draft_head import DraftHead, load

K = 7


def test_walk_of_the_toy() -> None:
    """Answer rows 2 … 5, L = 1, 2, 0, 0: rounds at 2, 4, 5."""
    lengths = {2: 1, 3: 2, 4: 0, 5: 0}
    visited = walk(lengths, [2, 3, 4, 5])
    assert visited == [2, 4, 5]
    assert sum(lengths[a] + 1 for a in visited) / len(visited) == pytest.approx(4 / 3)
    assert 1 + sum(lengths.values()) / len(lengths) == 1.75


def test_summary_of_the_toy() -> None:
    found = summarise([Document([{2: 1, 3: 2, 4: 0, 5: 0}], [7], False, "toy")], 3)
    assert found["walk"] == {"rounds": 3, "acceptance_length": 1.3333, "tokens_per_round": 1.3333, "per_position": [0.3333, 0, 0]}
    assert found["all_anchor"]["acceptance_length"] == 1.75
    assert found["by_kind"]["toy"]["rounds"] == 3 and found["by_context"]["<=512"]["rounds"] == 3


def test_smaller_k_is_a_prefix() -> None:
    one = summarise([Document([{2: 1, 3: 2, 4: 0, 5: 0}], [7], False, "")], 1)
    assert one["all_anchor"] == {"rounds": 4, "acceptance_length": 1.5, "tokens_per_round": 1.5, "per_position": [0.5]}


def test_rows_of_answers() -> None:
    """x_3 x_4 x_5 and x_8 x_9 were generated, x_11 alone gives no round."""
    marks = torch.tensor([0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 1], dtype=torch.bool)
    assert answer_rows(marks) == [[2, 3], [7]]
    assert answer_rows(torch.tensor([1, 1, 1], dtype=torch.bool)) == [[0]]
    assert answer_rows(torch.zeros(4, dtype=torch.bool)) == []


def test_matches_stop_at_the_answers_end() -> None:
    tokens = torch.tensor([9, 9, 1, 2, 3, 4, 7, 7])  # the answer is 1 2 3 4; 7 7 are the template's
    drafts = torch.tensor([[2, 3, 4], [3, 4, 7], [4, 7, 7]])
    assert matches(tokens, 5, [1, 2, 3], drafts) == [3, 2, 1]
    assert matches(tokens, 5, [1, 2, 3], torch.tensor([[2, 0, 4], [0, 4, 7], [4, 7, 7]])) == [1, 0, 1]


def test_end_of_an_answer_is_counted_like_an_engine_does() -> None:
    """A round that drafts to the answer's end gains no bonus token behind it."""
    tally = acceptance.Tally(3)
    tally.add(2, 2)
    assert tally.as_json() == {"rounds": 1, "acceptance_length": 3.0, "tokens_per_round": 2.0, "per_position": [1, 1, 0]}


# -- the tiny pair ----------------------------------------------------------------------------------------------------


def head_of(folder: Path) -> DraftHead:
    model = pair.hf_model()
    embedding, lm_head = model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()
    return load(folder, embedding, lm_head, torch.device("cpu"), torch.float32)


def texts(count: int, new: int = 40) -> list[tuple[int, tuple[int, ...]]]:
    found = [prompt for prompt in pair.prompts(60) if len(prompt) > 3][:count]
    return [(len(prompt), prompt + pair.greedy(prompt, new)) for prompt in found]


@pytest.mark.parametrize("rope", [None, "chunks"])
def test_peagle_equals_the_oracle(rope: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All drafts at all anchors, also when the anchors go in chunks of one."""
    if rope:
        monkeypatch.setitem(__import__("sgl_peagle.train.draft_head", fromlist=["_SCORES"])._SCORES, "cpu", 1)
    head, rounds = head_of(pair.HEAD), 0
    for length, text in texts(2 if rope else 5):
        aux = pair.aux_hidden(text)
        anchors = torch.arange(length - 1, len(text) - 2, 3)
        mine = head.drafts(torch.tensor(text), aux, anchors, K)
        for a, row in zip(anchors.tolist(), mine.tolist()):
            truth = pair.oracle().drafts(torch.tensor(text[: a + 2]), aux[: a + 1], K)
            assert all(x == y or m < pair.TIE_MARGIN for x, y, m in zip(row, truth.ids, truth.margin.tolist()))
            rounds += 1
    assert rounds > 20


def test_evaluator_walks_like_the_oracle(tmp_path: Path) -> None:
    """Rounds, walk and per-position rates of a corpus, against a loop over the oracle."""
    documents = [(list(text), [False] * length + [True] * (len(text) - length)) for length, text in texts(6)]
    manifest = {"loops": [False] * 5 + [True], "kinds": list("aabbcc"), "set": "toy"}
    Corpus.of(documents, manifest).write(tmp_path / "toy")
    evaluator = Evaluator(str(pair.TARGET), [pair.HEAD], "cpu")
    (found,) = evaluator.run(Corpus.open(tmp_path / "toy"), K, batch_tokens=100)
    gained = []
    for length, text in texts(6):
        a = length - 1
        while a + 2 < len(text):
            drafts = pair.oracle().drafts(torch.tensor(text[: a + 2]), pair.aux_hidden(text)[: a + 1], K).ids
            right = 0
            while right < K and a + 2 + right < len(text) and drafts[right] == text[a + 2 + right]:
                right += 1
            gained.append(right + 1)
            a += right + 1
    whole = summarise(found, K)["walk"]
    assert whole["rounds"] == len(gained)
    assert whole["acceptance_length"] == pytest.approx(sum(gained) / len(gained), abs=1e-3)
    assert whole["acceptance_length"] > 1.3  # the tiny head is trained
    report = acceptance.report(found, [3, K])
    assert report["3"]["all"]["documents"] == 6 and report["3"]["without_loops"]["documents"] == 5

    out = tmp_path / "result.json"
    arguments = ["evaluate", "--head", str(pair.HEAD), "--target", str(pair.TARGET), "--corpus", str(tmp_path / "toy")]
    result = CliRunner().invoke(main, [*arguments, "--k", "3,7", "--out", str(out)])
    assert result.exit_code == 0, result.output
    stored = json.loads(out.read_text())["heads"]["head"]["toy"]["7"]["all"]["walk"]
    assert stored == whole
    assert CliRunner().invoke(main, [*arguments, "--out", str(out)]).exit_code == 1  # not overwritten
    assert CliRunner().invoke(main, [*arguments, "--k", "0"]).exit_code == 2


def make_eagle3(folder: Path) -> Path:
    """The tiny head's first layer as an EAGLE-3 head in SGLang's form (its drafts are poor, its arithmetic is EAGLE-3's)."""
    tensors = load_file(pair.HEAD / "model.safetensors")
    kept = {n: t for n, t in tensors.items() if n.startswith("midlayer.") or n in ("fc.weight", "norm.weight")}
    folder.mkdir()
    save_file(kept, folder / "model.safetensors")
    config = json.loads((pair.HEAD / "config.json").read_text())
    dropped = ("mask_token_id", "ptd_token_id", "pard_token", "parallel_drafting", "eagle_aux_hidden_state_layer_ids", "num_depths")
    config = {key: value for key, value in config.items() if key not in dropped}
    points = {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in pair.AUX_POINTS], "use_aux_hidden_state": True}
    config |= {"num_hidden_layers": 1, "draft_vocab_size": None, "eagle_config": points, "training": {"note": "none"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def brute_force_eagle3(folder: Path, text: tuple[int, ...], anchor: int, k: int) -> list[int]:
    """K drafts, every step recomputed over its whole context: the oracle's forward over an ever longer list of rows."""
    model, aux = pair.hf_model(), pair.aux_hidden(text)
    config = json.loads((folder / "config.json").read_text()) | {"draft_vocab_size": 512}
    tensors = load_file(folder / "model.safetensors") | {"mask_hidden": torch.zeros(1, 1, aux.shape[1])}
    judge = OracleHead(
        config, tensors, model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()
    )
    tokens, hidden, drafts = torch.tensor(text[1 : anchor + 2]), judge._combine(aux[: anchor + 1].float()), []
    for _ in range(k):
        last, _ = judge._forward(tokens, hidden, judge._positions(len(tokens), 1), sampled=1)
        normed = last[0] * torch.rsqrt(last[0].square().mean() + config["rms_norm_eps"]) * judge._norm
        drafts.append(int(F.linear(normed, judge._lm_head).argmax()))
        tokens, hidden = torch.cat([tokens, torch.tensor(drafts[-1:])]), torch.cat([hidden, last])
    return drafts


def test_eagle3_equals_brute_force(tmp_path: Path) -> None:
    folder = make_eagle3(tmp_path / "eagle3")
    head, compared = head_of(folder), 0
    assert head.method == "eagle3" and head.config.aux_layer_ids == pair.AUX_POINTS
    for length, text in texts(4):
        anchors = torch.arange(length - 1, len(text) - 2, 5)
        mine = head.drafts(torch.tensor(text), pair.aux_hidden(text), anchors, 5).tolist()
        for a, row in zip(anchors.tolist(), mine):
            assert row == brute_force_eagle3(folder, text, a, 5)
            compared += 1
    assert compared > 15


def test_both_methods_in_one_run(tmp_path: Path) -> None:
    folder = make_eagle3(tmp_path / "eagle3")
    length, text = texts(1)[0]
    corpus = Corpus.of([(list(text), [False] * length + [True] * (len(text) - length))], {})
    evaluator = Evaluator(str(pair.TARGET), [pair.HEAD, folder], "cpu")
    assert [head.method for head in evaluator.heads] == ["peagle", "eagle3"]
    peagle, eagle3 = evaluator.run(corpus, 3)
    assert len(peagle) == len(eagle3) == 1
    assert summarise(peagle, 3)["walk"]["acceptance_length"] > 1


def test_what_is_no_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PEagleError, match="no safetensors"):
        head_of(tmp_path)
    folder = make_eagle3(tmp_path / "eagle3")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"norm_output": True}))
    with pytest.raises(PEagleError, match="norm_output"):
        head_of(folder)
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 300}))
    with pytest.raises(PEagleError, match="gate_proj"):
        head_of(folder)
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Other"]}))
    with pytest.raises(PEagleError, match="mask_hidden"):
        head_of(folder)


@pytest.mark.skipif(find_spec("sglang") is None or torch.accelerator.is_available(), reason="needs SGLang on a CPU")
@pytest.mark.parametrize("method", ["peagle", "eagle3"])
def test_walk_equals_the_engine(method: str, tmp_path: Path) -> None:
    """Rounds and tokens of real CPU engines, request by request, are those of the walk (float32)."""
    import harness

    k, new = 3, 30
    head = pair.HEAD if method == "peagle" else make_eagle3(tmp_path / "eagle3")
    arguments = {"speculative_num_draft_tokens": k + 1, "speculative_draft_model_path": str(head)}
    if method == "peagle":
        arguments["speculative_algorithm"] = "PEAGLE"
    else:
        arguments |= {"speculative_algorithm": "EAGLE3", "speculative_num_steps": k, "speculative_eagle_topk": 1}
    prompts = [list(prompt) for prompt in pair.prompts(40) if len(prompt) > 3][:8]
    sampling = {"temperature": 0, "max_new_tokens": new}
    outputs = harness.with_engine(
        lambda engine: engine.generate(input_ids=prompts, sampling_params=sampling), model_path=str(pair.TARGET), **arguments
    )
    answers = [list(output["output_ids"]) for output in outputs]
    documents = [(p + a, [False] * len(p) + [True] * len(a)) for p, a in zip(prompts, answers)]
    (found,) = Evaluator(str(pair.TARGET), [head], "cpu").run(Corpus.of(documents, {}), k)
    rounds = {"walk": [], "engine": []}
    for document, output in zip(found, outputs):
        rounds["walk"].append(summarise([document], k)["walk"]["rounds"])
        rounds["engine"].append(output["meta_info"].get("spec_verify_ct", 0))
    assert rounds["walk"] == rounds["engine"]
    engine_length = sum(len(a) - 1 for a in answers) / sum(rounds["engine"])
    assert summarise(found, k)["walk"]["tokens_per_round"] == pytest.approx(engine_length, abs=1e-4)
