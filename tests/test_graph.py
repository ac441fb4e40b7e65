"""The graph runner's own part on the CPU: static inputs, padded replays, and tokens that outlive the next replay.

A "graph" here is a function over the static buffers, called again at every replay. SGLang's part of the replay
(padding, copies, slicing) is SGLang's real code.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import EagleDraftExtendInputBuffers

from sgl_peagle import draft_worker
from sgl_peagle.backends import drafter_backend
from sgl_peagle.errors import PEagleError
from sgl_peagle.graph import PEagleCudaGraphRunner
from sgl_peagle.kernels.expand import expand_decode
from sgl_peagle.kernels.hidden import window_hidden
from sgl_peagle.model import PEagleDraftExtendInput

AUX_WIDTH, VOCABULARY, CAPTURED = 6, 50, [1, 2, 4, 8]


def drafter(inputs: PEagleDraftExtendInput, ids: torch.Tensor, positions: torch.Tensor, bs: int) -> torch.Tensor:
    """[bs, k]; depends on every input of a sampled row, so a wrong row or stale value changes a token."""
    hidden = window_hidden(inputs.hidden_states, inputs.hidden_rows, torch.full((AUX_WIDTH,), 0.5))
    rows = inputs.select_index
    mixed = hidden[rows].sum(-1).mul(1000).round().long() + 7 * ids[rows] + 11 * positions[rows]
    return mixed.view(bs, -1)


class Runner(PEagleCudaGraphRunner):
    """The runner without SGLang's constructor, which needs a GPU."""

    def __init__(self, k: int, width: int | None = None, max_rows: int = 1000) -> None:
        width, bs = width or 2 * k, max(CAPTURED)
        self.k, self.captured_req_width, self.max_bs, self.device = k, width, bs, "cpu"
        self.capture_bs, self.seq_len_fill_value, self.forward_mode = CAPTURED, 1, None
        self.extend_seq_lens_cpu = [width] * bs
        self.require_mlp_tp_gather = self.require_gathered_buffer = self.require_mlp_sync = False
        self.disable_padding = False
        self.deepep_adapter = SimpleNamespace(replay=lambda: None)
        head = SimpleNamespace(config=SimpleNamespace(aux_width=AUX_WIDTH))
        self.eagle_worker = SimpleNamespace(model=SimpleNamespace(head=head), k=k)
        shared = SimpleNamespace(max_rows=max_rows, get_logits_buffer=lambda v, *, rows: torch.zeros(rows, v))
        self.model_runner = SimpleNamespace(
            graph_shared_output=shared, model_config=SimpleNamespace(model_is_mrope=False), device_timer=None,
            shared_read_done_event="of an earlier phase",
        )  # fmt: skip
        self.planned: Any = None
        self.draft_extend_attn_backend = SimpleNamespace(
            init_forward_metadata_out_graph=lambda view: setattr(self, "planned", view),
            shared_read_ends=lambda mode: SharedReadEnds.UNKNOWN,
        )

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64)

        self.buffers = EagleDraftExtendInputBuffers(
            input_ids=ints(bs * width), req_pool_indices=ints(bs), mamba_track_indices=None,
            out_cache_loc=ints(bs * width), positions=ints(bs * width), mrope_positions=ints(3, 1),
            hidden_states=torch.full((bs * width, AUX_WIDTH), float("nan")), seq_lens=ints(bs), seq_lens_cpu=ints(bs),
            extend_seq_lens=ints(bs), num_correct_drafts=ints(bs), num_accept_tokens=ints(bs), select_index=ints(bs),
            next_token_logits_buffer=torch.zeros(bs, VOCABULARY), global_num_tokens_gpu=None,
            global_num_tokens_for_logprob_gpu=None,
        )  # fmt: skip
        self._allocate_inputs()
        self.outputs: dict[int, torch.Tensor] = {}

    @contextlib.contextmanager
    def model_context(self) -> Any:
        yield

    def _replay_graph(self, shape_key: Any, forward_batch: Any) -> LogitsProcessorOutput:
        bs, rows = shape_key.size, shape_key.size * self.captured_req_width
        buffers = self.buffers
        tokens = drafter(self._inputs(bs), buffers.input_ids[:rows], buffers.positions[:rows], bs)
        output = self.outputs.setdefault(bs, torch.zeros_like(tokens))  # the same memory at every replay
        output.copy_(tokens)
        return LogitsProcessorOutput(next_token_logits=output, hidden_states=output)


