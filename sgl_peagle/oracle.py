"""A from-scratch recomputation of a P-EAGLE head's drafts, to judge the engine by.

Given all committed tokens, the target's auxiliary hidden states and a head's raw files, the oracle runs the head over
the whole context in plain torch, with no KV cache, and returns the K drafts. It shares no code with the engine: it
imports nothing from this package, so that one mistake can't pass on both sides of a comparison.

What is computed for n + 1 committed tokens x_0 ... x_n (x_n is the bonus token), one row per position::

    position   0     1    ...  n-1              n          ...  n+K-2
    token      x_1   x_2  ...  x_n              MASK       ...  MASK
    hidden     g_0   g_1  ...  g_{n-1}          h_shared   ...  h_shared
    sampled                    draft 1          draft 2    ...  draft K

g_p are the target's hidden states of A layers, concatenated, after reading x_p. They and the learned ``mask_hidden``
go through the same projection (optional norms, then ``fc``). Attention is plain causal over that list.

Letters in shapes: n context rows, K drafts, H target hidden size, D head hidden size, A aux layers, V target
vocabulary, T rows of a forward.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

# The top-level keys under which published heads keep the MASK token's id, in the order of precedence.
_MASK_ID_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")


def _check(ok: bool, what: str, why: str, fix: str, error: type[Exception] = ValueError) -> None:
    if not ok:
        raise error(f"{what} {why} {fix}")


def _require(config: Mapping[str, Any], key: str, where: str = "The head's config") -> Any:
    found = config.get(key) is not None
    _check(found, f"{where} has no '{key}'.", "The head can't be computed without it.", "Add the key.", KeyError)
    return config[key]


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Refuse by name what would otherwise be computed wrongly without an error."""
    layer_types = config.get("layer_types")
    # Without layer_types a bare window applies to every layer, unless the (Qwen-style) switch says that it is unused.
    windowed = bool(config.get("use_sliding_window", not layer_types) and config.get("sliding_window"))
    windowed |= any(kind != "full_attention" for kind in layer_types or ())
    why, fix = "The oracle computes LLaMA blocks with full attention only.", "Use a head without it."
    _check(not windowed, "The head's config asks for sliding-window layers.", why, fix)
    for key, known in (("hidden_act", ("silu", "swish")), ("logit_scale", (1,))):
        _check(config.get(key) in (None, *known), f"{key} {config.get(key)!r} is not supported.", why, fix)


# -- RoPE -------------------------------------------------------------------------------------------------------------


def rope_frequencies(config: Mapping[str, Any], head_dim: int) -> tuple[Tensor, float]:
    """Rotary frequencies [head_dim / 2] (float64, radians per position), and the factor on cos and sin.

    Formulas and precedence of keys are those of ``transformers.modeling_rope_utils`` (5.x), in float64. Both spellings
    are read: ``rope_theta`` + ``rope_scaling`` and ``rope_parameters``. Raises KeyError for a missing parameter and
    ValueError for a type, a partial rotation or parameters per layer type that isn't supported.
    """
    params = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    kind = params.get("rope_type") or params.get("type") or "default"
    partial = params.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    nested = any(isinstance(value, Mapping) for value in params.values())
    known = not nested and partial in (None, 1) and kind in ("default", "linear", "llama3", "yarn")
    what = f"RoPE parameters {params} with partial_rotary_factor {partial} are not supported."
    why = "Only full rotation of type default, linear, llama3 or yarn, the same in all layers, is computed."
    _check(known, what, why, "Use a head with one of these.")

    base = float(params.get("rope_theta") or config.get("rope_theta") or 10000.0)
    inverse = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if kind == "default":
        return inverse, 1.0
    if kind == "linear":
        return inverse / _require(params, "factor", "RoPE type linear"), 1.0
    # transformers lets the key outside the RoPE dictionary win, and falls back to the context length.
    original = config.get("original_max_position_embeddings") or params.get("original_max_position_embeddings")
    original = original or _require(config, "max_position_embeddings")
    if kind == "llama3":
        return _llama3(inverse, params, original), 1.0
    factor = params.get("factor") or _require(config, "max_position_embeddings") / original
    return _yarn(inverse, params, base, factor, original), _yarn_attention_factor(params, factor)


