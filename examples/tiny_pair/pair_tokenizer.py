"""The pair's tokenizer: byte-level BPE with exactly 512 ids, so any string can be encoded."""

from __future__ import annotations

import json
from pathlib import Path

from make_text import ASSISTANT, BOS, EOS, MASK, PAD, SPECIALS, USER
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 512
PAD_ID, BOS_ID, EOS_ID, MASK_ID = (SPECIALS.index(token) for token in (PAD, BOS, EOS, MASK))

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}" + ASSISTANT + "{{ message['content'] }}" + EOS
    + "{% else %}" + USER + "{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}" + ASSISTANT + "{% endif %}"
)


def build_tokenizer(text: list[str]) -> PreTrainedTokenizerFast:
    """Learn the merges from ``text`` (one document an entry). BOS is never added on its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),  # digits stay single: sums are learnable that way
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(text, trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=SPECIALS, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"the text gives {tokenizer.get_vocab_size()} ids, not {VOCAB_SIZE}: use more text")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS,
        additional_special_tokens=[MASK, USER, ASSISTANT], chat_template=CHAT_TEMPLATE,
        model_max_length=2048, clean_up_tokenization_spaces=False)


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the tokenizer; the config is written out by hand, so that every transformers release can read it."""
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)  # one place for the template: the config
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": tokenizer.model_max_length,
        "pad_token": PAD, "bos_token": BOS, "eos_token": EOS,
        "additional_special_tokens": [MASK, USER, ASSISTANT], "add_bos_token": False,
        "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