def round_of(k: int, bs: int, chooser: random.Random) -> Any:
    """A random decode round as the worker prepares it."""
    accepts = torch.tensor([chooser.randint(1, k + 1) for _ in range(bs)])
    lengths = torch.tensor([chooser.randint(1, 30) for _ in range(bs)])
    table = torch.randint(1, 900, (20, 64), dtype=torch.int32)
    requests = torch.tensor(chooser.sample(range(1, 20), bs))
    rows = expand_decode(
        torch.randint(0, 40, (bs * (k + 1),)), accepts, lengths, requests, table,
        k=k, mask_token_id=41, private_mask_slots=False,
    )  # fmt: skip
    spec_info = PEagleDraftExtendInput(
        hidden_states=torch.rand(bs * (k + 1), AUX_WIDTH), hidden_rows=rows.hidden_rows,
        select_index=rows.sampled_rows, num_correct_drafts=accepts - 1, num_accept_tokens=accepts,
        num_tokens_per_req=2 * k,
    )  # fmt: skip
    return SimpleNamespace(
        batch_size=bs, input_ids=rows.input_ids, positions=rows.positions, out_cache_loc=rows.cache_locs,
        seq_lens=lengths + 2 * k, req_pool_indices=requests, extend_seq_lens=torch.full((bs,), 2 * k),
        extend_seq_lens_cpu=[2 * k] * bs, seq_lens_cpu=None, seq_lens_sum=None, spec_info=spec_info,
        mamba_track_indices=None, out_cache_loc_virtual=None, kv_loc_plan=None, kv_loc_cols=None,
    )  # fmt: skip


@pytest.mark.parametrize("k", [1, 2, 5, 7])
def test_replays_draft_what_an_eager_round_drafts(k: int) -> None:
    """Batches grow and shrink through padded sizes; every replay sees its own inputs and only those."""
    chooser, runner, earlier = random.Random(k), Runner(k), []
    for bs in (8, 3, 1, 7, 2, 5, 8, 4, 6, 1):
        batch = round_of(k, bs, chooser)
        assert runner.can_run_graph(batch)
        want = drafter(batch.spec_info, batch.input_ids, batch.positions, bs)
        have = runner.execute(batch)
        assert have.shape == (bs, k) and torch.equal(have, want)
        earlier.append((have, want))

        padded = runner.planned.batch_size
        assert padded == min(b for b in CAPTURED if b >= bs)
        rows, inputs = padded * 2 * k, runner._inputs(padded)
        assert int(inputs.hidden_rows.max()) < padded * (k + 1) and int(inputs.hidden_rows.min()) >= -1
        assert 0 <= int(inputs.select_index.min()) and int(inputs.select_index.max()) < rows
        # A padded request has no length left besides the window, and owns the padding slot and request row 0.
        assert not runner.buffers.out_cache_loc[bs * 2 * k : rows].any()
        assert not runner.buffers.req_pool_indices[bs:padded].any()
        assert (runner.buffers.seq_lens[bs:padded] <= 2 * k).all()
        # Nothing may keep an earlier phase's event: the scheduler would overwrite tables that are still read.
        assert runner.model_runner.shared_read_done_event is None
    assert all(torch.equal(have, want) for have, want in earlier), "a later replay changed tokens handed out before"


