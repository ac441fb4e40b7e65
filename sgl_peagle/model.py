"""The drafter: an N-layer LLaMA-style P-EAGLE head as an SGLang model.

One forward takes the raw aux hidden states of the real rows, projects them, places them (and h_shared) into the
drafter rows, runs the layers, and returns the K drafted token ids of each request. All of it can be captured in one
CUDA graph (:mod:`sgl_peagle.graph`); eager rounds and prefill run the same code.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass
from typing import Any, Iterable, Iterator, Optional

import torch
from sglang.srt.configs.draft_parallel import DraftParallelSpec, DraftTPExecution
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import QKVParallelLinear
from sglang.srt.layers.logits_processor import LogitsMetadata, LogitsProcessor, LogitsProcessorOutput
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.models.llama import LlamaAttention, LlamaMLP
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput
from sglang.srt.utils.common import add_prefix
from torch import nn

from sgl_peagle.errors import PEagleError
from sgl_peagle.heads import Head, PEagleHeadConfig, read_head
from sgl_peagle.heads.formats.peagle import ARCHITECTURE
from sgl_peagle.kernels.hidden import window_hidden

#: Parts of a merged parameter: suffix in the file -> (suffix in the model, shard).
_MERGED = {
    ".q_proj.": (".qkv_proj.", "q"),
    ".k_proj.": (".qkv_proj.", "k"),
    ".v_proj.": (".qkv_proj.", "v"),
    ".gate_proj.": (".gate_up_proj.", 0),
    ".up_proj.": (".gate_up_proj.", 1),
}


def _free_table(module: nn.Module) -> None:
    """Drop a table that the head does not bring: the target's takes its place once both models are loaded."""
    module.weight = nn.Parameter(module.weight.new_empty(0, module.weight.shape[1]), requires_grad=False)


@dataclass
class PEagleDraftExtendInput(EagleDraftExtendInput):
    """Input of one drafter forward.

    ``hidden_states`` holds the target's raw aux hidden states [N, A*H] of the real rows only; ``select_index``
    [bs*k] the sampled rows.

    Attributes:
        hidden_rows: [R] int64, row of ``hidden_states`` for each drafter row, -1 for a mask row.
        logits_buffer: [bs*k, draft vocabulary] float32 to put the logits into, where one is kept (graphs).
    """

    hidden_rows: Optional[torch.Tensor] = None
    logits_buffer: Optional[torch.Tensor] = None


