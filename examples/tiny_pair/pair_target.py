"""The target: an 8-layer Llama of 1.3 M parameters, trained from scratch on the made-up text."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from pair_tokenizer import BOS_ID, EOS_ID, MASK_ID, PAD_ID, VOCAB_SIZE
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

AUX_LAYERS = [2, 4, 5]  # [2, L // 2, L - 3] for L = 8: hidden_states[i], the output of layer i - 1
ROPE_THETA = 10_000.0
TOKENS_PER_STEP = 2048
SHORT_WINDOW, LONG_WINDOW = 256, 1024


def target_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=128, intermediate_size=256, num_hidden_layers=8, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=2048, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA}, tie_word_embeddings=False,
        initializer_range=0.05, attention_bias=False, mlp_bias=False,
        bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID)


class Windows:
    """Random windows of a token stream; three of four start at a document, half of those after a BOS."""

    def __init__(self, stream: torch.Tensor, seed: int) -> None:
        self.stream = stream
        self.generator = torch.Generator().manual_seed(seed)
        self.starts = torch.cat([torch.zeros(1, dtype=torch.long), (stream == EOS_ID).nonzero()[:, 0] + 1])

    def batch(self, rows: int, length: int) -> torch.Tensor:
        """[rows, length] token ids."""
        out = []
        last = len(self.stream) - length
        starts = self.starts[self.starts < last]
        for _ in range(rows):
            kind = int(torch.randint(8, (1,), generator=self.generator))
            if kind < 6:
                start = int(starts[torch.randint(len(starts), (1,), generator=self.generator)])
            else:
                start = int(torch.randint(last, (1,), generator=self.generator))
            window = self.stream[start:start + length]
            if kind < 3:
                window = torch.cat([torch.tensor([BOS_ID]), window[:-1]])
            out.append(window)
        return torch.stack(out)


def schedule(step: int, steps: int, warmup: int = 60) -> float:
    """Linear warm-up, then a cosine down to 2 %."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def train_target(windows: Windows, steps: int, seed: int, learning_rate: float = 4e-3) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(target_config())
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    progress = tqdm(range(steps), desc="target", mininterval=5.0)
    smooth = 0.0
    for step in progress:
        # The last seventh sees long windows, so that contexts beyond the short ones are not new to it.
        length = SHORT_WINDOW if step < steps * 6 / 7 else LONG_WINDOW
        tokens = windows.batch(TOKENS_PER_STEP // length, length)
        assert not (tokens == MASK_ID).any(), "the MASK id must not occur in the text"
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * schedule(step, steps)
        optimizer.step()
        smooth = loss.item() if step == 0 else 0.98 * smooth + 0.02 * loss.item()
        progress.set_postfix(loss=f"{smooth:.3f}", refresh=False)
    return model.eval()


def save_target(model: LlamaForCausalLM, folder: Path) -> None:
    """Weights in bf16; the config also carries the spellings that older readers look for."""
    model = model.to(torch.bfloat16)
    model.generation_config.do_sample = False
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.update(dtype="bfloat16", torch_dtype="bfloat16", rope_theta=ROPE_THETA)
    path.write_text(json.dumps(dict(sorted(config.items())), indent=2) + "\n")


def load_target(folder: Path) -> LlamaForCausalLM:
    """The saved (bf16-rounded) weights, in float32."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)


@torch.no_grad()
def read(model: LlamaForCausalLM, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(aux hidden states [B, n, 3·D], logits [B, n, V]) of the frozen target over ``tokens``."""
    output = model(input_ids=tokens, use_cache=False, output_hidden_states=True)
    return torch.cat([output.hidden_states[i] for i in AUX_LAYERS], dim=-1), output.logits


@torch.no_grad()
def continue_text(model: LlamaForCausalLM, tokens: torch.Tensor, new: int, temperature: float = 0.0,
                  generator: torch.Generator | None = None) -> torch.Tensor:
    """``tokens`` [B, n] with ``new`` tokens appended, greedy or sampled; EOS does not stop it."""
    cache, step = None, tokens
    for _ in range(new):
        output = model(input_ids=step, past_key_values=cache, use_cache=True)
        cache, logits = output.past_key_values, output.logits[:, -1]
        if temperature > 0:
            step = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        else:
            step = logits.argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, step], dim=1)
    return tokens