def test_other_widths_and_larger_batches_run_eagerly() -> None:
    runner, chooser = Runner(3), random.Random(0)
    assert not runner.can_run_graph(round_of(3, 9, chooser))
    assert not runner.can_run_graph(round_of(5, 2, chooser))


def test_unreplayed_tables_are_in_bounds() -> None:
    """Capture itself runs on the initial tables."""
    runner = Runner(4)
    for bs in CAPTURED:
        inputs = runner._inputs(bs)
        assert (inputs.hidden_rows == -1).all() and inputs.select_index.shape == (bs * 4,)
        assert int(inputs.select_index.max()) < bs * 8 and inputs.hidden_states.shape == (bs * 5, AUX_WIDTH)
        assert inputs.logits_buffer.shape == (bs * 4, VOCABULARY)
    assert Runner(4, max_rows=31)._inputs(8).logits_buffer is None


def test_a_graph_of_another_width_is_refused() -> None:
    with pytest.raises(PEagleError, match="another shape"):
        Runner(4, width=5)


@pytest.mark.parametrize(("name", "graphs"), [("triton", True), ("fa3", False)])
def test_backends_with_graphs(name: str, graphs: bool) -> None:
    assert drafter_backend(name, "cuda").graphs is graphs


class Backend(draft_worker.WindowTritonBackend):
    """Only its type matters."""

    def __init__(self) -> None:
        pass


def capture(monkeypatch: pytest.MonkeyPatch, name: str = "triton", device: str = "cuda", disabled: bool = False) -> Any:
    """``_capture_cuda_graphs`` of a worker that is only its attributes; 3 GB are free before and 1 GB after."""
    free = iter((3.0, 1.0))
    monkeypatch.setattr(draft_worker, "check_cuda_graph_backend", lambda phase, backend: disabled)
    monkeypatch.setattr(draft_worker, "get_available_gpu_memory", lambda *_: next(free))
    monkeypatch.setattr(draft_worker, "PEagleCudaGraphRunner", lambda worker: SimpleNamespace(capture_bs=[1]))
    worker = SimpleNamespace(
        device=device, gpu_id=0, k=3, backend=drafter_backend(name, "cuda"),
        draft_extend_attn_backend=Backend() if name == "triton" else object(),
        _specialized_graph_memory_usage={}, _specialized_graph_time_usage={},
    )  # fmt: skip
    draft_worker.PEagleDraftWorker._capture_cuda_graphs(worker)
    return worker


def test_capture_reports_memory_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = capture(monkeypatch)
    assert worker.cuda_graph_runner_for_draft_extend.capture_bs == [1] and worker.cuda_graph_runner is None
    assert worker._specialized_graph_memory_usage == {"draft_extend": 2.0}
    assert worker._specialized_graph_time_usage["draft_extend"] >= 0


@pytest.mark.parametrize("case", ["disabled", "variable", "fa3", "cpu"])
def test_no_capture(case: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    if case == "variable":
        monkeypatch.setenv("SGLANG_DISABLE_DRAFT_EXTEND_CUDA_GRAPH", "1")
    options = {"disabled": {"disabled": True}, "fa3": {"name": "fa3"}, "cpu": {"device": "cpu"}}.get(case, {})
    with caplog.at_level(logging.WARNING):
        worker = capture(monkeypatch, **options)
    assert worker.cuda_graph_runner_for_draft_extend is None and not worker._specialized_graph_memory_usage
    assert ("fa3" in caplog.text) == (case == "fa3"), "a backend without graphs says so, a choice of the user does not"


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/nvidia0"), reason="needs a CUDA GPU; this machine has none")
def test_graph_drafts_equal_eager_drafts_and_the_oracle_on_the_gpu(tmp_path: Path) -> None:
    script = Path(__file__).parent.parent / "bench" / "gpu_graphs.py"
    command = [sys.executable, str(script), "--out", str(tmp_path / "report.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
