"""The head against the inference oracle, the sequence partition, and the training-time test of EAGLE-3."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from sgl_peagle.oracle import OracleHead
from sgl_peagle.train import eagle3, holdout, partition
from sgl_peagle.train.attention import Rows
from sgl_peagle.train.batches import full_batch
from sgl_peagle.train.export import export_peagle
from sgl_peagle.train.model import Head
from sgl_peagle.train.partition import PARTITIONS, head_rows, loss_and_backward, segments_of
from sgl_peagle.train.rows import Cod
from sgl_peagle.train.target import Target
from train_cases import MASK, batch_of, documents, gradients, load_target, loss_settings, make_head, planner, save_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return load_target(folder)


@pytest.mark.parametrize("layers, embedding", [(1, "mask_row"), (2, "mask_row"), (3, "full")])
def test_training_rows_equal_inference(
    folder: Path, target: Target, tmp_path: Path, layers: int, embedding: str
) -> None:
    """Logits of (a, 0) ... (a, K-1) are those of an engine's round at anchor a, by the oracle, from the exported file."""
    depths = 5
    head = make_head(target, layers, embedding=embedding)
    with torch.no_grad():  # what is exported is bfloat16
        for parameter in head.parameters():
            parameter.copy_(parameter.bfloat16().float())
    out = tmp_path / "head"
    export_peagle(
        head, target.lm_head, out, to="vllm", depths=depths, aux_layer_ids=target.aux_layer_ids, record={},
        target=str(folder),
    )  # fmt: skip
    head.target_embedding.copy_(head.target_embedding.bfloat16().float())
    lm_head = target.lm_head.bfloat16().float()
    texts = documents(2, 24)
    batch = full_batch(texts, depths)
    states = target.read(batch.tokens)
    with torch.no_grad():
        logits = head.final(head_rows(head, batch, np.arange(len(batch.rows)), states, planner)) @ lm_head.T
    oracle = OracleHead.from_folder(out)
    rows, length = batch.rows, batch.tokens.shape[1]
    compared = 0
    for i, text in enumerate(texts):
        for a in range(0, text.n - depths + 1, 3):
            want = oracle.drafts(torch.from_numpy(text.tokens[: a + 2]), states.aux[i * length : i * length + a + 1], depths)
            mine = np.flatnonzero((rows.document == i) & (rows.anchor == a))
            mine = mine[np.argsort(rows.depth[mine])]
            torch.testing.assert_close(logits[mine], want.logits, atol=2e-4, rtol=1e-3)
            compared += 1
    assert compared > 10


def whole_gradient(
    head: Head, target: Target, n: int, cod: Cod, segments: int, seed: int, plan=planner, way: str = "recompute",
    refused: float = 1.0,
) -> tuple:  # fmt: skip
    batch = batch_of(documents(2, n, seed), cod, seed)
    head.zero_grad(set_to_none=True)
    judge = loss_settings(target, refused=refused)
    depths, stats = loss_and_backward(head, batch, target.read(batch.tokens), plan, judge, segments, way)
    return gradients(head), stats.loss.double().sum(), np.bincount(depths)


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max(float((a[name] - b[name]).norm() / b[name].norm().clamp_min(1e-30)) for name in b)


@pytest.mark.parametrize("seed, n, depths, ratio", [(0, 30, 4, 0.8), (1, 61, 8, 0.7), (2, 17, 3, 1.0), (3, 40, 1, 0.7)])
@pytest.mark.parametrize("segments", [2, 3, 7])
@pytest.mark.parametrize("way", PARTITIONS)
@pytest.mark.parametrize("refused", [1.0, 0.2])
def test_partition_is_exact(
    target: Target, seed: int, n: int, depths: int, ratio: float, segments: int, way: str, refused: float
) -> None:
    head = make_head(target, 2, seed=seed)
    cod = Cod(depths, ratio, 0.2)
    whole, loss, counts = whole_gradient(head, target, n, cod, 1, seed, refused=refused)
    parts, summed, met = whole_gradient(head, target, n, cod, segments, seed, way=way, refused=refused)
    # With K = 1 the embedding's MASK row takes part, or not, with a gradient of zero.
    assert {name for name in whole if whole[name].any()} == {name for name in parts if parts[name].any()}
    assert difference(parts, {name: value for name, value in whole.items() if value.any()}) < 1e-5
    assert torch.isclose(loss, summed, rtol=1e-6) and counts.tolist() == met.tolist()


