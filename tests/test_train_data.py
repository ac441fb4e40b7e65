"""The data pipeline: filters, prompts, chat pieces, stages on the tiny target, restarts, and both backends."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pair
import pytest
import torch
from click.testing import CliRunner
from data_runs import MASK, PLANTED, files, make_run  # noqa: F401  (files is a fixture)

from sgl_peagle.errors import PEagleError
from sgl_peagle.train import filters, stdlib_code
from sgl_peagle.train.chat import ChatFormat
from sgl_peagle.train.conversations import Document, Speaker, Task
from sgl_peagle.train.corpus import MANIFEST, TENSORS, Corpus
from sgl_peagle.train.data_cli import main
from sgl_peagle.train.generate import Reply, Request
from sgl_peagle.train.prompts import COMPLETE, Prompt, openers, read_prompts, stdlib_split
from sgl_peagle.train.regenerate import target_hash

# -- filters ----------------------------------------------------------------------------------------------------------


def test_loops_are_found_at_the_third_occurrence() -> None:
    period = list(range(20))
    assert filters.loop_start(period * 3) == 40
    assert filters.loop_start(period * 2 + list(range(15))) is None  # 15 tokens of the third are no run of 16
    assert filters.loop_start([1, 2, 3] + [9] * 18) == 5
    assert filters.loop_start([9] * 17) is None
    assert filters.loop_start(list(range(500))) is None
    assert filters.loop_start([]) is None


def test_loops_are_cut_or_the_answer_dropped() -> None:
    period = list(range(20))
    assert filters.cut_loop(period * 4) == (period * 2, "cut")
    assert filters.cut_loop([7] * 40) == ([], "dropped")
    assert filters.cut_loop(period) == (period, "whole")


@pytest.mark.parametrize(
    ("text", "tokens", "fault"),
    [
        ("Why is the sky blue?", 6, None),
        ("Why", 1, "too short"),
        ("word " * 10, 250, "too long"),
        ("Say <|im_end|> now please", 8, "template token"),
        ("very very very very good", 5, "repeats words"),
        ("?!? ... !!", 6, "repeats words"),
    ],
)
def test_prompt_faults(text: str, tokens: int, fault: str | None) -> None:
    assert filters.prompt_fault(text, tokens, ["<|im_end|>"]) == fault


def test_duplicates_by_eight_words_or_whole() -> None:
    seen = filters.Duplicates()
    assert seen.is_new("Tell me about the history of the city of Rome")
    assert not seen.is_new("tell me ABOUT the history, of the city of Rome!")
    assert not seen.is_new("Please tell me about the history of the city now")  # eight words in a row
    assert seen.is_new("Tell me about the history of the town of Pisa")
    whole = filters.Duplicates(0)
    assert whole.is_new("a b c d e f g h i") and whole.is_new("a b c d e f g h j") and not whole.is_new("A b c d e f g h i")


def test_thirteen_words_are_held_out() -> None:
    text = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
    held = filters.HeldOut([text, "a short prompt"])
    assert held.overlaps("Now: two three four five six seven eight nine ten eleven twelve thirteen fourteen!")
    assert not held.overlaps("three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen")
    assert held.overlaps("A short prompt") and not held.overlaps("a short prompt more")


# -- prompts ----------------------------------------------------------------------------------------------------------


def test_openers() -> None:
    found = openers()
    assert 200 <= len(found) <= 260 and len(set(found)) == len(found)
    assert all(text == text.strip() and 1 <= len(text.split()) < filters.DUPLICATE_WORDS for text in found)


def test_split_of_the_standard_library() -> None:
    split = stdlib_split()
    assert not set(split["training"]) & set(split["evaluation"])
    assert min(map(len, split.values())) > 60
    halves = {half: {module.split(".")[0] for module, _ in stdlib_code.source_files(half)} for half in split}
    assert not halves["training"] & halves["evaluation"] and all(len(found) > 30 for found in halves.values())


def test_missing_modules_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stdlib_code, "stdlib_split", lambda: {"training": ["json", "no_such_module"], "evaluation": []})
    assert {module.split(".")[0] for module, _ in stdlib_code.source_files("training")} == {"json"}
    prompts = stdlib_code.code_prompts(1000)
    assert {prompt.kind for prompt in prompts} == {"complete", "write", "about"}
    complete = next(p for p in prompts if p.kind == "complete")
    assert "def " in complete.text and '"""' in complete.text
    assert prompts == stdlib_code.code_prompts(1000) and prompts[:5] == stdlib_code.code_prompts(5)