class PEagleAttention(LlamaAttention):
    """LLaMA attention; layer 0 reads [embedding ; hidden], twice as wide; optional q/k norms as in Qwen3."""

    def __init__(self, config: PEagleHeadConfig, hf_config: Any, layer_id: int, quant_config: Any, prefix: str) -> None:
        super().__init__(
            config=hf_config,
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            layer_id=layer_id,
            rope_theta=config.rope.theta,
            rope_scaling=config.rope.host_scaling(),
            max_position_embeddings=config.max_position_embeddings,
            quant_config=quant_config,
            prefix=prefix,
            bias=config.attention_bias,
        )
        if layer_id == 0:
            self.qkv_proj = QKVParallelLinear(
                2 * config.hidden_size,
                self.head_dim,
                self.total_num_heads,
                self.total_num_kv_heads,
                bias=config.attention_bias,
                quant_config=quant_config,
                prefix=add_prefix("qkv_proj", prefix),
            )
        self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps) if config.qk_norm else None

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        forward_batch: ForwardBatch,
        rows: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """As the parent's, [R, D] -> [R, D]; with ``rows`` [N] only the output of those rows, [N, D]."""
        q, k, v = self.forward_prepare_native(positions, hidden_states)
        output = self.attn(q, k, v, forward_batch)
        return self.o_proj(output if rows is None else output[rows])[0]

    def forward_prepare_native(
        self, positions: torch.Tensor, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The parent's, with Qwen3's norms of each query and key head before RoPE."""
        if self.q_norm is None:
            return super().forward_prepare_native(positions, hidden_states)
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q = self.q_norm(q.reshape(-1, self.head_dim)).view(q.shape)
        k = self.k_norm(k.reshape(-1, self.head_dim)).view(k.shape)
        q, k = self.rotary_emb(positions, q, k)
        return q, k, v


class PEagleLayer(nn.Module):
    """One decoder layer. Layer 0 fuses embedding and hidden state; the others are plain."""

    def __init__(self, config: PEagleHeadConfig, hf_config: Any, layer_id: int, quant_config: Any, prefix: str) -> None:
        super().__init__()
        self.is_first = layer_id == 0
        self.norm_before_residual = config.norm_before_residual
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = PEagleAttention(config, hf_config, layer_id, quant_config, add_prefix("self_attn", prefix))
        self.mlp = LlamaMLP(
            width, config.intermediate_size, "silu", quant_config=quant_config, prefix=add_prefix("mlp", prefix)
        )
        self.input_layernorm = RMSNorm(width, eps=eps)
        self.post_attention_layernorm = RMSNorm(width, eps=eps)
        if self.is_first:
            self.hidden_norm = RMSNorm(width, eps=eps)

    def forward(
        self,
        positions: torch.Tensor,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        residual: Optional[torch.Tensor],
        forward_batch: ForwardBatch,
        rows: Optional[torch.Tensor] = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [R], embeds / hidden / residual [R, D] -> (hidden, residual), both [R, D].

        With ``rows`` [N] the results are those rows only, [N, D]: behind the last layer's attention nothing but the
        sampled rows is used, which are at most half of a window and few of a prompt.
        """
        if self.is_first:
            normed = self.hidden_norm(hidden)
            residual = normed if self.norm_before_residual else hidden
            hidden = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(positions, hidden, forward_batch, rows)
        residual = residual if rows is None else residual[rows]
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class PEagleModel(nn.Module):
    """Projection of the aux hidden states, layers, final norm."""

    def __init__(self, head: Head, hf_config: Any, quant_config: Any, prefix: str) -> None:
        super().__init__()
        config = head.config
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, prefix=add_prefix("embed_tokens", prefix)
        )
        if not head.has("embed_tokens.weight"):
            _free_table(self.embed_tokens)
        self.fc = nn.Linear(config.aux_width, config.hidden_size, bias=head.has("fc.bias"))
        eps = config.rms_norm_eps
        self.input_norm = RMSNorm(config.aux_width, eps=eps) if config.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList(RMSNorm(config.target_hidden_size, eps=eps) for _ in range(config.num_aux))
            if config.fc_norm
            else None
        )
        # Compact heads bring the MASK row only; the table is the target's, which they must not change.
        self.embed_mask_row = (
            nn.Parameter(torch.empty(config.hidden_size), requires_grad=False) if config.embed_from_target else None
        )
        # Raw, as in the file: it goes through the same projection as any aux hidden state, once, after loading.
        self.mask_hidden = nn.Parameter(torch.empty(config.aux_width), requires_grad=False)
        self.layers = nn.ModuleList(
            PEagleLayer(config, hf_config, i, quant_config, add_prefix(f"layers.{i}", prefix))
            for i in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=eps)

    def embed(self, input_ids: torch.Tensor, mask_token_id: int) -> torch.Tensor:
        """[R] ids -> [R, D] embeddings."""
        embeds = self.embed_tokens(input_ids)
        if self.embed_mask_row is None:
            return embeds
        is_mask = (input_ids == mask_token_id).unsqueeze(-1)
        return torch.where(is_mask, self.embed_mask_row.to(embeds.dtype), embeds)

    def project(self, aux_hidden: torch.Tensor) -> torch.Tensor:
        """[N, A*H] raw aux hidden states -> [N, D]."""
        if self.input_norm is not None:
            aux_hidden = self.input_norm(aux_hidden.contiguous())
        if self.fc_norm is not None:
            chunks = aux_hidden.chunk(len(self.fc_norm), dim=-1)
            aux_hidden = torch.cat([norm(c.contiguous()) for norm, c in zip(self.fc_norm, chunks)], dim=-1)
        return self.fc(aux_hidden)