def test_detached_context_is_not_exact(target: Target) -> None:
    """The same comparison catches keys that are reused without their gradient."""
    cod, segments, n = Cod(4, 0.8, 0.2), 3, 30
    head = make_head(target, 2)
    whole, *_ = whole_gradient(head, target, n, cod, 1, 0)
    batch = batch_of(documents(2, n), cod)
    owned = iter([owned for _, owned in segments_of(batch, segments)])

    def detaching(queries: Rows, keys: Rows, device: torch.device):
        plan, mine = planner(queries, keys, device), torch.from_numpy(next(owned))[:, None, None]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return plan(q, torch.where(mine, k, k.detach()), torch.where(mine, v, v.detach()))

        return attend

    parts, *_ = whole_gradient(head, target, n, cod, segments, 0, detaching)
    assert difference(parts, whole) > 1e-2


def test_refused_rows(target: Target) -> None:
    """By definition: a row counts fully if every row of its rollout in front of it drafts what the text has there.

    Some of the text is what the head drafts there, or hardly any rollout would get past its first row.
    """
    head, cod, refused = make_head(target, 2), Cod(4, 1.0), 0.25
    texts = documents(3, 40)
    for a in range(14, 34, 5):  # one after the other: a draft depends on the text before it
        guess = drafts_of(head, target, batch_of(texts, cod))
        for i, text in enumerate(texts):
            for d in range(min(3, text.n - 2 - a)):
                text.tokens[a + d + 2] = guess.get((i, a, d), 3)
    batch = batch_of(texts, cod)
    guess, rows = drafts_of(head, target, batch), batch.rows
    factors = []
    for r in batch.trained.tolist():
        i, a, depth = int(rows.document[r]), int(rows.anchor[r]), int(rows.depth[r])
        # A row that carries no loss, of the prompt, is not judged.
        before = [d for d in range(depth) if texts[i].weight[a + d]]
        factors.append(1.0 if all(guess[(i, a, d)] == texts[i].tokens[a + d + 2] for d in before) else refused)
    deeper = np.array(factors)[rows.depth[batch.trained] > 1]
    assert 5 < (deeper == 1).sum() < len(deeper) - 5
    head.zero_grad(set_to_none=True)
    states = target.read(batch.tokens)
    depths, _ = loss_and_backward(head, batch, states, planner, loss_settings(target, refused=refused))
    assert np.array_equal(depths, rows.depth[batch.trained])
    found = gradients(head)
    head.zero_grad(set_to_none=True)
    final = head.final(partition.head_rows(head, batch, np.arange(len(rows)), states, planner)[batch.trained])
    own = (final @ target.lm_head.T).log_softmax(-1)
    teacher = (states.last[batch.state[batch.trained] + 1] @ target.lm_head.T).log_softmax(-1)
    each = (teacher.exp() * (teacher - own)).sum(-1)
    (each * torch.tensor(factors) / len(factors)).sum().backward()
    assert difference(found, gradients(head)) < 1e-4


def drafts_of(head: Head, target: Target, batch: Batch) -> dict[tuple[int, int, int], int]:
    """What every row of a batch would draft, by document, anchor and depth."""
    with torch.no_grad():
        out = partition.head_rows(head, batch, np.arange(len(batch.rows)), target.read(batch.tokens), planner)
        guess = (head.final(out) @ target.lm_head.T).argmax(-1).tolist()
    rows = batch.rows
    return dict(zip(zip(rows.document.tolist(), rows.anchor.tolist(), rows.depth.tolist()), guess))


def test_rows_of_the_largest_segment() -> None:
    """Memory follows n * (1 + (c - 1) / S)."""
    cod, n = Cod(8, 0.8, 0.2), 3000
    text = documents(1, n)[0]
    text.weight[:] = True
    batch = batch_of([text], cod)
    for segments in (1, 2, 4, 8):
        largest = max(len(kept) for kept, _ in segments_of(batch, segments))
        assert largest == pytest.approx(n * (1 + (len(batch.rows) / n - 1) / segments), rel=0.06)


def test_one_depth_is_next_token_prediction(target: Target) -> None:
    """K = 1 has no MASK rows: neither mask_hidden nor the MASK row gets a gradient, and depth 0 is as with K = 8."""
    head = make_head(target)
    single, *_ = whole_gradient(head, target, 30, Cod(1), 1, 0)
    assert "mask_hidden" not in single and float(single.get("embed_mask_row", torch.zeros(1)).abs().max()) == 0
    batch = batch_of(documents(2, 30), Cod(8, 0.8, 0.2))
    alone = batch_of(documents(2, 30), Cod(1))
    states = target.read(batch.tokens)
    with torch.no_grad():
        whole = head_rows(head, batch, np.arange(len(batch.rows)), states, planner)[: batch.context]
        torch.testing.assert_close(head_rows(head, alone, np.arange(alone.context), states, planner), whole)


