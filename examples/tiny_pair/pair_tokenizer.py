"""The pair's tokenizer: byte-level BPE with exactly 512 ids, so any string can be encoded."""

from __future__ import annotations

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
    tokenizer.save_pretrained(folder)
    template = folder / "chat_template.jinja"  # newer transformers write it beside the config; keep one file
    if template.exists():
        import json

        path = folder / "tokenizer_config.json"
        config = json.loads(path.read_text())
        config["chat_template"] = template.read_text()
        path.write_text(json.dumps(config, indent=2) + "\n")
        template.unlink()