class PEagleLlamaForCausalLM(nn.Module):
    """A P-EAGLE head in SGLang.

    Args:
        config: The head's Hugging Face config as :mod:`sgl_peagle.draft_config` prepares it.
        quant_config: SGLang's quantization, or None.
        prefix: Name prefix for quantization tables.
    """

    draft_parallel_spec = DraftParallelSpec(tp_execution=DraftTPExecution.SINGLE_GROUP)

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        self.config = config
        self.head = read_head(config.peagle_head_path)
        self.model = PEagleModel(self.head, config, quant_config, add_prefix("model", prefix))
        draft_vocab = self.head.config.draft_vocab_size
        self.lm_head = ParallelLMHead(
            draft_vocab, self.head.config.hidden_size, quant_config=quant_config, prefix=add_prefix("lm_head", prefix)
        )
        if not self.head.has("lm_head.weight"):
            _free_table(self.lm_head)
        logits_config = copy.deepcopy(config)
        logits_config.vocab_size = draft_vocab
        self.logits_processor = LogitsProcessor(logits_config)
        # Draft id -> target id; None is the identity. SGLang's workers read this name.
        self.hot_token_id: Optional[torch.Tensor] = None
        self.shared_hidden: Optional[torch.Tensor] = None
        self.weights_loaded = False
        self._captured_input: Optional[PEagleDraftExtendInput] = None

    @contextlib.contextmanager
    def capturing(self, inputs: PEagleDraftExtendInput) -> Iterator[None]:
        """Take the forward's own inputs from ``inputs`` (static buffers) while a graph is captured.

        SGLang's graph runner builds the batch that is captured, and its ``spec_info`` is of SGLang's own type, which
        has no place for them.
        """
        self._captured_input = inputs
        try:
            yield
        finally:
            self._captured_input = None

    @torch.no_grad()
    def project_shared_hidden(self) -> None:
        """Compute h_shared [D] from the loaded ``mask_hidden``; needed once after (re)loading weights."""
        shared = self.model.project(self.model.mask_hidden.unsqueeze(0))[0]
        if self.shared_hidden is None:
            self.shared_hidden = shared
        else:
            self.shared_hidden.copy_(shared)  # a captured graph keeps the address

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch, **_: Any
    ) -> LogitsProcessorOutput:
        """The next K draft tokens of every request.

        Args:
            input_ids: [R] int64.
            positions: [R] int64.
            forward_batch: Its ``spec_info`` is a :class:`PEagleDraftExtendInput`.

        Returns:
            ``next_token_logits``: not logits, but the [bs, k] int64 target ids drafted from them (greedy, d2t
            applied), so that a captured graph holds the whole drafter pass. ``hidden_states`` is the same tensor,
            because SGLang's graph runner hands out a copy of that one, which the next replay leaves alone.
        """
        spec_info: PEagleDraftExtendInput = self._captured_input or forward_batch.spec_info
        embeds = self.model.embed(input_ids, self.head.config.mask_token_id)
        projected = self.model.project(spec_info.hidden_states)
        hidden = window_hidden(projected, spec_info.hidden_rows, self.shared_hidden)
        residual: Optional[torch.Tensor] = None
        *layers, last = self.model.layers
        for layer in layers:
            hidden, residual = layer(positions, embeds, hidden, residual, forward_batch)
        hidden, residual = last(positions, embeds, hidden, residual, forward_batch, spec_info.select_index)
        hidden, _residual = self.model.norm(hidden, residual)
        metadata = LogitsMetadata.from_forward_batch(forward_batch)
        metadata.draft_extend_select_index = None  # the rows are chosen already, before the final norm
        metadata.next_token_logits_buffer = spec_info.logits_buffer  # SGLang's own has one row a request
        metadata.capture_hidden_mode = CaptureHiddenMode.NULL
        logits = self.logits_processor(input_ids, hidden, self.lm_head, metadata).next_token_logits
        tokens = self._draft_tokens(logits).view(forward_batch.batch_size, -1)
        return LogitsProcessorOutput(next_token_logits=tokens, hidden_states=tokens)

    def _draft_tokens(self, logits: torch.Tensor) -> torch.Tensor:
        """Greedy drafts: [N, draft vocabulary] logits -> [N] int64 target ids (d2t applied)."""
        ids = logits.argmax(dim=-1)
        return ids if self.hot_token_id is None else self.hot_token_id[ids]

    # -- weights ------------------------------------------------------------------------------------------

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load every tensor of the head; the target's embedding and LM head are attached by the worker.

        Raises:
            PEagleError: A tensor without a parameter, or a parameter without a tensor.
        """
        params = dict(self.named_parameters())
        pending = set(self.head.tensors)
        for name, tensor in weights:
            canonical = self.head.canonical(name)
            if canonical not in pending:
                raise PEagleError(
                    f"{self.head.folder}: unexpected tensor {name} while loading",
                    "it was not in the files when the head was checked, or comes twice",
                    "restart the server once the head's files are complete",
                )
            pending.discard(canonical)
            self._load(canonical, tensor, params)
        if pending:
            raise PEagleError(
                f"{self.head.folder}: {', '.join(sorted(pending))} not delivered by SGLang's loader",
                "every tensor of the head must be loaded",
                "check --speculative-draft-load-format (auto or safetensors)",
            )
        self.weights_loaded = True

    def _load(self, canonical: str, tensor: torch.Tensor, params: dict[str, nn.Parameter]) -> None:
        if canonical == "t2d":
            return  # follows from d2t
        if canonical == "d2t":
            self._load_draft_vocabulary(tensor)
            return
        if canonical == "mask_hidden":
            tensor = tensor.reshape(-1)
        name = canonical if canonical.startswith("lm_head.") else f"model.{canonical}"
        for part, (merged, shard) in _MERGED.items():
            if part in name:
                param = params[name.replace(part, merged)]
                param.weight_loader(param, tensor, shard)
                return
        param = params[name]
        getattr(param, "weight_loader", default_weight_loader)(param, tensor)

    def _load_draft_vocabulary(self, d2t: torch.Tensor) -> None:
        ids = d2t.long() + torch.arange(d2t.shape[0], device=d2t.device)
        vocab = self.head.config.vocab_size
        if int(ids.min()) < 0 or int(ids.max()) >= vocab or ids.unique().numel() != ids.numel():
            raise PEagleError(
                f"{self.head.folder}: d2t does not map to distinct target ids below {vocab}",
                "d2t holds offsets (target id - draft id); ids or a foreign map would draft wrong tokens",
                "use the d2t that belongs to this head",
            )
        identity = torch.equal(ids, torch.arange(vocab, device=ids.device))
        self.hot_token_id = None if identity else ids

    def attach_target(self, embed: torch.Tensor, lm_head: torch.Tensor) -> None:
        """Use the target's embedding and LM head where the head has none of its own.

        Args:
            embed: [vocabulary shard, D] the target's embedding.
            lm_head: [vocabulary shard, D] the target's LM head.
        """
        if not self.head.has("embed_tokens.weight"):
            self.model.embed_tokens.weight = nn.Parameter(embed, requires_grad=False)
        if not self.head.has("lm_head.weight"):
            self.lm_head.weight = nn.Parameter(lm_head, requires_grad=False)

    def get_embed_and_head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The drafter's own view of embedding and LM head (SGLang's weight-update tools read it)."""
        return self.model.embed_tokens.weight, self.lm_head.weight


def register_model() -> None:
    """Make SGLang find the drafter class under its architecture name (idempotent)."""
    from sglang.srt.models.registry import ModelRegistry

    ModelRegistry.models[ARCHITECTURE] = PEagleLlamaForCausalLM