def test_mask_row_learns_and_other_rows_cannot(target: Target) -> None:
    whole, *_ = whole_gradient(make_head(target), target, 30, Cod(4, 0.8, 0.2), 1, 0)
    assert float(whole["embed_mask_row"].norm()) > 0 and float(whole["mask_hidden"].norm()) > 0
    assert not any("target_embedding" in name or "lm_head" in name for name in whole)
    head = make_head(target, embedding="full")
    full, *_ = whole_gradient(head, target, 30, Cod(4, 0.8, 0.2), 1, 0)
    assert float(full["embed_tokens.weight"][MASK].norm()) > 0
    assert head.embed_tokens.weight.data_ptr() != target.embedding.data_ptr()


def test_positions_of_mask_rows_matter(target: Target) -> None:
    """A rotary embedding that ignored them would leave depth >= 1 flat (a public bug)."""
    head = make_head(target)
    random = torch.Generator().manual_seed(0)
    q = torch.randn(2, 3, 6, 8, generator=random)
    from sgl_peagle.train.model import _rotate

    assert not torch.allclose(*(_rotate(q[0], head.rope(torch.arange(s, s + 3))) for s in (0, 5)))


# -- EAGLE-3 ----------------------------------------------------------------------------------------------------------


def naive_unroll(head: Head, target: Target, text: Tensor, n: int, steps: int) -> list[Tensor]:
    """The steps by their definition, one query at a time: every key list is written out."""
    layer, outputs = head.layers[0], []
    aux = target.read(text[None]).aux[:n]
    fed, keys, values = head.project(aux), {}, {}
    heads, kv_heads, dim = head.shape.num_heads, head.shape.num_kv_heads, head.shape.head_dim
    from sgl_peagle.train.model import _rotate

    for k in range(steps):
        tokens = torch.stack([text[i + 1 + k] if i + k < n else torch.tensor(0) for i in range(n)])
        read = torch.cat(
            (layer.input_layernorm(head.embed(tokens), torch.float32), layer.hidden_norm(fed, torch.float32)), dim=-1
        )
        rope = head.rope(torch.arange(n) + k)
        q = _rotate(layer.self_attn.q_proj(read).view(n, heads, dim), rope)
        keys[k] = _rotate(layer.self_attn.k_proj(read).view(n, kv_heads, dim), rope)
        values[k] = layer.self_attn.v_proj(read).view(n, kv_heads, dim)
        rows = []
        for i in range(n):
            seen_k = torch.cat([keys[0][: i + 1], *(keys[j][i : i + 1] for j in range(1, k + 1))])
            seen_v = torch.cat([values[0][: i + 1], *(values[j][i : i + 1] for j in range(1, k + 1))])
            mixed = []
            for h in range(heads):
                own = h // (heads // kv_heads)
                weights = (seen_k[:, own] @ q[i, h] / dim**0.5).softmax(0)
                mixed.append(weights @ seen_v[:, own])
            rows.append(torch.cat(mixed))
        x = fed + layer.self_attn.o_proj(torch.stack(rows))
        fed = x + layer.mlp(layer.post_attention_layernorm(x, torch.float32))
        outputs.append(fed)
    return outputs


def test_training_time_test_by_definition(target: Target) -> None:
    """Outputs of all steps, and the gradient through fed-back states and cached keys."""
    head = make_head(target, 1, mask=None, embedding="frozen")
    text = documents(1, 9)[0]
    batch = batch_of([text], Cod(1))
    states, steps = target.read(batch.tokens), 3
    outputs = eagle3.unroll(
        head, batch, states, planner, steps, lambda k, _: torch.from_numpy(eagle3.text_tokens(batch, k))
    )
    want = naive_unroll(head, target, torch.from_numpy(text.tokens), text.n, steps)
    for got, expected in zip(outputs, want):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    parameters = [p for p in head.parameters()]
    results = []
    for found in (outputs, want):
        total = sum(x.square().sum() for x in found)
        results.append(torch.autograd.grad(total, parameters, allow_unused=True))
    for got, expected in zip(*results):
        assert (got is None) == (expected is None)
        if got is not None:
            torch.testing.assert_close(got, expected, atol=1e-2, rtol=1e-3)


