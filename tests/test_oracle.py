"""The draft oracle against transformers, against the training formulation, and against its own contract."""

from __future__ import annotations

import ast
import copy
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from sgl_peagle import oracle
from sgl_peagle.oracle import OracleDrafts, OracleHead, aux_from_transformers, rope_frequencies

MASK, K, N = 60, 4, 9
Config = dict[str, Any]
Tensors = dict[str, Tensor]


def make_config(**changes: Any) -> Config:
    """A head whose sizes all differ, so that no mixed-up dimension can pass; D = 48 is not the target's H = 32."""
    config: Config = {"hidden_size": 48, "target_hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3}
    config |= {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 61}
    config |= {"rms_norm_eps": 1e-5, "rope_theta": 1000.0, "max_position_embeddings": 2048, "mask_token_id": MASK}
    return config | changes


def make_tensors(config: Config, aux: int = 3, bias: bool = False, norms: str = "", first: str = "midlayer") -> Tensors:
    """Random float64 tensors under their names on disk; the norms' weights are far from ones."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    d, width, vocab, inner = config["hidden_size"], 32, config["vocab_size"], config["intermediate_size"]
    q, kv = (config["head_dim"] * config[f"num_{which}_heads"] for which in ("attention", "key_value"))
    tensors = {"embed_tokens.weight": randn(vocab, d), "mask_hidden": randn(1, 1, aux * width)}
    tensors |= {"fc.bias": randn(d)} if bias else {}
    sizes = {"norm": d} | ({"input_norm": aux * width} if norms == "input_norm" else {})
    sizes |= {f"fc_norm.{i}": width for i in range(aux if norms == "fc_norm" else 0)}
    shapes = {"fc": (d, aux * width), "lm_head": (config.get("draft_vocab_size", vocab), d)}
    for i in range(config["num_hidden_layers"]):
        prefix, wide = (first, 2 * d) if i == 0 else (f"layers.{i}", d)
        sizes |= {f"{prefix}.{name}_layernorm": d for name in ("input", "post_attention")}
        sizes |= {f"{prefix}.hidden_norm": d} if i == 0 else {}
        attention = {"q": (q, wide), "k": (kv, wide), "v": (kv, wide), "o": (d, q)}
        mlp = {"gate": (inner, d), "up": (inner, d), "down": (d, inner)}
        for block, table, flag in (("self_attn", attention, "attention_bias"), ("mlp", mlp, "mlp_bias")):
            shapes |= {f"{prefix}.{block}.{name}_proj": shape for name, shape in table.items()}
            if config.get(flag):
                tensors |= {f"{prefix}.{block}.{name}_proj.bias": randn(rows) for name, (rows, _) in table.items()}
    tensors |= {f"{name}.weight": 1 + 0.4 * randn(size) for name, size in sizes.items()}
    tensors |= {f"{name}.weight": randn(*shape) / math.sqrt(shape[1]) for name, shape in shapes.items()}
    return tensors


def make_context(n: int = N, aux_width: int = 96) -> tuple[Tensor, Tensor]:
    """n + 1 tokens without the MASK id, and the n aux rows; the scale is far from that of a norm's output."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, MASK, (n + 1,), generator=generator)
    return tokens, 2.5 * torch.randn(n, aux_width, generator=generator, dtype=torch.float64)


def make_head(config: Config, tensors: Tensors, **options: Any) -> OracleHead:
    return OracleHead(config, tensors, **{"dtype": torch.float64} | options)


def run(config: Config, tensors: Tensors, **options: Any) -> OracleDrafts:
    """The K drafts in the standard context, in float64."""
    return make_head(config, tensors, **options).drafts(*make_context(), K)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
YARN = {"factor": 4.0, "original_max_position_embeddings": 512}
# Name: type, parameters, keys of the config outside the parameters.
ROPES: dict[str, tuple[str, Config, Config]] = {
    "default": ("default", {}, {}),
    "linear": ("linear", {"factor": 4.0}, {}),
    "llama3": ("llama3", LLAMA3, {}),
    "llama3-outer-original": ("llama3", LLAMA3, {"original_max_position_embeddings": 1024}),
    "yarn": ("yarn", YARN, {}),
    "yarn-mscale": ("yarn", YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}, {}),
    "yarn-only-mscale": ("yarn", YARN | {"mscale": 0.7}, {}),
    "yarn-attention-factor": ("yarn", YARN | {"attention_factor": 0.5}, {}),
    "yarn-betas": ("yarn", YARN | {"beta_fast": 16, "beta_slow": 2}, {}),
    "yarn-no-truncate": ("yarn", YARN | {"truncate": False}, {}),
    "yarn-no-original": ("yarn", {"factor": 4.0}, {}),
    "yarn-no-factor": ("yarn", YARN | {"factor": None}, {}),
    "yarn-narrow": ("yarn", YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "truncate": False}, {}),
}