def test_long_prompts_have_their_lengths() -> None:
    chat = ChatFormat.of(pair.TARGET)
    for prompt in stdlib_code.long_code_prompts(1, chat.counts):
        goal = int(prompt.kind)
        assert goal * 0.75 <= chat.count(prompt.text) <= goal * 1.3
    assert len(stdlib_code.long_code_prompts(1, chat.counts)) == len(stdlib_code.LONG_CODE_LENGTHS)


def test_jsonl_variants(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"question": "Why?", "answer": "Because."},
        {"prompt": "Write a poem."},
        {"turns": ["First?", "Second?"], "category": "writing"},
        {"messages": [
            {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "More"},
        ]},
        {"task_id": "Task/0", "entry_point": "f", "prompt": "def f():\n    pass\n"},
    ]  # fmt: skip
    file = tmp_path / "set.jsonl"
    file.write_text("\n\n".join(map(json.dumps, rows)))
    found = read_prompts(file)
    assert [p.turns for p in found[:2]] == [("Why?",), ("Write a poem.",)]
    assert found[2] == Prompt("set", ("First?", "Second?"), None, "writing")
    assert found[3].system == "Be brief." and found[3].turns == ("Hi", "More")
    assert found[4].turns == (COMPLETE[0].format(code="def f():\n    pass"),)
    assert found[3].messages() == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("line", ["{", "[]", '{"text": "x"}', '{"turns": []}', '{"prompt": 3}', '{"question": " "}'])
