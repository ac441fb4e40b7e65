"""Acceptance length in the real engine: PEAGLE and EAGLE3 heads, several K, prompt sets and temperatures.

    python bench/acceptance.py --target T --peagle HEAD --eagle3 HEAD --k 3,5,7 \\
        --prompts human_eval=FILE --prompts mt_bench=FILE --long-code 16 --out bench/results/acceptance-NAME.json

One engine per (method, K). Acceptance length is (completion_tokens - 1) / spec_verify_ct, summed over requests before
dividing (the prefill gives the first token; no round does); per-position rates are SGLang's histogram of accepted
drafts. ``one_plus_accepted`` is 1 plus the sum of those rates: a little more, as it counts drafts beyond an answer's
end. Cells that the file already holds are skipped, so an interrupted run is continued by the same command.
``--table FILE`` prints a file as Markdown, ``--plot FILE`` draws its acceptance lengths over K beside it, and
``--merge A B --out C`` joins files of one run in several processes; these run nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, Iterator, NamedTuple, Optional, Sequence

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "bench")]

from environment import environment, head_hashes, refuse_other_settings, write_report  # noqa: E402
from readme_table import quotable  # noqa: E402

from sgl_peagle.errors import PEagleError  # noqa: E402
from sgl_peagle.train.data_cli import key_values  # noqa: E402
from sgl_peagle.train.regenerate import file_hash  # noqa: E402

#: Classes of context length: the prompt and half of the answer, in tokens.
CONTEXTS = (512, 1024, 2048, 4096, 8192)
#: What may differ between merged files' environments: this project's state, the date, and the number of cores, which is of no account
#: where nothing is timed.
MAY_DIFFER = ("sgl_peagle_commit", "sgl_peagle", "date", "cpu_count")
#: Spec-Bench lists its multi-turn conversations by MT-Bench's categories: of its six kinds, they are one.
MULTI_TURN = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
ON_CPU = (
    "temperature {} is left out: SGLang verifies greedily on a CPU at any temperature, so the result would be that of "
    "temperature 0"
)


class Setup(NamedTuple):
    """One engine: how it drafts, with which head, and how many drafts."""

    method: str
    head: Path
    k: int


class PromptSet(NamedTuple):
    """Conversations by their first turns' ids, the user's later turns as text, and their kinds."""

    name: str
    first: list[list[int]]
    later: list[tuple[str, ...]]
    kinds: list[str]


def prompt_sets(options: argparse.Namespace) -> tuple[Any, list[PromptSet]]:
    """The chat format of the target and the prompt sets that were asked for."""
    from sgl_peagle.train.chat import ChatFormat
    from sgl_peagle.train.prompts import read_prompts
    from sgl_peagle.train.stdlib_code import LONG_CODE, long_code_prompts

    chat, sets = ChatFormat.of(options.target), {}
    for entry in options.prompts:
        name, _, file = entry.partition("=")
        if not file:
            sys.exit(f"--prompts {entry}: give NAME=FILE")
        found = read_prompts(Path(file), name)
        # Every so many, not the first ones: a file's rows may be sorted by kind.
        sets[name] = found[:: max(1, -(-len(found) // options.limit))] if options.limit else found
    if options.long_code:
        sets[LONG_CODE] = long_code_prompts(options.long_code, chat.counts)
    if not sets:
        sys.exit("no prompts: give --prompts NAME=FILE or --long-code N")
    room = context_length(options.target) - options.max_new_tokens - 16
    found = []
    for name, prompts in sets.items():
        ids = [chat.prompt(prompt.messages()) for prompt in prompts]
        fit = [i for i, prompt in enumerate(ids) if len(prompt) <= room]
        found.append(PromptSet(name, [ids[i] for i in fit], [prompts[i].turns[1:] for i in fit], [prompts[i].kind for i in fit]))
    return chat, found


def context_length(target: Path) -> int:
    return int(json.loads((target / "config.json").read_text())["max_position_embeddings"])


def serve(
    engine: Any, chat: Any, wanted: PromptSet, temperature: float, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """All turns of a set; one record per request (a turn of a conversation)."""
    from sgl_peagle.train.filters import loop_start

    sampling = {"temperature": temperature, "max_new_tokens": options.max_new_tokens, "stop_token_ids": sorted(chat.eos)}
    room = context_length(options.target) - options.max_new_tokens - 16
    pending, turn, records = dict(enumerate(wanted.first)), 0, []
    while pending:
        order = list(pending)
        outputs = engine.generate(input_ids=[pending[i] for i in order], sampling_params=sampling)
        following: dict[int, list[int]] = {}
        for i, output in zip(order, outputs):
            ids, meta = list(output["output_ids"]), output["meta_info"]
            records.append(
                {
                    "prompt_tokens": len(pending[i]), "completion_tokens": meta["completion_tokens"],
                    "rounds": meta.get("spec_verify_ct", 0), "loops": loop_start(ids) is not None, "kind": wanted.kinds[i],
                    "histogram": list(meta.get("spec_correct_drafts_histogram") or []),
                }  # fmt: skip
            )
            if turn < len(wanted.later[i]):
                ended = bool(ids) and ids[-1] in chat.eos
                longer = pending[i] + ids + chat.next_turn(wanted.later[i][turn], ended=ended)
                if len(longer) <= room:
                    following[i] = longer
        pending, turn = following, turn + 1
    return records


def cells(records: Sequence[dict[str, Any]], k: int) -> Iterator[dict[str, Any]]:
    """Acceptance over everything, by context class and by kind of prompt, with and without looping answers."""
    for loops in ("included", "excluded"):
        calm = [r for r in records if r["rounds"] and (loops == "included" or not r["loops"])]
        if calm:
            yield {"loops": loops, "context": "all", "kind": "all", **acceptance(calm, k)}
        for low, high in zip((0, *CONTEXTS), CONTEXTS):
            inside = [r for r in calm if low < r["prompt_tokens"] + r["completion_tokens"] / 2 <= high]
            if inside:
                yield {"loops": loops, "context": f"<={high}", "kind": "all", **acceptance(inside, k)}
        kinds = sorted({r["kind"] for r in calm})
        for kind in kinds if len(kinds) > 1 else []:
            yield {"loops": loops, "context": "all", "kind": kind, **acceptance([r for r in calm if r["kind"] == kind], k)}


def acceptance(records: Sequence[dict[str, Any]], k: int) -> dict[str, Any]:
    rounds = sum(r["rounds"] for r in records)
    accepted = [sum(sum(r["histogram"][j + 1 :]) for r in records) for j in range(k)]
    per_request = [(r["completion_tokens"] - 1) / r["rounds"] for r in records]
    return {
        "acceptance_length": round(sum(r["completion_tokens"] - 1 for r in records) / rounds, 4),
        "mean_of_requests": round(sum(per_request) / len(per_request), 4),
        "one_plus_accepted": round(1 + sum(accepted) / rounds, 4),
        "per_position": [round(count / rounds, 4) for count in accepted],
        "rounds": rounds, "requests": len(records), "completion_tokens": sum(r["completion_tokens"] for r in records),
    }  # fmt: skip


def engine_arguments(setup: Setup, options: argparse.Namespace, on_gpu: bool) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model_path": str(options.target), "skip_tokenizer_init": True, "context_length": context_length(options.target),
        "speculative_draft_model_path": str(setup.head), "speculative_num_draft_tokens": setup.k + 1, "random_seed": 0,
    }  # fmt: skip
    if setup.method == "peagle":
        arguments["speculative_algorithm"] = "PEAGLE"
    else:
        arguments |= {
            "speculative_algorithm": "EAGLE3", "speculative_num_steps": setup.k, "speculative_eagle_topk": 1,
        }  # fmt: skip
    if on_gpu:
        arguments |= {
            "device": "cuda", "dtype": "bfloat16", "disable_cuda_graph": False, "disable_prefill_cuda_graph": True,
            "cuda_graph_max_bs_decode": options.concurrency, "max_running_requests": options.concurrency,
            "mem_fraction_static": 0.6, "max_total_tokens": None,
        }  # fmt: skip
    else:
        arguments |= {"max_total_tokens": 16384, "max_running_requests": min(options.concurrency, 8)}
    return arguments | key_values(options.engine)


def run_engine(
    setup: Setup, work: list[tuple[PromptSet, float]], chat: Any, options: argparse.Namespace, on_gpu: bool
) -> list[Any]:
    """One engine, its cells' records in the order of ``work``."""
    import harness

    def use(engine: Any) -> list[Any]:
        engine.generate(input_ids=[chat.opening] * 2, sampling_params={"temperature": 0, "max_new_tokens": 8})  # warm-up
        return [serve(engine, chat, wanted, temperature, options) for wanted, temperature in work]

    arguments = engine_arguments(setup, options, on_gpu)
    try:
        return harness.with_engine(use, timeout=options.timeout, **arguments)
    except harness.EngineFailed as error:
        if "re-initialize CUDA" not in str(error):
            raise
        harness.START_METHOD = "spawn"  # its imports are paid again in each process
        return harness.with_engine(use, timeout=options.timeout, **arguments)


