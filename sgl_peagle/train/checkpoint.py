"""Checkpoints: one file, whole or not there, that a run goes on from bit by bit (on a CPU)."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch

from sgl_peagle.errors import PEagleError

FILE = "checkpoint.pt"
VERSION = 4


def save(folder: Path, state: dict[str, Any]) -> None:
    """Write ``folder/checkpoint.pt`` in place of an earlier one, atomically and flushed to disk.

    Args:
        state: Tensors and plain values only.
    """
    partial = folder / (FILE + ".part")
    with partial.open("wb") as file:
        torch.save(state | {"version": VERSION}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, folder / FILE)


def load(folder: Path) -> dict[str, Any]:
    """Read it, onto the CPU.

    Raises:
        PEagleError: It is missing, damaged or of another version.
    """
    path = folder / FILE
    if not path.is_file():
        raise PEagleError(
            f"{path} does not exist",
            "--resume goes on from a checkpoint, and the run has written none",
            "start the run anew in another folder",
        )
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise PEagleError(f"{path} cannot be read: {error}", "the file is damaged", "start the run anew") from error
    if not isinstance(state, dict) or state.get("version") != VERSION:
        raise PEagleError(
            f"{path} is no checkpoint of version {VERSION}", "it was written by another release", "resume with that one"
        )
    return state