def _llama3(inverse: Tensor, params: Mapping[str, Any], original: float) -> Tensor:
    keys = ("factor", "low_freq_factor", "high_freq_factor")
    factor, low, high = (_require(params, key, "RoPE type llama3") for key in keys)
    # Turns that a frequency makes over the original context: few turns are slowed down by the whole factor, many turns
    # are kept, and in between the two are blended linearly in the number of turns.
    turns = original * inverse / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * inverse + (1 - keep) * inverse / factor


def _yarn(inverse: Tensor, params: Mapping[str, Any], base: float, factor: float, original: float) -> Tensor:
    dim = 2 * len(inverse)

    def index_of(turns: float) -> float:
        """The (real) index of the frequency that makes so many turns over the original context."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = index_of(params.get("beta_fast") or 32), index_of(params.get("beta_slow") or 1)
    if params.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001  # the reference's own guard against a division by zero
    slowed = ((torch.arange(dim // 2, dtype=torch.float64) - first) / (last - first)).clamp(0, 1)
    return slowed * inverse / factor + (1 - slowed) * inverse


def _yarn_attention_factor(params: Mapping[str, Any], factor: float) -> float:
    if params.get("attention_factor") is not None:
        return float(params["attention_factor"])

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if params.get("mscale") and params.get("mscale_all_dim"):
        return mscale(params["mscale"]) / mscale(params["mscale_all_dim"])
    return mscale(1.0)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x`` [T, heads, head_dim]; element i pairs with element i + head_dim / 2 (NeoX style)."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


# -- Files ------------------------------------------------------------------------------------------------------------


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
        what = f"{folder} holds {len(files)} *.safetensors files and no model.safetensors.index.json."
        why = "Which tensors belong to the head can't be told."
        _check(len(files) == 1, what, why, "Give one file, or shards with their index.")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


class _Tensors(dict[str, Tensor]):
    """The head's tensors by name; what nobody took is an error in the end."""

    def __init__(self, tensors: Mapping[str, Tensor], dtype: torch.dtype, source: str) -> None:
        super().__init__(tensors)
        self.dtype, self.source = dtype, source

    def count(self, prefix: str) -> int:
        return sum(name.startswith(prefix) for name in self)

    def raw(self, name: str, *shape: int) -> Tensor:
        """Take a tensor as it is on disk, and insist on its shape unless none is given."""
        what, why = f"{self.source} has no tensor '{name}'.", "The head can't be computed without it."
        fix = "Check that this is a P-EAGLE head in the unprefixed format and that its config fits."
        _check(name in self, what, why, fix, KeyError)
        tensor = self.pop(name)
        _check_shape(name, tensor, shape or tensor.shape, self.source)
        return tensor

    def weight(self, name: str, *shape: int) -> Tensor:
        """Take a tensor in the computing dtype."""
        return self.raw(name, *shape).to(self.dtype)

    def finish(self) -> None:
        what = f"{self.source} has tensors that nothing uses: {sorted(self)}."
        why = "Dropping a trained tensor silently would change the drafts."
        _check(not self, what, why, "Check the config's flags (biases, layer count) or remove the tensors.")


def _check_shape(name: str, tensor: Tensor, shape: Sequence[int], source: str) -> None:
    what = f"'{name}' of {source} has shape {list(tensor.shape)}, not {list(shape)}."
    _check(tuple(tensor.shape) == tuple(shape), what, "It doesn't fit the config.", "Correct one of the two.")


