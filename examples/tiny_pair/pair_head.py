"""The P-EAGLE head in plain torch: model, training layout, loss and export.

A row is (token, hidden, position). Depth-0 rows pair token p+1 with the target's hidden states of position p;
mask rows (depth d >= 1 of anchor a, position a + d) carry the MASK token and the learned ``mask_hidden``.
Every row at position p predicts token p+2.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from pair_target import AUX_LAYERS, LONG_WINDOW, ROPE_THETA, SHORT_WINDOW, Windows, read, schedule, target_config
from pair_tokenizer import BOS_ID, EOS_ID, MASK_ID, PAD_ID
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm
from transformers import LlamaForCausalLM

K_TRAIN = 8
LAYERS = 2
TOKENS_PER_STEP = 1024


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """RoPE with the halves convention of Llama. ``x`` [B, heads, R, d], ``positions`` [R]."""
    half = x.shape[-1] // 2
    inverse = ROPE_THETA ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = positions.float()[:, None] * inverse
    cos, sin = angle.cos(), angle.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self, width_in: int, width: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_proj = nn.Linear(width_in, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width_in, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width_in, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, width, bias=False)

    def forward(self, x: Tensor, positions: Tensor, allowed: Tensor) -> Tensor:
        b, r, _ = x.shape
        q = self.q_proj(x).view(b, r, self.heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(b, r, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(b, r, self.kv_heads, self.head_dim).transpose(1, 2)
        group = self.heads // self.kv_heads
        k, v = (t.repeat_interleave(group, dim=1) for t in (rotate(k, positions), v))
        out = F.scaled_dot_product_attention(rotate(q, positions), k, v, attn_mask=allowed)
        return self.o_proj(out.transpose(1, 2).reshape(b, r, -1))


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """``first``: attention reads [norm(embedding); norm(hidden)]; the residual is the un-normed hidden."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        c = target_config()
        d, eps = c.hidden_size, c.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(d, eps=eps)
        if first:
            self.hidden_norm = nn.RMSNorm(d, eps=eps)
        self.self_attn = Attention(2 * d if first else d, d, c.num_attention_heads, c.num_key_value_heads, c.head_dim)
        self.post_attention_layernorm = nn.RMSNorm(d, eps=eps)
        self.mlp = Mlp(d, c.intermediate_size)

    def forward(self, x: Tensor, embedding: Tensor | None, positions: Tensor, allowed: Tensor) -> Tensor:
        if embedding is None:
            read_from = self.input_layernorm(x)
        else:
            read_from = torch.cat([self.input_layernorm(embedding), self.hidden_norm(x)], dim=-1)
        x = x + self.self_attn(read_from, positions, allowed)
        return x + self.mlp(self.post_attention_layernorm(x))


class PEagleHead(nn.Module):
    """Module names are the tensor names of the file."""

    def __init__(self) -> None:
        super().__init__()
        c = target_config()
        d = c.hidden_size
        self.embed_tokens = nn.Embedding(c.vocab_size, d)  # no padding_idx: it would freeze a row
        self.fc = nn.Linear(len(AUX_LAYERS) * d, d, bias=False)
        self.midlayer = Layer(first=True)
        self.layers = nn.ModuleDict({str(i): Layer(first=False) for i in range(1, LAYERS)})
        self.norm = nn.RMSNorm(d, eps=c.rms_norm_eps)
        self.lm_head = nn.Linear(d, c.vocab_size, bias=False)
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, len(AUX_LAYERS) * d))

    def start_from(self, target: LlamaForCausalLM, aux_scale: float, generator: torch.Generator) -> None:
        """The target's embedding and LM head, small random layers, a loud MASK row and ``mask_hidden``.

        ``mask_hidden`` starts at the scale of the real aux states that it stands in for. Started at unit scale it
        is about an eighth of them once projected, a whisper in the residual stream that the net hardly needs.
        """
        for parameter in self.parameters():
            if parameter.dim() == 2:
                parameter.data.normal_(0, 0.05, generator=generator)
        self.embed_tokens.weight.data.copy_(target.model.embed_tokens.weight)
        self.lm_head.weight.data.copy_(target.lm_head.weight)
        self.embed_tokens.weight.data[MASK_ID].normal_(0, 1, generator=generator)
        self.mask_hidden.data.normal_(0, aux_scale, generator=generator)

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, allowed: Tensor) -> Tensor:
        """Logits [B, R, V] of ``tokens`` [B, R], projected ``hidden`` [B, R, D], ``positions`` [R].

        ``allowed`` [R, R]: who (row) may see whom (column).
        """
        return self.run(self.embed_tokens(tokens), hidden, positions, allowed)

    def run(self, embedded: Tensor, hidden: Tensor, positions: Tensor, allowed: Tensor) -> Tensor:
        """The same from the rows' embeddings [B, R, D]."""
        x = self.midlayer(hidden, embedded, positions, allowed)
        for layer in self.layers.values():
            x = layer(x, None, positions, allowed)
        return self.lm_head(self.norm(x))


