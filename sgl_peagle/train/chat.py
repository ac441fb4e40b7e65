"""A target's chat template as token ids: where turns begin and end, so that generated ids are never re-tokenised."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Iterable, Sequence

from sgl_peagle.errors import PEagleError

_USER, _REPLY, _NEXT = "FirstUserText", "FirstReplyText", "SecondUserText"


class ChatFormat:
    """The pieces that a chat template puts around turns.

    Attributes:
        tokenizer: The target's tokenizer.
        eos: Ids that end the target's turn.
        opening: Ids up to the opened first user turn (default system turn included).
        user_ends: Ids that end a *sampled* user turn.
        special_ids, special_texts: The tokenizer's special tokens.
    """

    def __init__(self, tokenizer: Any, eos: Iterable[int], name: str = "the target") -> None:
        self.tokenizer, self.eos = tokenizer, frozenset(eos)
        self._prompts: dict[str, list[int]] = {}  # most prompts are answered twice
        if not getattr(tokenizer, "chat_template", None):
            raise PEagleError(
                f"{name} has no chat template",
                "a head trained on untemplated text accepts far less when it is served with a template",
                "use an instruct model, or add chat_template to its tokenizer_config.json",
            )
        added = tokenizer.added_tokens_decoder
        self.special_ids = frozenset(added)
        self.special_texts = tuple(str(token) for token in added.values() if len(str(token)) > 2)
        turns = [{"role": "user", "content": _USER}, {"role": "assistant", "content": _REPLY}]
        text = self._render([*turns, {"role": "user", "content": _NEXT}])
        parts = [text.partition(_USER), text.partition(_REPLY), text.partition(_NEXT)]
        between, self._header = parts[1][2].partition(_NEXT)[0], parts[2][2]
        self.opening = self._encode(parts[0][0])
        ids = self._encode(between)
        if not all(part[1] for part in parts) or not ids or ids[0] not in self.eos:
            raise PEagleError(
                f"{name}: its chat template does not close an assistant turn with an end token (ids {sorted(self.eos)})",
                "the end of a turn is what the target generates last, and is trained on",
                "check eos_token_id in generation_config.json and the chat template",
            )
        self._between = between
        header = self._encode(self._header)
        self.user_ends = self.eos | ({header[0]} if header else set())

    @classmethod
    def of(cls, target: Path) -> "ChatFormat":
        """The format of a target folder.

        Raises:
            PEagleError: The target has no tokenizer, no chat template, or no end-of-turn id.
        """
        from transformers import AutoConfig, AutoTokenizer, GenerationConfig

        try:
            tokenizer = AutoTokenizer.from_pretrained(target)
            eos = [AutoConfig.from_pretrained(target).eos_token_id, tokenizer.eos_token_id]
        except (OSError, ValueError) as error:
            raise PEagleError(f"{target}: {error}", "the target is read from there", "give a model folder") from error
        if (Path(target) / "generation_config.json").is_file():
            eos.append(GenerationConfig.from_pretrained(target).eos_token_id)
        flat = {i for entry in eos for i in (entry if isinstance(entry, list) else [entry]) if i is not None}
        return cls(tokenizer, flat, str(target))

    def _render(self, messages: Sequence[dict[str, str]]) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Ids of a conversation that ends with a user turn, the opened reply included."""
        text = self._render(messages)
        if text not in self._prompts:
            self._prompts[text] = self._encode(text)
        return list(self._prompts[text])

    def opened_user(self, beginning: str = "") -> list[int]:
        """Ids up to a user turn that the target is to continue."""
        return self.opening + self._encode(beginning)

    def reopened_user(self) -> list[int]:
        """Ids between a finished reply (its end token included there) and the next user turn."""
        return self._encode(self._between)[1:]

    def next_turn(self, user: str, *, ended: bool) -> list[int]:
        """Ids from a reply to the next opened one: the user's turn between them.

        Args:
            user: The text of the user's turn.
            ended: Whether the target generated its end token; else the template's is put in.
        """
        return self._encode(self._between + user + self._header)[1 if ended else 0 :]

    def user_text(self, sampled: Sequence[int]) -> str:
        """The text of a sampled user turn, without the token that ended it."""
        ids = list(sampled)
        if ids and ids[-1] in self.user_ends:
            ids.pop()
        return self.tokenizer.decode(ids, skip_special_tokens=False).strip()

    def count(self, text: str) -> int:
        """Length of a text in tokens."""
        return len(self._encode(text))

    def counts(self, texts: list[str]) -> list[int]:
        """Lengths of many texts in tokens, faster than one by one."""
        return [len(ids) for ids in self.tokenizer(texts, add_special_tokens=False)["input_ids"]]