def test_training_time_test_toy() -> None:
    """n = 6, step 2, row 1: token x_4 at position 3, teacher T_4; and no step reads past its document."""
    texts = documents(2, 6)
    batch = batch_of(texts, Cod(1))
    tokens = eagle3.text_tokens(batch, 2)
    assert tokens[1] == texts[0].tokens[4]
    assert batch.state[1] + 1 + 2 == 4
    n = texts[0].n
    assert tokens[n - 2 : n].tolist() == [0, 0] and tokens[n] == texts[1].tokens[3]
    for step in range(4):
        judged = eagle3.trained_at(batch, step)
        for i in np.flatnonzero(judged):
            text, p = texts[batch.rows.document[i]], batch.rows.anchor[i] + step
            assert p < text.n and text.weight[p]
        assert judged.sum() == sum(text.weight[step:].sum() for text in texts)


@pytest.mark.parametrize("refused", [1.0, 0.3])
def test_eagle3_loss_weights(target: Target, refused: float) -> None:
    """sum_k 0.8^k mean_k / sum_k 0.8^k, by its gradient against the definition; rows behind a wrong draft count less."""
    head = make_head(target, 1, mask=None, embedding="frozen")
    texts = documents(2, 20)
    for a in range(6, 13, 3):  # some right drafts; the other tokens are random
        drafts = holdout.eagle3_drafts(head, texts, target, planner, 2)
        for text, draft in zip(texts, drafts):
            text.tokens[a + 2 : a + 4] = draft[a, : len(text.tokens) - a - 2]
    batch = batch_of(texts, Cod(1))
    states = target.read(batch.tokens)
    depths, stats = eagle3.loss_and_backward(head, batch, states, planner, loss_settings(target, refused=refused), 4)
    found = gradients(head)
    head.zero_grad(set_to_none=True)
    outputs = eagle3.unroll(
        head, batch, states, planner, 4, lambda k, _: torch.from_numpy(eagle3.text_tokens(batch, k))
    )
    total, wrong = torch.zeros(()), set()
    for step, output in enumerate(outputs):
        rows = torch.from_numpy(np.flatnonzero(eagle3.trained_at(batch, step)))
        teacher = (states.last[torch.from_numpy(batch.state)[rows] + 1 + step] @ target.lm_head.T).log_softmax(-1)
        own = (head.final(output[rows]) @ target.lm_head.T).log_softmax(-1)
        each = (teacher.exp() * (teacher - own)).sum(-1)
        assert torch.allclose(each.mean(), stats.loss[torch.from_numpy(depths == step)].mean(), rtol=1e-4)
        factor = torch.tensor([refused if row in wrong else 1.0 for row in rows.tolist()])
        wrong |= {r for r, g in zip(rows.tolist(), own.argmax(-1).tolist()) if g != eagle3.text_tokens(batch, step + 1)[r]}
        total = total + 0.8**step * (each * factor).mean() / sum(0.8**k for k in range(4))
    assert 0 < len(wrong) < len(batch.rows)
    total.backward()
    assert difference(found, gradients(head)) < 1e-4
    assert partition.LossSettings(target.lm_head).kind == "kl"


@pytest.mark.parametrize("method", ["peagle", "eagle3"])
def test_bfloat16_products(folder: Path, target: Target, method: str) -> None:
    """The GPU's arithmetic, on a CPU: bfloat16 target and products, float32 weights and gradients near those of float32."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        model = Target(str(folder), torch.device("cpu"), dtype)
        ar = method == "eagle3"
        options = {"mask": None, "embedding": "frozen"} if ar else {"mask": MASK}
        head = make_head(target, 1, dtype=dtype, **options)
        head.register_buffer("target_embedding", model.embedding, persistent=False)
        batch = batch_of(documents(3, 40), Cod(1) if ar else Cod(5, 0.8, 0.2))
        states = model.read(batch.tokens)
        if ar:
            eagle3.loss_and_backward(head, batch, states, planner, loss_settings(model), 3)
        else:
            loss_and_backward(head, batch, states, planner, loss_settings(model), 2, "cached")
        found.append(gradients(head))
    assert all(value.dtype == torch.float32 for value in found[1].values())
    whole = [torch.cat([value.flatten() for value in grads.values()]) for grads in found]
    assert float(torch.nn.functional.cosine_similarity(*whole, dim=0)) > 0.98