def training_layout(n: int, anchors: Tensor, depths: int) -> tuple[Tensor, Tensor, Tensor]:
    """(anchor, depth) of every row and who may see whom: n depth-0 rows, then the anchors' rollouts by depth.

    A row sees the real context up to its anchor and its own rollout up to itself.
    """
    anchor = torch.cat([torch.arange(n), anchors.repeat(depths - 1)])
    depth = torch.cat([torch.zeros(n, dtype=torch.long),
                       torch.arange(1, depths).repeat_interleave(len(anchors))])
    qa, qd, ka, kd = anchor[:, None], depth[:, None], anchor[None], depth[None]
    return anchor, depth, ((kd == 0) & (ka <= qa)) | ((ka == qa) & (kd <= qd))


def rollout_logits(head: PEagleHead, tokens: Tensor, aux: Tensor, anchors: Tensor,
                   depths: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [B, R, V], and the rows' positions and depths, for ``tokens`` [B, n+1] and ``aux`` [B, n, 3·D]."""
    batch, n = aux.shape[:2]
    anchor, depth, allowed = training_layout(n, anchors, depths)
    position = anchor + depth
    masks = len(position) - n
    fed = torch.cat([tokens[:, 1:], torch.full((batch, masks), MASK_ID)], dim=1)
    hidden = torch.cat([head.fc(aux), head.fc(head.mask_hidden).expand(batch, masks, -1)], dim=1)
    return head(fed, hidden, position, allowed), position, depth


def draft_logits(head: PEagleHead, tokens: Tensor, aux: Tensor, k: int) -> Tensor:
    """Logits [K, V] of one round, as an engine forms them: all real rows, K - 1 mask rows, plain causal attention.

    ``tokens`` [n+1] ends with the bonus token, ``aux`` [n, 3·D].
    """
    n = len(aux)
    fed = torch.cat([tokens[1:], torch.full((k - 1,), MASK_ID)])
    hidden = torch.cat([head.fc(aux), head.fc(head.mask_hidden)[0].expand(k - 1, -1)])
    rows = n + k - 1
    causal = torch.ones(rows, rows, dtype=torch.bool).tril()
    return head(fed[None], hidden[None], torch.arange(rows), causal)[0, n - 1:]


@torch.no_grad()
def check_layout(head: PEagleHead, target: LlamaForCausalLM, tokens: Tensor) -> float:
    """Largest difference between the training layout's logits and the engine's row list for the same anchors."""
    aux, _ = read(target, tokens[None, :-1])
    n = aux.shape[1]
    anchors = torch.arange(0, n - K_TRAIN + 1, 5)
    logits, position, depth = rollout_logits(head, tokens[None], aux, anchors, K_TRAIN)
    worst = 0.0
    for anchor in anchors.tolist():
        want = draft_logits(head, tokens[:anchor + 2], aux[0, :anchor + 1], K_TRAIN)
        rows = [anchor] + [n + (d - 1) * len(anchors) + anchor // 5 for d in range(1, K_TRAIN)]
        worst = max(worst, (logits[0, rows] - want).abs().max().item())
    return worst


def train_head(target: LlamaForCausalLM, sources: Iterable[Windows], steps: int, seed: int,
               learning_rate: float = 3e-3) -> PEagleHead:
    """Soft KL to the target's distribution over all depth-0 rows and random anchors' full rollouts.

    ``sources`` take turns, step by step. Sampling anchors instead of rows keeps every rollout gap-free.
    """
    generator = torch.Generator().manual_seed(seed)
    turns = list(sources)
    first = turns[0].batch(4, 65)
    head = PEagleHead()
    head.start_from(target, read(target, first)[0].pow(2).mean().sqrt().item(), generator)
    optimizer = torch.optim.AdamW(head.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    difference = check_layout(head, target, first[0])
    assert difference < 1e-3, f"training layout and engine rows disagree by {difference}"
    progress = tqdm(range(steps), desc="head", mininterval=5.0)
    smooth = 0.0
    for step in progress:
        # Each eighth step, alternating between the sources, is long: the head must know far contexts as well.
        length = LONG_WINDOW if step % 16 in (6, 15) else SHORT_WINDOW
        rows = TOKENS_PER_STEP // length
        tokens = turns[step % len(turns)].batch(rows, length + 1)
        aux, logits = read(target, tokens)
        anchors = torch.randperm(length - K_TRAIN + 1, generator=generator)[:length // 4].sort().values
        out, position, _ = rollout_logits(head, tokens, aux[:, :-1], anchors, K_TRAIN)
        teacher = logits[:, position + 1].log_softmax(-1)
        loss = F.kl_div(out.log_softmax(-1), teacher, log_target=True, reduction="sum") / (rows * len(position))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * schedule(step, steps)
        optimizer.step()
        smooth = loss.item() if step == 0 else 0.98 * smooth + 0.02 * loss.item()
        progress.set_postfix(kl=f"{smooth:.3f}", refresh=False)
    return head.eval().requires_grad_(False)


def head_config() -> dict[str, Any]:
    c = target_config()
    return {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": LAYERS,
        "hidden_size": c.hidden_size, "intermediate_size": c.intermediate_size, "head_dim": c.head_dim,
        "num_attention_heads": c.num_attention_heads, "num_key_value_heads": c.num_key_value_heads,
        "hidden_act": "silu", "rms_norm_eps": c.rms_norm_eps, "attention_bias": False, "mlp_bias": False,
        "rope_theta": ROPE_THETA, "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "max_position_embeddings": c.max_position_embeddings, "initializer_range": c.initializer_range,
        "vocab_size": c.vocab_size, "draft_vocab_size": c.vocab_size, "target_hidden_size": c.hidden_size,
        "tie_word_embeddings": False, "dtype": "bfloat16", "torch_dtype": "bfloat16",
        "bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID,
        "mask_token_id": MASK_ID, "ptd_token_id": MASK_ID, "pard_token": MASK_ID, "parallel_drafting": True,
        "eagle_aux_hidden_state_layer_ids": AUX_LAYERS, "num_depths": K_TRAIN,
        "norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False,
    }


def save_head(head: PEagleHead, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().to(torch.bfloat16).contiguous() for name, value in head.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    (folder / "config.json").write_text(json.dumps(head_config(), indent=2) + "\n")


def load_head(folder: Path) -> PEagleHead:
    """The saved (bf16-rounded) weights, in float32; every tensor is consumed and every parameter set."""
    head = PEagleHead()
    head.load_state_dict({k: v.float() for k, v in load_file(folder / "model.safetensors").items()}, strict=True)
    return head.eval().requires_grad_(False)
