"""Make the golden vectors: tiny heads saved by the speculators package, and the logits of its own P-EAGLE model.

Run once, in an environment with ``speculators`` (0.9.0 was used); nothing else needs the package::

    python tests/golden/make_speculators_golden.py tests/golden

Each folder holds a head exactly as ``save_pretrained`` wrote it; NAME.safetensors beside it has input_ids [T],
hidden_states [T, A*H], anchors [N], depths [N], logits [N, draft vocabulary]. Row (anchor a, depth d) predicts draft
d + 1 after a context of the first a + 1 rows: that is what drafting computes when a is the bonus row. Down-sampling is
off, so every anchor has all depths. Position 0 is left out of the loss mask: the package would give it anchor -1.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.peagle import core
from speculators.models.peagle.config import PEagleSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

DEPTHS, LENGTH, VOCAB, WIDTH = 5, 12, 96, 32

LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip

CASES = {
    "llama": (LlamaConfig, {}, {}),
    "llama_five_aux_fc_norm": (LlamaConfig, {}, {"fc_norm": True, "eagle_aux_hidden_state_layer_ids": [1, 2, 4, 5, 7]}),
    "llama_everything": (
        LlamaConfig,
        {"attention_bias": True, "rope_parameters": LLAMA3},
        {"norm_before_fc": True, "norm_before_residual": True, "draft_vocab_size": 40},
    ),
    "qwen3": (Qwen3Config, {}, {"draft_vocab_size": 40}),
}


def make(folder: Path, decoder_class: type, decoder: dict, options: dict) -> None:
    torch.manual_seed(0)
    transformer = decoder_class(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, tie_word_embeddings=False, **decoder,
    )  # fmt: skip
    transformer._attn_implementation = "eager"
    proposal = GreedyTokenProposalConfig(speculative_tokens=DEPTHS)
    config = PEagleSpeculatorConfig(
        transformer_layer_config=transformer,
        mask_token_id=7,
        speculators_config=SpeculatorsConfig(
            algorithm="peagle",
            proposal_methods=[proposal],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **({"eagle_aux_hidden_state_layer_ids": [2, 4, 5], "draft_vocab_size": VOCAB} | options),
    )
    model = core.PEagleDraftModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * (1.0 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5))
        if model.t2d is not None:
            kept = torch.randperm(VOCAB)[: config.draft_vocab_size].sort().values
            model.d2t.copy_(kept - torch.arange(config.draft_vocab_size))
            model.t2d.zero_()
            model.t2d[kept] = True
    model.save_pretrained(folder)

    width = model.mask_hidden.shape[-1]
    ids, hidden = torch.randint(VOCAB, (1, LENGTH)), torch.randn(1, LENGTH, width)
    loss_mask = torch.ones(1, LENGTH)
    loss_mask[0, 0] = 0
    seen: dict[str, torch.Tensor] = {}
    sample = core.generate_cod_sample_indices

    def recorded(**kwargs: object) -> tuple[torch.Tensor, torch.Tensor]:
        seen["anchors"], seen["depths"] = sample(**kwargs)
        return seen["anchors"], seen["depths"]

    hook = model.lm_head.register_forward_hook(lambda _m, _i, out: seen.update(logits=out[0].clone()))
    # The verifier and the loss are of no interest here.
    with torch.no_grad(), mock.patch.object(core, "generate_cod_sample_indices", recorded), \
            mock.patch.object(core, "compute_metrics", lambda **_: (None, None)):  # fmt: skip
        model(
            hidden_states=hidden, input_ids=ids, document_ids=torch.zeros(1, LENGTH, dtype=torch.long),
            loss_mask=loss_mask, verifier_last_hidden_states=torch.zeros(1, LENGTH, WIDTH), loss_config=None,
            num_depths=DEPTHS, down_sample_ratio=1.0, down_sample_ratio_min=1.0,
        )  # fmt: skip
    hook.remove()
    golden = {"input_ids": ids[0], "hidden_states": hidden[0], **seen}
    save_file({name: tensor.contiguous() for name, tensor in golden.items()}, folder / "golden.safetensors")
    # The reader takes every *.safetensors of a folder as weights, so the vectors stand beside it.
    (folder / "golden.safetensors").rename(folder.with_suffix(".safetensors"))
    (folder / "config.py").unlink(missing_ok=True)  # the package's own code, which nobody may run


if __name__ == "__main__":
    for name, (decoder_class, decoder, options) in CASES.items():
        make(Path(sys.argv[1]) / name, decoder_class, decoder, options)
