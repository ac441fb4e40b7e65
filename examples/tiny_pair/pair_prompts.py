"""Held-out prompts: 64 strings of 1 to 60 tokens, cut from text made with another seed."""

from __future__ import annotations

from make_text import TextMaker
from transformers import PreTrainedTokenizerFast

SHORT = [1, 1, 1, 1, 2, 2, 3, 4, 6, 8]  # tokens; too short to be unseen
LONG = [12, 14, 16, 18, 20, 24, 28, 32, 40, 48, 56, 60] * 3 + [20, 30, 40, 50]  # checked to be unseen
SHARED = [24, 32, 40, 48, 56]  # cuts of one text: each is a prefix of the next
FORKS = 5  # texts that share a long prefix and then differ
FORK_PREFIX, FORK_TAIL = 36, 12


def held_out_prompts(tokenizer: PreTrainedTokenizerFast, training_text: str,
                     seed: str = "held-out") -> tuple[list[str], int]:
    """(prompts, how many of them, from the end, do not occur in the training text)."""
    maker = TextMaker(seed)

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def stable(ids: list[int]) -> str | None:
        """The string of ``ids``, if it encodes back to the very same ids."""
        text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return text if encode(text) == ids else None

    def fresh(length: int, unseen: bool) -> str:
        for _ in range(2000):
            ids = encode(maker.stream(4))
            text = stable(ids[:length]) if len(ids) >= length else None
            if text is not None and text not in prompts and not (unseen and text in training_text):
                return text
        raise RuntimeError(f"no held-out prompt of {length} tokens found")

    prompts: list[str] = []
    for length in SHORT:
        prompts.append(fresh(length, unseen=False))
    for length in LONG:
        prompts.append(fresh(length, unseen=True))
    while True:
        ids = encode(maker.stream(4))
        cuts = [stable(ids[:length]) for length in SHARED]
        if None not in cuts and cuts[0] not in training_text:  # type: ignore[operator]
            prompts += [cut for cut in cuts if cut is not None]
            break
    while True:
        prefix = encode(maker.stream(4))[:FORK_PREFIX]
        text = stable(prefix)
        if text is None or text in training_text:
            continue
        forks: list[str] = []
        for _ in range(200):
            fork = stable(prefix + encode(maker.stream(1))[:FORK_TAIL])
            if fork is not None and fork not in forks:
                forks.append(fork)
            if len(forks) == FORKS:
                break
        if len(forks) == FORKS:
            prompts += forks
            break
    # One prompt each of: nothing but BOS, a bare letter, an opened chat turn, text of unknown words.
    extras = ["<|bos|>", "D", "<|user|>Where does", "xyzzy & Co. über 42"]
    return extras + prompts, len(prompts) - len(SHORT)
