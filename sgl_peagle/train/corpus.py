"""Token files: documents as a target and its chat template made them, ready to be trained on.

A corpus is a folder of two files. ``corpus.safetensors`` holds three flat tensors: ``tokens`` int32 [T], ``assistant``
uint8 [T] (1 where the target generated the token: answer and end-of-turn, not the header, not what the template adds
behind it) and ``offsets`` int64 [D + 1] (document i is ``tokens[offsets[i] : offsets[i + 1]]``). ``manifest.json`` says
where it came from: target hash, seeds, counts, filters. Ids are kept, never text: re-tokenised text can differ.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from pathlib import Path
from typing import Any, Iterable, Iterator, Sequence

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sgl_peagle.errors import PEagleError

TENSORS = "corpus.safetensors"
MANIFEST = "manifest.json"


class Corpus:
    """An immutable list of documents; ``corpus[i]`` is ``(tokens int64 [n + 1], assistant bool [n + 1])``."""

    def __init__(self, tokens: Tensor, assistant: Tensor, offsets: Tensor, manifest: dict[str, Any]) -> None:
        self.tokens, self.assistant, self.offsets, self.manifest = tokens, assistant, offsets, manifest

    @classmethod
    def of(cls, documents: Iterable[tuple[list[int], list[bool]]], manifest: dict[str, Any]) -> "Corpus":
        """A corpus of (token ids, whether the target generated each) pairs.

        Raises:
            PEagleError: A document whose two lists differ in length, or no document at all.
        """
        tokens, assistant = array("i"), bytearray()
        offsets = [0]
        for ids, generated in documents:
            if len(ids) != len(generated):
                raise PEagleError(
                    f"document {len(offsets) - 1} has {len(ids)} tokens and {len(generated)} marks",
                    "every token is either the target's or not",
                    "give one mark per token",
                )
            tokens.extend(ids)
            assistant += bytes(generated)
            offsets.append(len(tokens))
        if len(offsets) == 1:
            raise PEagleError("the corpus is empty", "there is nothing to train on", "check the filters in the manifest")
        return cls(
            torch.frombuffer(tokens, dtype=torch.int32),
            torch.frombuffer(assistant, dtype=torch.uint8),
            torch.tensor(offsets, dtype=torch.int64),
            manifest,
        )

    @classmethod
    def open(cls, folder: Path) -> "Corpus":
        """Read a folder.

        Raises:
            PEagleError: The folder is no corpus, or its tensors do not fit together.
        """
        try:
            tensors = load_file(folder / TENSORS)
            manifest = json.loads((folder / MANIFEST).read_text())
            tokens, assistant, offsets = tensors["tokens"], tensors["assistant"], tensors["offsets"]
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise PEagleError(
                f"{folder} cannot be read as a corpus: {error}",
                f"a corpus is a folder with {TENSORS} and {MANIFEST}",
                "make one with `sgl-peagle train data`",
            ) from error
        ordered = bool((offsets[1:] > offsets[:-1]).all())
        if len(tokens) != len(assistant) or not ordered or int(offsets[0]) != 0 or int(offsets[-1]) != len(tokens):
            raise PEagleError(
                f"{folder / TENSORS}: tokens, assistant and offsets do not fit together",
                "the file was not written by this package, or is damaged",
                "make it again with `sgl-peagle train data`",
            )
        return cls(tokens, assistant, offsets, manifest)

    @classmethod
    def join(cls, corpora: Sequence["Corpus"], seed: int) -> "Corpus":
        """All documents of ``corpora``, in an order drawn from ``seed``; the manifest keeps theirs."""
        tokens = torch.cat([c.tokens for c in corpora])
        assistant = torch.cat([c.assistant for c in corpora])
        lengths = torch.cat([c.offsets.diff() for c in corpora])
        begins = lengths.cumsum(0) - lengths
        order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed))
        lengths, begins = lengths[order], begins[order]
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        within = torch.arange(len(tokens)) - offsets[:-1].repeat_interleave(lengths)
        index = begins.repeat_interleave(lengths) + within
        manifest = {"joined": [c.manifest for c in corpora], "seed": seed, "documents": len(lengths)}
        return cls(tokens[index], assistant[index], offsets, manifest)

    def write(self, folder: Path) -> None:
        """Write the folder, whole or not at all.

        Raises:
            PEagleError: The folder exists already; nothing of the user's is overwritten.
        """
        if folder.exists():
            raise PEagleError(f"{folder} exists", "it may hold an earlier corpus", "choose another folder or remove it")
        partial = folder.with_name(folder.name + ".part")
        partial.mkdir(parents=True, exist_ok=True)
        save_file({"tokens": self.tokens, "assistant": self.assistant, "offsets": self.offsets}, partial / TENSORS)
        (partial / MANIFEST).write_text(json.dumps(self.manifest | {"sha256": self.sha256}, indent=2) + "\n")
        partial.rename(folder)

    @property
    def sha256(self) -> str:
        """Hash of the three tensors: two corpora with the same hash train the same."""
        digest = hashlib.sha256()
        for tensor in (self.tokens, self.assistant, self.offsets):
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        begin, end = self.offsets[index].item(), self.offsets[index + 1].item()
        return self.tokens[begin:end].long(), self.assistant[begin:end].bool()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self[i] for i in range(len(self)))