def spell_rope(name: str, spelling: str = "rope_type") -> Config:
    """The config keys of a case: new spelling (the config's rope_theta beside it must lose), or old with either key."""
    kind, params, outer = copy.deepcopy(ROPES[name])
    if spelling == "rope_parameters":
        return {"rope_parameters": {"rope_theta": 5e4, "rope_type": kind, **params}} | outer
    return {"rope_theta": 5e4, "rope_scaling": None if kind == "default" else {spelling: kind, **params}} | outer


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_type", "type"])
@pytest.mark.parametrize("name", ROPES)
def test_rope_equals_transformers(name: str, spelling: str) -> None:
    config = make_config(head_dim=64, **spell_rope(name, spelling))
    reference = LlamaRotaryEmbedding(LlamaConfig(**copy.deepcopy(config)))
    frequencies, factor = rope_frequencies(config, 64)
    assert factor == pytest.approx(reference.attention_scaling, rel=1e-12)
    # The reference computes in float32.
    torch.testing.assert_close(frequencies, reference.inv_freq.double(), rtol=2e-6, atol=0)


def test_rope_theta_defaults_to_that_of_transformers() -> None:
    reference = LlamaRotaryEmbedding(LlamaConfig(hidden_size=64, num_attention_heads=4))
    torch.testing.assert_close(rope_frequencies({}, 16)[0], reference.inv_freq.double(), rtol=2e-6, atol=0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rope", ["default", "llama3", "yarn-mscale", "linear"])
def test_plain_layers_equal_a_transformers_llama(rope: str, bias: bool) -> None:
    """With layer 0 made neutral, the rest of a head is a LLaMA that reads the projected hidden states as embeddings."""
    config = make_config(attention_bias=bias, mlp_bias=bias, **spell_rope(rope))
    tensors = make_tensors(config)
    neutral = ("midlayer.self_attn.o_proj", "midlayer.mlp.down_proj")
    tensors |= {name: torch.zeros_like(tensor) for name, tensor in tensors.items() if name.startswith(neutral)}
    reference_config = LlamaConfig(**copy.deepcopy(config) | {"num_hidden_layers": 2}, tie_word_embeddings=False)
    reference = LlamaForCausalLM._from_config(reference_config, attn_implementation="eager").double().eval()
    state = {"lm_head.weight": tensors["lm_head.weight"]}
    for name, tensor in tensors.items():
        if name.startswith(("embed_tokens", "norm", "layers")):
            shifted = name.replace("layers.1.", "layers.0.").replace("layers.2.", "layers.1.")
            state[f"model.{shifted}"] = tensor
    reference.load_state_dict(state)
    tokens, aux = make_context(37)
    rows = torch.cat((aux, tensors["mask_hidden"].flatten().expand(K - 1, -1))) @ tensors["fc.weight"].T
    with torch.no_grad():
        output = reference(inputs_embeds=rows[None], use_cache=True)
    head = make_head(config, tensors)
    # transformers' angles are float32, even in a float64 model.
    torch.testing.assert_close(head.drafts(tokens, aux, K).logits, output.logits[0, -K:], rtol=0, atol=2e-5)
    for pair, cached in zip(head.layer_kv(tokens, aux)[1:], output.past_key_values.layers, strict=True):
        for ours, theirs in zip(pair, (cached.keys, cached.values), strict=True):
            assert ours.shape == (37, 2, 16)
            torch.testing.assert_close(ours, theirs[0].transpose(0, 1)[:37], rtol=0, atol=2e-5)


def training_mask(anchor: Tensor, depth: Tensor) -> Tensor:
    """[query, key]: the context up to the query's anchor, and the query's own rollout up to itself."""
    context = (depth[None] == 0) & (anchor[None] <= anchor[:, None])
    rollout = (anchor[None] == anchor[:, None]) & (depth[None] <= depth[:, None])
    return context | rollout


def flat_logits(config: Config, tensors: Tensors, tokens: Tensor, aux: Tensor, depths: int) -> Tensor:
    """Logits [n, depths, draft_vocab] of all rows (anchor, depth) in one pass, as a trainer computes them."""
    heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    anchor, depth = (g.flatten() for g in torch.meshgrid(torch.arange(len(aux)), torch.arange(depths), indexing="ij"))
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    fed = torch.where(depth == 0, tokens[anchor + 1], config["mask_token_id"])
    g = torch.where(depth[:, None] == 0, aux[anchor], tensors["mask_hidden"].flatten())

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], tensors[f"{name}.weight"], config["rms_norm_eps"])

    def project(x: Tensor, name: str) -> Tensor:
        return torch.einsum("ti,oi->to", x, tensors[f"{name}.weight"]) + tensors.get(f"{name}.bias", 0)

    # Rotation as a complex multiplication of the pairs (i, i + dim / 2).
    turn = config["rope_theta"] ** (-2.0 * torch.arange(dim // 2, dtype=torch.float64) / dim)
    phase = torch.exp(1j * (anchor + depth)[:, None, None] * turn)

    def rotate(x: Tensor) -> Tensor:
        turned = torch.complex(x[..., : dim // 2], x[..., dim // 2 :]) * phase
        return torch.cat((turned.real, turned.imag), dim=-1)

    g = norm(g, "input_norm") if "input_norm.weight" in tensors else g
    if "fc_norm.0.weight" in tensors:
        g = torch.cat([norm(part, f"fc_norm.{i}") for i, part in enumerate(g.split(32, dim=1))], dim=1)
    x = project(g, "fc")
    for i in range(config["num_hidden_layers"]):
        prefix = f"layers.{i}"
        if i == 0:
            hidden = norm(x, f"{prefix}.hidden_norm")
            inputs = torch.cat((norm(tensors["embed_tokens.weight"][fed], f"{prefix}.input_layernorm"), hidden), dim=1)
            x = hidden if config.get("norm_before_residual") else x
        else:
            inputs = norm(x, f"{prefix}.input_layernorm")
        q, k, v = (project(inputs, f"{prefix}.self_attn.{name}_proj").unflatten(1, (-1, dim)) for name in "qkv")
        k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (rotate(k), v))
        scores = torch.einsum("qhd,khd->hqk", rotate(q), k) / math.sqrt(dim)
        weights = torch.where(training_mask(anchor, depth), scores, -torch.inf).softmax(-1)
        x = x + project(torch.einsum("hqk,khd->qhd", weights, v).flatten(1), f"{prefix}.self_attn.o_proj")
        inner = norm(x, f"{prefix}.post_attention_layernorm")
        gate = project(inner, f"{prefix}.mlp.gate_proj")
        x = x + project(gate * gate.sigmoid() * project(inner, f"{prefix}.mlp.up_proj"), f"{prefix}.mlp.down_proj")
    return (norm(x, "norm") @ tensors["lm_head.weight"].T).unflatten(0, (len(aux), depths))


def test_training_mask_of_the_toy() -> None:
    """The training design's toy (n = 6, K = 3): 15 rows, 21 + 20 + 18 = 59 pairs."""
    rows = [(a, d) for d in range(3) for a in range(6 - d)]
    anchor, depth = torch.tensor(rows).T
    mask = training_mask(anchor, depth)
    assert [int(mask[depth == d].sum()) for d in range(3)] == [21, 20, 18]
    seen = [row for row, visible in zip(rows, mask[rows.index((2, 2))], strict=True) if visible]
    assert seen == [(0, 0), (1, 0), (2, 0), (2, 1), (2, 2)]


# Name: changes to the config, options of make_tensors.
VARIANTS: dict[str, tuple[Config, Config]] = {
    "plain": ({}, {}),
    "layers.0 naming": ({}, {"first": "layers.0"}),
    "one layer": ({"num_hidden_layers": 1}, {}),
    "no GQA": ({"num_key_value_heads": 6}, {}),
    "norm_before_residual": ({"norm_before_residual": True}, {}),
    "biases": ({"attention_bias": True, "mlp_bias": True}, {"bias": True}),
    "input_norm": ({"norm_before_fc": True}, {"norms": "input_norm"}),
    "fc_norm": ({"fc_norm": True}, {"norms": "fc_norm"}),
    "five aux layers": ({}, {"aux": 5, "norms": "fc_norm"}),
    "reduced vocabulary": ({"draft_vocab_size": 20}, {}),
    "large eps": ({"rms_norm_eps": 0.3}, {}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_anchor_equals_the_flat_training_pass(variant: str) -> None:
    config = make_config(**VARIANTS[variant][0])
    tensors = make_tensors(config, **VARIANTS[variant][1])
    head = make_head(config, tensors)
    tokens, aux = make_context(aux_width=head.aux_width)
    flat = flat_logits(config, tensors, tokens, aux, K)
    for anchor, k in itertools.product(range(N), (1, K)):
        drafts = head.drafts(tokens[: anchor + 2], aux[: anchor + 1], k)
        torch.testing.assert_close(drafts.logits, flat[anchor, :k], rtol=0, atol=1e-11)
        assert drafts.ids == flat[anchor, :k].argmax(-1).tolist()


def test_every_tensor_matters() -> None:
    """Perturbing any one tensor changes some logit: nothing is read and then ignored."""
    config = make_config(attention_bias=True, mlp_bias=True)
    tensors = make_tensors(config, bias=True, norms="fc_norm")
    before = run(config, tensors).logits
    for name, tensor in tensors.items():
        noise = torch.linspace(-3, 3, tensor.numel()).sin().view_as(tensor)
        assert (run(config, tensors | {name: tensor + noise}).logits - before).abs().max() > 1e-4, name


@pytest.mark.parametrize("what", ["mask_hidden", "mask embedding", "mask id", "shifted", "frozen"])
def test_masks_change_drafts_2_to_k_and_never_draft_1(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, tensors = make_config(), make_tensors(make_config())
    before = run(config, tensors).logits
    if what == "mask_hidden":
        tensors["mask_hidden"] = tensors["mask_hidden"] + 1
    elif what == "mask embedding":
        tensors["embed_tokens.weight"][MASK] *= -1
    rows = torch.arange(N + K - 1)
    positions = {"shifted": rows + (rows >= N), "frozen": rows.clamp(max=N)}.get(what, rows)
    monkeypatch.setattr(OracleHead, "_positions", lambda _self, _n, _k: positions)
    after = make_head(config, tensors).drafts(*make_context(), K, 7 if what == "mask id" else None).logits
    difference = (before - after).abs().amax(-1)
    unchanged = 2 if what == "frozen" else 1  # the first MASK row stands at position n, frozen or not
    assert difference[:unchanged].max() < 1e-12 and difference[unchanged:].min() > 1e-3


def test_rows_see_nothing_behind_them() -> None:
    """A change at row p leaves the keys and values of earlier rows alone, and reaches row p and later ones."""
    head, (tokens, aux) = make_head(make_config(), make_tensors(make_config())), make_context()
    before = head.layer_kv(tokens, aux)
    changed_tokens, changed_aux = tokens.clone(), aux.clone()
    changed_tokens[7] = (tokens[7] + 1) % MASK  # fed at row 6
    changed_aux[6] += 1
    for case in ((changed_tokens, aux), (tokens, changed_aux)):
        for layer, (old, new) in enumerate(zip(before, head.layer_kv(*case), strict=True)):
            for a, b in zip(old, new, strict=True):
                difference = (a - b).abs().amax((1, 2))
                assert difference[:6].max() < 1e-13 and difference[6] > 1e-3
                # Layer 0's keys depend on their own row only; from layer 1 on, later rows have attended to row 6.
                assert (difference[7:].min() > 1e-6) if layer else (difference[7:].max() < 1e-13)


def test_shared_hidden_takes_the_path_of_an_aux_row() -> None:
    tensors = make_tensors(make_config(), norms="fc_norm", bias=True)
    parts = zip(tensors["mask_hidden"].flatten().split(32), range(3), strict=True)
    raw = torch.cat([F.rms_norm(part, (32,), tensors[f"fc_norm.{i}.weight"], 1e-5) for part, i in parts])
    expected = tensors["fc.weight"] @ raw + tensors["fc.bias"]
    torch.testing.assert_close(make_head(make_config(), tensors).shared_hidden(), expected, rtol=0, atol=1e-12)


def make_reduced() -> tuple[Config, Tensors, Tensor]:
    """A head with a draft vocabulary of 20, and the target id of each draft id."""
    config, targets = make_config(draft_vocab_size=20), torch.arange(20) * 3 + 2
    t2d = torch.zeros(61, dtype=torch.bool).index_fill(0, targets, True)
    return config, make_tensors(config) | {"d2t": targets - torch.arange(20), "t2d": t2d}, targets


def test_d2t_is_an_offset() -> None:
    config, tensors, targets = make_reduced()
    drafts = run(config, tensors)
    assert drafts.logits.shape == (K, 20)
    assert drafts.ids == targets[drafts.logits.argmax(-1)].tolist()
    del tensors["d2t"], tensors["t2d"]
    assert run(config, tensors).ids == drafts.logits.argmax(-1).tolist() != drafts.ids


def test_margin_is_the_gap_between_the_two_best() -> None:
    drafts = run(make_config(), make_tensors(make_config()))
    ordered = drafts.logits.sort(-1, descending=True).values
    assert drafts.margin.shape == (K,) and torch.equal(drafts.margin, ordered[:, 0] - ordered[:, 1])


@pytest.mark.parametrize("shards", [1, 3])
def test_folder_is_read_like_the_tensors(tmp_path: Path, shards: int) -> None:
    config, tensors, _ = make_reduced()
    stored = {name: t.bfloat16() if t.is_floating_point() else t for name, t in tensors.items()}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weight_map = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(stored)}
    for file in set(weight_map.values()):
        save_file({name: t for name, t in stored.items() if weight_map[name] == file}, tmp_path / file)
    if shards > 1:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    drafts = OracleHead.from_folder(tmp_path).drafts(*make_context(), K)
    expected = run(config, stored, dtype=torch.float32)
    assert drafts.ids == expected.ids and torch.equal(drafts.logits, expected.logits)
    assert drafts.logits.dtype == torch.float32
    with pytest.raises(ValueError, match="bfloat16"):
        OracleHead.from_folder(tmp_path, dtype=torch.bfloat16)
    precise = OracleHead.from_folder(str(tmp_path), dtype=torch.float64).drafts(*make_context(), K).logits
    assert precise.dtype == torch.float64 and not torch.equal(drafts.logits.double(), precise)
    torch.testing.assert_close(drafts.logits.double(), precise, rtol=0, atol=1e-4)
    (tmp_path / "model-0.safetensors").unlink()
    with pytest.raises(FileNotFoundError if shards > 1 else ValueError):
        OracleHead.from_folder(tmp_path)


@pytest.mark.parametrize(("name", "argument"), [("embed_tokens", "target_embed"), ("lm_head", "target_lm_head")])
def test_target_weights_only_where_the_head_has_none(name: str, argument: str) -> None:
    config, tensors = make_config(), make_tensors(make_config())
    target = tensors[f"{name}.weight"] * 0.5 + 0.1
    own, ignored = run(config, tensors).logits, run(config, tensors, **{argument: target}).logits
    swapped = run(config, tensors | {f"{name}.weight": target}).logits
    del tensors[f"{name}.weight"]
    borrowed = run(config, tensors, **{argument: target}).logits
    assert torch.equal(own, ignored) and torch.equal(borrowed, swapped) and not torch.equal(borrowed, own)
    with pytest.raises(ValueError, match=f"{name}.*the target has shape"):
        run(config, tensors, **{argument: target[:, :32]})


@pytest.mark.parametrize("name", make_tensors(make_config(), norms="input_norm"))
def test_missing_tensor(name: str) -> None:
    config = make_config(norm_before_fc=True)
    tensors = make_tensors(config, norms="input_norm")
    del tensors[name]
    # A missing norm contradicts the flag that asks for it.
    with pytest.raises(ValueError if name == "input_norm.weight" else KeyError, match=name.removesuffix(".weight")):
        run(config, tensors)


@pytest.mark.parametrize("name", ["layers.3.x", "layers.1.hidden_norm.weight", "layers.0.x", "model.x", "mask_row"])
def test_unknown_tensor(name: str) -> None:
    with pytest.raises(ValueError, match=f"nothing uses: .*{name}"):
        run(make_config(), make_tensors(make_config()) | {name: torch.zeros(48)})


@pytest.mark.parametrize(
    ("changes", "extra", "words"),
    [
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, {}, "sliding-window"),
        ({"sliding_window": 2048}, {}, "sliding-window"),
        ({"hidden_act": "gelu"}, {}, "hidden_act 'gelu'"),
        ({"logit_scale": 0.5}, {}, "logit_scale"),
        ({}, {"midlayer.self_attn.k_norm.weight": torch.ones(16)}, "nothing uses"),
        ({"num_key_value_heads": 4}, {}, "no multiple"),
        ({"head_dim": 8}, {}, "q_proj.weight' .* shape"),
        ({"norm_before_fc": True}, {}, "norm_before_fc is True"),
        ({"fc_norm": False}, {f"fc_norm.{i}.weight": torch.ones(32) for i in range(3)}, "fc_norm is False"),
        ({}, {f"fc_norm.{i}.weight": torch.ones(32) for i in range(2)}, "aux width"),
        ({}, {"fc_norm.0.weight": torch.ones(96), "input_norm.weight": torch.ones(96)}, "fc_norm.* and input_norm"),
        ({"target_hidden_size": 36}, {}, "aux width"),
        ({}, {"mask_hidden": torch.zeros(1, 1, 64)}, "fc.weight"),
        ({}, {"d2t": torch.arange(61)}, "Store offsets"),
        ({}, {"d2t": torch.zeros(60, dtype=torch.int64)}, "d2t"),
        ({}, {"t2d": torch.arange(61) > 0}, "t2d"),
        ({}, {"midlayer.self_attn.q_proj.bias": torch.zeros(96)}, "nothing uses"),
        ({}, {"layers.2.mlp.up_proj.bias": torch.zeros(40)}, "nothing uses"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, {}, "dynamic"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, {}, "partial"),
        ({"partial_rotary_factor": 0.5}, {}, "partial"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, {}, "same in all layers"),
    ],
)
def test_refused_heads(changes: Config, extra: Tensors, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        run(make_config(**changes), make_tensors(make_config()) | extra)


def test_optional_and_harmless_config_keys() -> None:
    config = make_config(head_dim=8, num_key_value_heads=6)
    tensors = make_tensors(config)
    expected = run(config, tensors).logits
    derived = {key: value for key, value in config.items() if key not in ("head_dim", "num_key_value_heads")}
    unused = {"sliding_window": 4096, "use_sliding_window": False}
    neutral = {"hidden_act": "silu", "logit_scale": 1.0, "partial_rotary_factor": 1.0, "fc_norm": False}
    full = {"layer_types": ["full_attention"] * 3, "sliding_window": None, "attention_bias": False}
    for other in (derived, config | unused, config | neutral, config | full):
        assert torch.equal(run(other, tensors).logits, expected)


def test_missing_config_keys() -> None:
    tensors = make_tensors(make_config())
    required = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "rms_norm_eps")
    cases = {key: {key: None} for key in required} | {"factor": {"rope_scaling": {"type": "linear"}}}
    for key, changes in cases.items():
        with pytest.raises(KeyError, match=f"no '{key}'"):
            run(make_config(**changes), tensors)


def test_mask_id_keys_in_order() -> None:
    tensors = make_tensors(make_config())
    keys: Config = {"dflash_config": {"mask_token_id": 1}}
    keys |= {"mask_token_id": 2, "dspark_noise_token_id": 3, "pard_token": 4, "ptd_token_id": 5}
    for expected, key in enumerate(list(keys), start=1):
        assert make_head(make_config(mask_token_id=None) | keys, tensors).mask_token_id == expected
        del keys[key]
    head = make_head(make_config(mask_token_id=None, dflash_config={}), tensors)
    assert head.mask_token_id is None
    assert len(head.drafts(*make_context(), 1).ids) == 1
    with pytest.raises(ValueError, match="MASK token's id is None"):
        head.drafts(*make_context(), 2)
    given = head.drafts(*make_context(), K, mask_token_id=0).logits
    assert torch.equal(given, run(make_config(mask_token_id=0), tensors).logits)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t, a: (t, a, 0), "k is 0"),
        (lambda t, a: (t, a, K, 61), "MASK token's id is 61"),
        (lambda t, a: (t, a, K, -1), "MASK token's id is -1"),
        (lambda t, a: (t[:-1], a, K), "aux_hidden is"),
        (lambda t, a: (t, a[:, :-1], K), "aux_hidden is"),
        (lambda t, a: (t, a.long(), K), "aux_hidden is"),
        (lambda t, a: (t, a.index_fill(0, torch.tensor([2]), math.nan), K), "NaN"),
        (lambda t, a: (t[None], a, K), "token_ids is"),
        (lambda t, a: (t.int(), a, K), "token_ids is"),
        (lambda t, a: (t[:1], a[:0], K), "token_ids is"),
        (lambda t, a: (t + 2, a, K), "token_ids ranges"),
        (lambda t, a: (t - 1, a, K), "token_ids ranges"),
    ],
)
def test_refused_arguments(change: Any, words: str) -> None:
    head = make_head(make_config(), make_tensors(make_config()))
    with pytest.raises(ValueError, match=words):
        head.drafts(*change(torch.tensor([0, 59, 20, 40, 1, 33]), torch.ones(5, 96)))


@pytest.fixture
def target() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=8, vocab_size=61, initializer_range=0.2)
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("ids", [None, [0, 3, 7], [1], [1, 2, 3, 4, 5]])
def test_aux_are_the_outputs_of_the_layers_before(target: LlamaForCausalLM, ids: list[int] | None) -> None:
    streams: dict[int, Tensor] = {}
    for i, module in enumerate([target.model.embed_tokens, *target.model.layers]):
        module.register_forward_hook(lambda _module, _inputs, output, at=i: streams.update({at: output}))
    aux = aux_from_transformers(target, make_context()[0], ids)
    expected = torch.cat([streams[i][0] for i in (ids or [2, 4, 5])], dim=-1)
    assert aux.shape == (N + 1, 32 * len(ids or [2, 4, 5])) and not aux.requires_grad
    assert torch.equal(aux, expected)
    # All captures differ, or else the comparison couldn't see an id that is off by one.
    assert all((streams[i] - streams[i + 1]).abs().max() > 1e-3 for i in range(8))


@pytest.mark.parametrize("ids", [[2, 5, 8], [2, 9], [-1, 2], [4, 2], [2, 2], []])
def test_refused_capture_ids(target: LlamaForCausalLM, ids: list[int]) -> None:
    with pytest.raises(ValueError, match="final norm" if 8 in ids else "strictly increasing"):
        aux_from_transformers(target, torch.arange(5), ids)
    for tokens in (torch.arange(5)[None], torch.arange(5).int(), torch.arange(0)):
        with pytest.raises(ValueError, match="token_ids"):
            aux_from_transformers(target, tokens, [1])


def test_oracle_shares_no_code_with_the_engine() -> None:
    nodes = list(ast.walk(ast.parse(Path(oracle.__file__).read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += ["." * node.level + (node.module or "") for node in nodes if isinstance(node, ast.ImportFrom)]
    allowed = {"__future__", "collections", "dataclasses", "json", "math", "pathlib", "safetensors", "torch", "typing"}
    assert {name.split(".")[0] for name in names} <= allowed