# -- The head ---------------------------------------------------------------------------------------------------------


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _linear(weights: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


@dataclass(frozen=True, eq=False)
class OracleDrafts:
    """The K drafts of one round."""

    ids: list[int]  # K ids of the target's vocabulary (d2t applied), draft 1 first
    logits: Tensor  # [K, draft_vocab] over the *draft* vocabulary, in the head's computing dtype
    margin: Tensor  # [K] gap between the two largest logits: a small one is a near-tie that other arithmetic may break


class OracleHead:
    """A P-EAGLE head, computed over the whole context from scratch. Everything is on the CPU.

    Built from config.json's content and the tensors by their names on disk (any floating dtype). ``target_embed``
    [V, D] and ``target_lm_head`` [draft_vocab, D] are used only where the head has none of its own. ``dtype``, that of
    all computing, is float32 or float64. ``source`` is the head's name in error messages.

    Attributes: ``mask_token_id``, the MASK token's id by the config, None where the format doesn't record it;
    ``aux_width``, A*H, the width of a row of aux hidden states; ``dtype``.

    Raises KeyError for a missing tensor or config key. Raises ValueError for an unknown tensor, a wrong shape, a config
    that contradicts the tensors, and what the oracle doesn't compute (sliding window, other RoPE types).
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        target_embed: Tensor | None = None,
        target_lm_head: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        source: str = "The head",
    ) -> None:
        precise = dtype in (torch.float32, torch.float64)
        _check(precise, f"dtype {dtype}.", "A reference must not be less precise than what it judges.", "Use float32.")
        _refuse_unsupported(config)
        self.dtype = dtype
        self._hidden: int = _require(config, "hidden_size")
        self._heads: int = _require(config, "num_attention_heads")
        self._kv_heads: int = config.get("num_key_value_heads") or self._heads
        what = f"num_attention_heads {self._heads} is no multiple of num_key_value_heads {self._kv_heads}."
        _check(self._heads % self._kv_heads == 0, what, "Query heads are shared out evenly.", "Correct the config.")
        self._head_dim: int = config.get("head_dim") or self._hidden // self._heads
        self._vocab: int = _require(config, "vocab_size")
        self._draft_vocab: int = config.get("draft_vocab_size") or self._vocab
        self._eps: float = _require(config, "rms_norm_eps")
        self._norm_before_residual = bool(config.get("norm_before_residual"))
        mask_ids = [(config.get("dflash_config") or {}).get("mask_token_id"), *map(config.get, _MASK_ID_KEYS)]
        self.mask_token_id: int | None = next((value for value in mask_ids if value is not None), None)
        self._rope = rope_frequencies(config, self._head_dim)

        left = _Tensors(tensors, dtype, source)
        self._mask_hidden = left.weight("mask_hidden").flatten()
        self.aux_width = self._mask_hidden.numel()
        self._read_combine(left, config)
        self._layers = [self._read_layer(left, config, i) for i in range(_require(config, "num_hidden_layers"))]
        self._norm = left.weight("norm.weight", self._hidden)
        self._embedding = self._own_or_target(left, "embed_tokens.weight", target_embed, self._vocab)
        self._lm_head = self._own_or_target(left, "lm_head.weight", target_lm_head, self._draft_vocab)
        self._target_ids = self._read_vocab_maps(left)
        left.finish()

    @classmethod
    def from_folder(
        cls,
        path: str | Path,
        target_embed: Tensor | None = None,
        target_lm_head: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> OracleHead:
        """Read config.json and the tensors (one *.safetensors file, or shards by their index) of a folder.

        The parameters and errors are the class's; FileNotFoundError when config.json or a shard is missing.
        """
        folder = Path(path)
        config = json.loads((folder / "config.json").read_text())
        return cls(config, _read_tensors(folder), target_embed, target_lm_head, dtype, source=str(folder))

    def _read_combine(self, left: _Tensors, config: Mapping[str, Any]) -> None:
        """Read what turns concatenated aux hidden states [A*H] into the head's hidden state [D]."""
        self._fc = {"fc.weight": left.weight("fc.weight", self._hidden, self.aux_width)}
        if "fc.bias" in left:
            self._fc["fc.bias"] = left.weight("fc.bias", self._hidden)
        norms, single = left.count("fc_norm."), "input_norm.weight" in left
        for flag, found in (("fc_norm", norms > 0), ("norm_before_fc", single)):
            same = config.get(flag) is None or bool(config[flag]) == found
            what = f"The config's {flag} is {config.get(flag)}, but the file has {'' if found else 'no '}such norms."
            why, fix = "Which of the two is right can't be told.", "Correct the config, fc_norm.{i} or input_norm."
            _check(same, what, why, fix)
        why = "The two are alternatives; their order is defined nowhere."
        _check(not (norms and single), f"{left.source} has fc_norm.* and input_norm.", why, "Keep the trained one.")
        target_hidden = config.get("target_hidden_size") or self.aux_width // (norms or 1)
        fits = self.aux_width % target_hidden == 0 and norms in (0, self.aux_width // target_hidden)
        what = f"The aux width {self.aux_width} is not {norms or 'a whole number of'} hidden states of {target_hidden}."
        why = "The head reads one hidden state of the target per aux layer."
        _check(fits, what, why, "Correct target_hidden_size or the fc_norm tensors.")
        self._input_norm = left.weight("input_norm.weight", self.aux_width) if single else None
        self._fc_norms = [left.weight(f"fc_norm.{i}.weight", target_hidden) for i in range(norms)]

    def _read_layer(self, left: _Tensors, config: Mapping[str, Any], index: int) -> dict[str, Tensor]:
        """Read one layer's tensors, by their names within the layer."""
        hidden, inner = self._hidden, _require(config, "intermediate_size")
        q_size, kv_size = self._heads * self._head_dim, self._kv_heads * self._head_dim
        width = 2 * hidden if index == 0 else hidden
        attention = {"q": (q_size, width), "k": (kv_size, width), "v": (kv_size, width), "o": (hidden, q_size)}
        mlp = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        shapes: dict[str, tuple[int, ...]] = {}
        for block, table, flag in (("self_attn", attention, "attention_bias"), ("mlp", mlp, "mlp_bias")):
            for name, (rows, columns) in table.items():
                shapes[f"{block}.{name}_proj.weight"] = (rows, columns)
                if config.get(flag):
                    shapes[f"{block}.{name}_proj.bias"] = (rows,)
        norms = ("input_layernorm", "post_attention_layernorm", *(("hidden_norm",) if index == 0 else ()))
        shapes |= {f"{name}.weight": (hidden,) for name in norms}
        prefix = "midlayer" if index == 0 and left.count("midlayer.") else f"layers.{index}"
        if f"{prefix}.self_attn.q_norm.weight" in left:
            shapes |= {f"self_attn.{name}_norm.weight": (self._head_dim,) for name in "qk"}
        return {name: left.weight(f"{prefix}.{name}", *shape) for name, shape in shapes.items()}

    def _own_or_target(self, left: _Tensors, name: str, target: Tensor | None, rows: int) -> Tensor:
        if name in left or target is None:
            return left.weight(name, rows, self._hidden)
        _check_shape(name, target, (rows, self._hidden), "the target")
        return target.detach().cpu().to(self.dtype)

    def _read_vocab_maps(self, left: _Tensors) -> Tensor:
        """The target id of every draft id, [draft_vocab] int64."""
        ids = torch.arange(self._draft_vocab)
        if "d2t" in left:
            ids = ids + left.raw("d2t", self._draft_vocab).long()
        low, high = int(ids.min()), int(ids.max())
        what = f"d2t of {left.source} leads to the ids {low} ... {high} of a target vocabulary of {self._vocab}."
        why = "d2t[i] is the offset from draft id i to target id i + d2t[i]."
        _check(0 <= low and high < self._vocab, what, why, "Store offsets, not ids.")
        if "t2d" in left:
            used = torch.zeros(self._vocab, dtype=torch.bool)
            used[ids] = True
            same = torch.equal(left.raw("t2d", self._vocab).bool(), used)
            what = f"t2d of {left.source} marks other target ids than d2t (the identity if absent) leads to."
            _check(same, what, "The two describe one draft vocabulary.", "Rebuild t2d from d2t.")
        return ids

    @torch.no_grad()
    def shared_hidden(self) -> Tensor:
        """The projected h_shared [D]: ``mask_hidden`` after the same norms and ``fc`` as any aux row."""
        return self._combine(self._mask_hidden[None])[0]

    @torch.no_grad()
    def drafts(self, token_ids: Tensor, aux_hidden: Tensor, k: int, mask_token_id: int | None = None) -> OracleDrafts:
        """The K drafts that follow the committed tokens.

        ``token_ids`` [n + 1] int64, n >= 1: all committed tokens, prompt and bonus token included. ``aux_hidden``
        [n, A*H], floating: row p holds the target's concatenated aux hidden states after reading token p. ``k`` >= 1:
        the number of drafts. ``mask_token_id``: None takes the config's; k = 1 needs none.

        Raises ValueError for other shapes or dtypes, hidden states that aren't finite, an id outside the vocabulary,
        k < 1, or an unknown MASK id.
        """
        _check(k >= 1, f"k is {k}.", "A round has at least one draft.", "Pass k >= 1.")
        tokens, aux = self._checked_context(token_ids, aux_hidden)
        mask_id = self.mask_token_id if mask_token_id is None else mask_token_id
        if k > 1:
            known = mask_id is not None and 0 <= mask_id < self._vocab
            why = f"Drafts 2 ... {k} are read at MASK rows, which need an id of the vocabulary of {self._vocab}."
            _check(known, f"The MASK token's id is {mask_id}.", why, "Pass mask_token_id.")
            tokens = torch.cat((tokens, torch.full((k - 1,), mask_id)))
        hidden = torch.cat((self._combine(aux), self.shared_hidden().expand(k - 1, -1)))
        last, _ = self._forward(tokens, hidden, self._positions(len(aux), k), sampled=k)
        logits = F.linear(_rms_norm(last, self._norm, self._eps), self._lm_head)
        top = logits.topk(2, dim=-1).values
        ids = self._target_ids[logits.argmax(-1)].tolist()
        return OracleDrafts(ids=ids, logits=logits, margin=top[:, 0] - top[:, 1])

    @torch.no_grad()
    def layer_kv(self, token_ids: Tensor, aux_hidden: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys (rotated) and values of the n context rows, per layer: ([n, kv_heads, head_dim], the same).

        Row p is the row at position p. Takes and refuses the same context as ``drafts``; no MASK rows are run.
        """
        tokens, aux = self._checked_context(token_ids, aux_hidden)
        return self._forward(tokens, self._combine(aux), self._positions(len(aux), 1), sampled=1)[1]

    def _checked_context(self, token_ids: Tensor, aux_hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Check a context; return each row's token (shifted by one) [n] and its aux hidden states [n, A*H]."""
        tokens, aux = token_ids.detach().cpu(), aux_hidden.detach().cpu()
        fits = tokens.dtype == torch.int64 and tokens.dim() == 1 and len(tokens) >= 2
        what = f"token_ids is {tokens.dtype} {list(tokens.shape)}."
        why = "It holds all committed tokens: at least one of the prompt and the bonus token."
        _check(fits, what, why, "Pass int64 [n + 1] with n >= 1.")
        low, high = int(tokens.min()), int(tokens.max())
        what, why = f"token_ids ranges over {low} ... {high}.", f"The head's embedding has {self._vocab} rows."
        _check(0 <= low and high < self._vocab, what, why, "Pass ids of the target's vocabulary.")
        shape = [len(tokens) - 1, self.aux_width]
        what = f"aux_hidden is {aux.dtype} {list(aux.shape)} for {len(tokens)} tokens."
        why = "Every token but the last, which the target hasn't read yet, has one row."
        fits = list(aux.shape) == shape and aux.is_floating_point()
        _check(fits, what, why, f"Pass floating values of shape {shape}.")
        what, why = "aux_hidden holds NaN or infinite values.", "The drafts would be arbitrary."
        _check(bool(aux.isfinite().all()), what, why, "Look for rows that were never written.")
        return tokens[1:], aux.to(self.dtype)

    def _positions(self, n: int, k: int) -> Tensor:
        """The rows' positions [n + k - 1]: the MASK rows go on counting."""
        return torch.arange(n + k - 1)

    def _combine(self, aux: Tensor) -> Tensor:
        """Project aux rows [T, A*H] to hidden rows [T, D]."""
        if self._input_norm is not None:
            aux = _rms_norm(aux, self._input_norm, self._eps)
        if self._fc_norms:
            parts = zip(aux.chunk(len(self._fc_norms), dim=-1), self._fc_norms, strict=True)
            aux = torch.cat([_rms_norm(part, weight, self._eps) for part, weight in parts], dim=-1)
        return _linear(self._fc, "fc", aux)

    def _forward(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, sampled: int
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Run all layers over T rows.

        Takes each row's token [T], projected hidden state [T, D] and position [T]. Returns the last ``sampled`` rows
        before the final norm [sampled, D], and every layer's keys and values of all rows.
        """
        inverse, factor = self._rope
        # Angles in float64: float32 would lose up to position * 6e-8 radians before the cosine is taken.
        angles = positions[:, None].double() * inverse
        rope = ((angles.cos() * factor).to(self.dtype), (angles.sin() * factor).to(self.dtype))
        x, kv = hidden, []
        for index, layer in enumerate(self._layers):
            residual = x
            if index == 0:
                normed = _rms_norm(x, layer["hidden_norm.weight"], self._eps)
                embedded = _rms_norm(self._embedding[tokens], layer["input_layernorm.weight"], self._eps)
                attended = torch.cat((embedded, normed), dim=-1)
                residual = normed if self._norm_before_residual else x
            else:
                attended = _rms_norm(x, layer["input_layernorm.weight"], self._eps)
            # Nothing reads the last layer's output of rows that aren't sampled.
            first = len(tokens) - sampled if index == len(self._layers) - 1 else 0
            x, keys_values = self._run_layer(layer, attended, residual, rope, first)
            kv.append(keys_values)
        return x, kv

    def _run_layer(
        self, layer: Mapping[str, Tensor], attended: Tensor, residual: Tensor, rope: tuple[Tensor, Tensor], first: int
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Causal attention and MLP of one layer, for the query rows from ``first`` on.

        Takes the normed attention input [T, D] ([T, 2D] in layer 0), the residual [T, D] and (cos, sin), each
        [T, head_dim / 2]. Returns [T - first, D] and the keys and values of all T rows [T, kv_heads, head_dim].
        """
        heads, kv_heads, dim, (cos, sin) = self._heads, self._kv_heads, self._head_dim, rope
        rows, queries, group = len(attended), len(attended) - first, heads // kv_heads
        q = _linear(layer, "self_attn.q_proj", attended[first:]).view(queries, heads, dim)
        k = _linear(layer, "self_attn.k_proj", attended).view(rows, kv_heads, dim)
        v = _linear(layer, "self_attn.v_proj", attended).view(rows, kv_heads, dim)
        if "self_attn.q_norm.weight" in layer:
            q = _rms_norm(q, layer["self_attn.q_norm.weight"], self._eps)
            k = _rms_norm(k, layer["self_attn.k_norm.weight"], self._eps)
        q, k = _rotate(q, cos[first:], sin[first:]), _rotate(k, cos, sin)

        # Query head h reads key/value head h // group; the queries of a group are stacked into one matrix.
        stacked = q.view(queries, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(kv_heads, group * queries, dim)
        scores = (stacked @ k.permute(1, 2, 0) * dim**-0.5).view(kv_heads, group, queries, rows)
        future = torch.ones(queries, rows, dtype=torch.bool).triu(diagonal=first + 1)
        weights = scores.masked_fill(future, -math.inf).softmax(dim=-1).view(kv_heads, group * queries, rows)
        mixed = (weights @ v.transpose(0, 1)).view(kv_heads, group, queries, dim)
        x = residual[first:] + _linear(layer, "self_attn.o_proj", mixed.permute(2, 0, 1, 3).reshape(queries, -1))

        inner = _rms_norm(x, layer["post_attention_layernorm.weight"], self._eps)
        gated = F.silu(_linear(layer, "mlp.gate_proj", inner)) * _linear(layer, "mlp.up_proj", inner)
        return x + _linear(layer, "mlp.down_proj", gated), (k, v)


@torch.no_grad()
def aux_from_transformers(model: Any, token_ids: Tensor, capture_ids: Sequence[int] | None = None) -> Tensor:
    """The target's aux hidden states of one sequence, from a Hugging Face causal LM.

    ``model`` is a ``transformers`` causal LM whose base model can return ``hidden_states``. ``token_ids`` [n] int64:
    the result has a row for every token given, so leave the bonus token out. ``capture_ids``, strictly increasing,
    follow vLLM's convention: id i is the residual stream after i layers, i.e. layer i-1's output and transformers'
    ``hidden_states[i]``; None means [2, L // 2, L - 3] for L layers.

    Returns [n, A*H] in the model's dtype: row p = after reading token p, the captures side by side in the order given.
    Raises ValueError for token_ids of another shape or dtype, and for ids out of range, repeated or out of order.
    """
    single = token_ids.dim() == 1 and token_ids.dtype == torch.int64 and len(token_ids) > 0
    what = f"token_ids is {token_ids.dtype} {list(token_ids.shape)}."
    _check(single, what, "One sequence of token ids is read.", "Pass int64 [n].")
    layers = model.config.get_text_config().num_hidden_layers
    ids = [2, layers // 2, layers - 3] if capture_ids is None else list(capture_ids)
    what = f"Capture id {layers} is the output of the last of {layers} layers."
    why = "transformers returns that one after the final norm, while a head is fed un-normed states."
    _check(layers not in ids, what, why, f"Capture at {layers - 1} or before.")
    what = f"Capture ids {ids} are not strictly increasing within 0 ... {layers - 1}."
    why = "Engines capture in the order of the layers, each layer once, whatever the order of the ids."
    legal = bool(ids) and ids == sorted(set(ids)) and ids[0] >= 0 and ids[-1] < layers
    _check(legal, what, why, "Pass such ids (the default needs a target of at least 7 layers).")
    # The base model leaves out the LM head, whose logits nobody needs here.
    output = model.base_model(input_ids=token_ids[None].to(model.device), output_hidden_states=True, use_cache=False)
    return torch.cat([output.hidden_states[i][0] for i in ids], dim=-1)