def with_multi_turn(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cells and, where they are missing, those of Spec-Bench's kind ``multi_turn``, pooled from its categories."""
    kept, there = list(found), {(*identity(c), c["loops"]) for c in found if c["kind"] == "multi_turn"}
    parts: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for cell in found:
        key = (*identity(cell), cell["loops"])
        if cell["prompts"] == "spec_bench" and cell["kind"] in MULTI_TURN and key not in there:
            parts.setdefault(key, []).append(cell)
    for cells_of in parts.values():
        sums = {name: sum(c[name] for c in cells_of) for name in ("rounds", "requests", "completion_tokens")}
        rates = [sum(c["rounds"] * c["per_position"][j] for c in cells_of) / sums["rounds"] for j in range(cells_of[0]["k"])]
        per_request = sum(c["requests"] * c["mean_of_requests"] for c in cells_of) / sums["requests"]
        kept.append(
            cells_of[0] | sums | {
                "kind": "multi_turn", "per_position": [round(rate, 4) for rate in rates],
                "acceptance_length": round((sums["completion_tokens"] - sums["requests"]) / sums["rounds"], 4),
                "mean_of_requests": round(per_request, 4), "one_plus_accepted": round(1 + sum(rates), 4),
            }  # fmt: skip
        )
    return kept


def plot(report: dict[str, Any], file: Path) -> None:
    """Acceptance length over K at temperature 0: one panel per prompt set, broken lines without looping answers (if enough are left)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = [c for c in report["cells"] if c["context"] == c["kind"] == "all" and c["temperature"] == 0]
    heads = list(dict.fromkeys((c["method"], c["head"]) for c in found))
    if not found or len(heads) != len({method for method, _ in heads}):
        sys.exit("a plot needs cells of temperature 0, and one head of each method")
    names = list(dict.fromkeys(c["prompts"] for c in found))
    figure, panels = pyplot.subplots(1, len(names), figsize=(3 * len(names), 3.6), sharey=True, squeeze=False)
    for axes, name in zip(panels[0], names):
        for method, color in (("eagle3", "#1f77b4"), ("peagle", "#d62728")):
            for loops, style in (("included", "-"), ("excluded", "--")):
                points = sorted(
                    (c["k"], c["acceptance_length"]) for c in found
                    if (c["prompts"], c["method"], c["loops"]) == (name, method, loops) and quotable(c)
                )  # fmt: skip
                label = f"{'EAGLE-3' if method == 'eagle3' else 'P-EAGLE'}{', without loops' if loops == 'excluded' else ''}"
                axes.plot(*zip(*points) if points else ((), ()), style, color=color, marker="o", ms=3, label=label)
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("K")
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("acceptance length, real, greedy")
    panels[0][0].legend(fontsize=6)
    figure.suptitle(f"{found[0]['target']}, {report['environment']['gpu']}, {report['environment']['date']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def table(report: dict[str, Any]) -> str:
    """The file's cells over everything, then by context and by kind, as Markdown."""
    lines = ["| method | head | prompts | T | K | AL | AL without loops | per position | rounds |", "|---" * 9 + "|"]
    found = report["cells"]
    for cell in found:
        if not overall(cell, "included"):
            continue
        calm = next((c for c in found if same(c, cell) and overall(c, "excluded")), None)
        shares = " ".join(f"{share:.2f}" for share in cell["per_position"])
        quiet = f"{calm['acceptance_length']:.2f}" if calm else "–"
        lines.append(
            f"| {cell['method']} | {cell['head']} | {cell['prompts']} | {cell['temperature']:g} | {cell['k']} | "
            f"{cell['acceptance_length']:.2f} | {quiet} | {shares} | {cell['rounds']} |"
        )
    for column, title in (("context", "By context length"), ("kind", "By kind of prompt")):
        lines += ["", f"{title} (loops included):", ""]
        lines += [f"| method | prompts | T | K | {column} | AL | rounds |", "|---" * 7 + "|"]
        lines += [
            f"| {c['method']} | {c['prompts']} | {c['temperature']:g} | {c['k']} | {c[column]} | "
            f"{c['acceptance_length']:.2f} | {c['rounds']} |"
            for c in found
            if c["loops"] == "included" and c[column] != "all"
        ]
    return "\n".join(lines)


def merged(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Reports of one setting, on one kind of GPU and one set of versions, as one, their cells in order of K.

    Where commit, date or number of cores differ, ``environments`` lists all and each cell has the index of its own.

    Raises:
        SystemExit: They were measured differently, or hold the same cell twice.
    """
    if any("environments" in report for report in reports):
        sys.exit("one of the files is merged already: give the files it was merged from")
    first, environments = reports[0], [report["environment"] for report in reports]
    distinct = [e for i, e in enumerate(environments) if e not in environments[:i]]
    if len({json.dumps({k: v for k, v in e.items() if k not in MAY_DIFFER}, sort_keys=True) for e in distinct}) > 1:
        sys.exit("the files differ in environment: results of different GPUs or versions stay apart")
    if len(distinct) > 1:
        reports = [r | {"cells": [c | {"environment_index": distinct.index(r["environment"])} for c in r["cells"]]} for r in reports]
    hashes = ("heads_sha256", "prompts_sha256")
    shared = [name for report in reports for name in report if name not in ("environment", "cells", "failed", *hashes)]
    if any(report.get(name) != first.get(name) for report in reports for name in shared):
        sys.exit("the files differ in concurrency, length or number of prompts: results of different settings stay apart")
    known: dict[str, dict[str, str]] = {name: {} for name in hashes}
    for name, what, value in ((n, w, v) for r in reports for n in hashes for w, v in r.get(n, {}).items()):
        if known[name].setdefault(what, value) != value:
            sys.exit(f"the files are about different things named {what!r}: results of different runs stay apart")
    whole = [cell for report in reports for cell in report["cells"] if overall(cell, "included")]
    if len({identity(cell) for cell in whole}) < len(whole):
        sys.exit("two files hold the same cell")
    cells = sorted(with_multi_turn([c for r in reports for c in r["cells"]]), key=lambda c: (c["k"], c["method"] != "peagle"))
    failed = {name: reason for report in reports for name, reason in report["failed"].items()}
    where = {"environment": first["environment"]} | ({"environments": distinct} if len(distinct) > 1 else {})
    return where | {name: first[name] for name in shared} | known | {"failed": failed, "cells": cells}


def overall(cell: dict[str, Any], loops: str) -> bool:
    """Whether a cell is of all contexts and kinds."""
    return cell["loops"] == loops and cell["context"] == cell["kind"] == "all"


def identity(cell: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(cell[key] for key in ("target", "head", "method", "prompts", "k", "temperature"))


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return identity(a) == identity(b)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, metavar="FILE", help="print a result file and stop")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a result file's acceptance lengths and stop")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="join result files into --out and stop")
    parser.add_argument("--target", type=Path)
    parser.add_argument("--target-name", help="what to call the target in the results; default: its folder's name")
    parser.add_argument("--peagle", type=Path, action="append", default=[], metavar="HEAD")
    parser.add_argument("--eagle3", type=Path, action="append", default=[], metavar="HEAD")
    parser.add_argument("--k", default="3,5,7")
    parser.add_argument("--prompts", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--long-code", type=int, default=0, metavar="N", help="add stdlib-long-code, N prompts per length")
    parser.add_argument("--limit", type=int, help="at most so many prompts of each file, spread over it")
    parser.add_argument("--temperature", default="0,0.7")
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--engine", action="append", default=[], metavar="KEY=VALUE", help="further engine argument")
    parser.add_argument("--timeout", type=float, default=500, help="seconds for one engine, start included")
    parser.add_argument("--budget", type=float, default=1e9, help="start no further engine after so many seconds")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.table.read_text())))
        return
    if options.plot:
        plot(json.loads(options.plot.read_text()), options.plot.with_suffix(".png"))
        return
    if options.merge:
        if not options.out or options.out.exists():
            parser.error("--merge needs --out with a new file")
        write_report(options.out, merged([json.loads(file.read_text()) for file in options.merge]))
        return
    if not options.target or not options.out or not (options.peagle or options.eagle3):
        parser.error("give --target, --out, and --peagle or --eagle3")
    begin = time.perf_counter()
    on_gpu = Path("/dev/nvidia0").exists()
    temperatures = [float(t) for t in options.temperature.split(",")]
    for temperature in temperatures if not on_gpu else []:
        if temperature > 0:
            print(ON_CPU.format(temperature), flush=True)
    temperatures = [t for t in temperatures if on_gpu or t == 0]
    report: dict[str, Any] = {"cells": []}
    if options.out.exists():
        report = json.loads(options.out.read_text())
    where = environment()
    where |= {"sgl_peagle": where["sgl_peagle_commit"]}
    heads = [("peagle", head) for head in options.peagle] + [("eagle3", head) for head in options.eagle3]
    try:
        settings = {name: getattr(options, name) for name in ("concurrency", "max_new_tokens", "limit", "long_code", "engine")}
        settings["heads_sha256"] = head_hashes(heads)
        settings["prompts_sha256"] = {n: file_hash(Path(f)) for n, _, f in (e.partition("=") for e in options.prompts) if f}
        if report["cells"]:
            refuse_other_settings(options.out, report, settings)
    except PEagleError as error:
        sys.exit(str(error))
    hashes = {name: settings[name] | report.get(name, {}) for name in ("heads_sha256", "prompts_sha256")}
    report = {"environment": where, **settings, "failed": {}} | report | hashes

    import harness

    harness.import_sglang()
    chat, sets = prompt_sets(options)
    target = options.target_name or options.target.name
    setups = [Setup(method, head, int(k)) for k in options.k.split(",") for method, head in heads]
    for setup in setups:
        stamp = {"target": target, "head": setup.head.name, "method": setup.method, "k": setup.k}
        there = {identity(cell) for cell in report["cells"]}
        work = [
            (wanted, temperature)
            for wanted in sets
            for temperature in temperatures
            if identity(stamp | {"prompts": wanted.name, "temperature": temperature}) not in there
        ]
        label = f"{setup.method} {setup.head.name} K={setup.k}"
        if not work:
            print(f"{label}: all cells are there", flush=True)
            continue
        if time.perf_counter() - begin > options.budget:
            print(f"{label}: not run, out of time", flush=True)
            continue
        started = time.perf_counter()
        failure: Optional[str] = None
        try:
            outcomes = run_engine(setup, work, chat, options, on_gpu)
        except harness.EngineFailed as error:
            failure = str(error)
            print(f"{label}: FAILED\n{failure[-3000:]}", flush=True)
            report["failed"][label] = failure.strip().splitlines()[-1][:500]
            write_report(options.out, report)
            continue
        report["failed"].pop(label, None)
        for (wanted, temperature), records in zip(work, outcomes):
            full = stamp | {"prompts": wanted.name, "temperature": temperature}
            report["cells"] = with_multi_turn([*report["cells"], *(full | cell for cell in cells(records, setup.k))])
        write_report(options.out, report)
        print(f"{label}: {time.perf_counter() - started:.0f} s", flush=True)
    write_report(options.out, report)
    print(table(report))


if __name__ == "__main__":
    main()