def test_malformed_rows_are_refused_by_line(line: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(PEagleError, match="line 2"):
        read_prompts(file)


def test_empty_and_missing_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    for name in ("empty.jsonl", "missing.jsonl"):
        with pytest.raises(PEagleError, match=name):
            read_prompts(tmp_path / name)


# -- chat -------------------------------------------------------------------------------------------------------------


def test_pieces_are_the_templates() -> None:
    """Generated ids between template pieces give the template's own ids."""
    chat = ChatFormat.of(pair.TARGET)
    encode = lambda text: chat.tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    turns = [{"role": "user", "content": "Count by 2"}, {"role": "assistant", "content": "2 4 6"}]
    whole = chat.prompt([*turns, {"role": "user", "content": "More"}])
    reply = encode("2 4 6") + [min(chat.eos)]
    assert chat.prompt(turns[:1]) + reply + chat.next_turn("More", ended=True) == whole
    assert chat.prompt(turns[:1]) + reply[:-1] + chat.next_turn("More", ended=False) == whole
    assert chat.opened_user("Count") == chat.prompt([{"role": "user", "content": "Count"}])[:-1]
    assert chat.user_text([*encode(" by 2"), min(chat.user_ends)]) == "by 2"


def test_target_without_template_is_refused() -> None:
    tokenizer = pair.tokenizer()
    template, tokenizer.chat_template = tokenizer.chat_template, None
    try:
        with pytest.raises(PEagleError, match="no chat template"):
            ChatFormat(tokenizer, [2])
    finally:
        tokenizer.chat_template = template
    with pytest.raises(PEagleError, match="close an assistant turn"):
        ChatFormat(tokenizer, [0])


# -- corpus -----------------------------------------------------------------------------------------------------------


def test_corpus_round_trip_and_refusals(tmp_path: Path) -> None:
    corpus = Corpus.of([([5, 6, 7], [False, True, True]), ([8], [False])], {"seed": 1})
    corpus.write(tmp_path / "c")
    again = Corpus.open(tmp_path / "c")
    assert again.sha256 == corpus.sha256 == again.manifest["sha256"] and again.manifest["seed"] == 1
    assert [t.tolist() for t, _ in again] == [[5, 6, 7], [8]] and again[0][1].tolist() == [False, True, True]
    with pytest.raises(PEagleError, match="exists"):
        corpus.write(tmp_path / "c")
    with pytest.raises(PEagleError, match="3 tokens and 1 marks"):
        Corpus.of([([1, 2, 3], [True])], {})
    with pytest.raises(PEagleError, match="empty"):
        Corpus.of([], {})
    (tmp_path / "c" / TENSORS).write_bytes(b"no")
    with pytest.raises(PEagleError, match="cannot be read"):
        Corpus.open(tmp_path / "c")
    from safetensors.torch import save_file

    offsets = torch.tensor([0, 5], dtype=torch.int64)
    save_file(
        {"tokens": torch.zeros(4, dtype=torch.int32), "assistant": torch.zeros(4, dtype=torch.uint8), "offsets": offsets},
        tmp_path / "c" / TENSORS,
    )
    with pytest.raises(PEagleError, match="do not fit together"):
        Corpus.open(tmp_path / "c")
    (tmp_path / "c" / MANIFEST).unlink()
    with pytest.raises(PEagleError, match="cannot be read"):
        Corpus.open(tmp_path / "c")


# -- the run ----------------------------------------------------------------------------------------------------------

def test_run_from_prompts_to_corpora(tmp_path: Path, files: dict[str, Path]) -> None:
    out = tmp_path / "out"
    make_run(out, files, synthetic=4, tune=2).everything()
    corpus, chat = Corpus.open(out / "train"), ChatFormat.of(pair.TARGET)
    manifest = corpus.manifest
    assert manifest["prompts_dropped"]["gsm8k: shares 13 words with a held-out prompt"] == 1
    assert manifest["documents"] == len(corpus) and manifest["prompts_sampled"] >= 6
    assert manifest["documents_by_source"]["gsm8k"] == 12  # six prompts, greedy and sampled
    assert manifest["settings"]["target"] == target_hash(pair.TARGET)
    ended = 0
    for tokens, assistant in corpus:
        assert MASK not in tokens and bool(assistant.any())
        text = chat.tokenizer.decode(tokens)
        assert PLANTED not in text
        last = int(assistant.nonzero()[-1])
        assert last == len(tokens) - 1  # nothing of the template stands behind the answer
        ended += int(tokens[last]) in chat.eos
        header = chat.tokenizer.convert_tokens_to_ids("<|assistant|>")
        first = int(assistant.nonzero()[0])
        assert int(tokens[first - 1]) == header and not assistant[: first].any()
    assert ended == manifest["ended_by_the_target"] > 0
    held = Corpus.open(out / "eval" / "held")
    assert held.manifest["kinds"] == ["story", "qa"] and held.manifest["loops"] == [False, False] or any(held.manifest["loops"])
    assert len(list((held[0][1].int().diff() == 1).nonzero())) == 2  # both turns answered
    assert (out / "eval" / "held-t0.7").is_dir() and (out / "eval" / "tune").is_dir()
    prompt = chat.prompt([{"role": "user", "content": "Where does Anna live?"}])
    greedy = pair.greedy(tuple(prompt), 24)
    answer = held[1][0][held[1][1]].tolist()
    assert answer == list(greedy)[: len(answer)]


def test_interrupted_run_goes_on(tmp_path: Path, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after the first stage, then within the third: the same corpus as in one go."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    make_run(whole, files, synthetic=2).everything()

    run = make_run(parts, files, synthetic=2)
    run.prompts()
    run.crew.close()
    run = make_run(parts, files, synthetic=2)
    written = 0

    from sgl_peagle.train import regenerate

    real = regenerate._write

    def failing(file: Path, text: str) -> None:
        nonlocal written
        if file.name.startswith("responses"):
            written += 1
            if written == 2:
                raise KeyboardInterrupt
        real(file, text)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(regenerate, "_write", failing)
        run.everything()
    assert (parts / "stages" / "responses-0000.jsonl").exists() and not (parts / "train").exists()
    make_run(parts, files, synthetic=2).everything()
    assert Corpus.open(parts / "train").sha256 == Corpus.open(whole / "train").sha256


def test_batches_of_equal_prompts_draw_differently() -> None:
    """Made-up prompts all begin with the same ids; two batches of them must not be copies of each other."""
    from sgl_peagle.train.generate import Group, TransformersTarget

    speaker = Speaker(ChatFormat.of(pair.TARGET), 512, 24)
    target = TransformersTarget(pair.TARGET, 0)
    size = target.BATCH

    def draw(label: str) -> list[Any]:
        found: dict[str, list[Any]] = {}
        group = Group(label, [speaker.conversation(Task("made up")) for _ in range(2 * size)])
        target.converse([group], found.__setitem__, lambda _number: None)
        return found[label]

    texts = draw("one")
    assert texts == draw("one") and texts != draw("two")
    assert texts[:size] != texts[size:]


def test_no_time_left_writes_what_there_is(tmp_path: Path, files: dict[str, Path]) -> None:
    run = make_run(tmp_path / "out", files)
    run._deadline = 0.0
    run.everything()
    manifest = Corpus.open(tmp_path / "out" / "train").manifest
    assert (manifest["shards"], manifest["shards_planned"]) == (1, 3)


def test_other_settings_and_foreign_folders_are_refused(tmp_path: Path, files: dict[str, Path]) -> None:
    make_run(tmp_path / "out", files)
    with pytest.raises(PEagleError, match="other settings"):
        make_run(tmp_path / "out", files, seed=5)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "note").write_text("mine")
    with pytest.raises(PEagleError, match="not empty"):
        make_run(tmp_path / "mine", files)
    with pytest.raises(PEagleError, match="ends the target's turns"):
        make_run(tmp_path / "eos", files, mask_token_id=2)
    with pytest.raises(PEagleError, match="holds no model"):
        target_hash(tmp_path)


def test_second_turns_and_loops(tmp_path: Path, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The conversation of one document, with replies written by hand."""
    from sgl_peagle.train import conversations

    monkeypatch.setattr(conversations, "SECOND_TURNS", 1.0)
    run = make_run(tmp_path / "out", files)
    run.speaker.held_out, eos = filters.HeldOut([PLANTED]), min(run.chat.eos)
    encode = lambda text: run.chat.tokenizer.encode(text, add_special_tokens=False)  # noqa: E731

    def play(replies: list[list[int]]) -> tuple[Document, list[Request]]:
        conversation = run.speaker.conversation(Task("answer", "", Prompt("gsm8k", ("Count",))))
        requests = [next(conversation)]
        try:
            for ids in replies:
                requests.append(conversation.send(Reply(ids, ids[-1] in requests[-1].stop_ids)))
        except StopIteration as end:
            return end.value, requests
        raise AssertionError("more was asked for")

    answer, user = [*encode("1 2 3"), eos], [*encode("Where is Anna now?"), min(run.chat.user_ends)]
    document, requests = play([answer, user, answer])
    assert document.events == ["second turn"] and len(document.spans) == 2 and document.ended
    assert requests[1].temperature == 0.9 and requests[1].stop_ids == run.chat.user_ends
    assert document.ids[document.spans[1][0] :] == answer and sum(document.marks()) == 2 * len(answer)
    document, _ = play([answer, [*encode(PLANTED), min(run.chat.user_ends)]])
    assert document.events == ["second turn refused"] and len(document.spans) == 1
    looping = list(range(100, 120)) * 3
    document, _ = play([looping])
    assert document.events == ["loop cut"] and document.ids[document.spans[0][0] :] == looping[:40] and not document.ended
    document, _ = play([[100] * 24])
    assert document.events == ["loop dropped"] and not document.spans


def test_command_line(tmp_path: Path, files: dict[str, Path]) -> None:
    arguments = [
        "data", "--target", str(pair.TARGET), "--out", str(tmp_path / "out"), "--gsm8k", str(files["train"]), "--held-out",
        str(files["held"]), "--long-code", "0", "--backend", "transformers", "--max-new-tokens", "8", "--mask-token-id", "3",
    ]  # fmt: skip
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert len(Corpus.open(tmp_path / "out" / "train")) > 0
    settings = (tmp_path / "out" / "settings.json").read_text()
    assert str(tmp_path) not in settings and str(pair.TARGET) not in settings  # no paths of this machine
    refused = CliRunner().invoke(main, [*arguments, "--seed", "3"])
    assert refused.exit_code == 1 and "fix:" in refused.output


@pytest.mark.skipif(find_spec("sglang") is None or torch.accelerator.is_available(), reason="needs SGLang on a CPU")
def test_both_backends_give_the_same_greedy_answers(tmp_path: Path, files: dict[str, Path]) -> None:
    import harness

    make_run(tmp_path / "hf", files).everything()
    harness.in_fork(lambda: str(make_run(tmp_path / "sglang", files, backend="sglang").everything()))
    for name in ("held",):
        mine, theirs = (Corpus.open(tmp_path / backend / "eval" / name) for backend in ("hf", "sglang"))
        assert mine.sha256 == theirs.sha256

    def greedy(folder: Path) -> set[tuple[int, ...]]:
        rows = [json.loads(line) for file in sorted(folder.glob("stages/*.jsonl")) for line in file.read_text().splitlines()]
        return {tuple(row["ids"]) for row in rows if row["temperature"] == 0 and len(row["spans"]) == 1}

    both = greedy(tmp_path / "hf") & greedy(tmp_path / "sglang")
    assert len(both) >= 4


def test_join_keeps_every_document_and_mixes_them() -> None:
    first = Corpus.of([([1, 2, 3], [False, True, True]), ([4], [True])], {"name": "a"})
    second = Corpus.of([([5, 6], [False, True])], {"name": "b"})
    orders = set()
    for seed in range(8):
        joined = Corpus.join([first, second], seed)
        documents = [(tokens.tolist(), marks.tolist()) for tokens, marks in joined]
        assert sorted(documents) == [([1, 2, 3], [False, True, True]), ([4], [True]), ([5, 6], [False, True])]
        orders.add(str(documents))
    assert len(orders) > 1 and [part["name"] for part in joined.manifest["joined"]] == ["a", "b"]
