"""Where the bytes of each written tensor come from, in pieces; the same pieces are written and compared afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, Optional, Protocol

import numpy as np

from sgl_peagle.errors import PEagleError
from sgl_peagle.heads.safetensors_io import Planned, TensorInfo, is_finite, read_bytes, read_chunks

_TORCH_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class Source(Protocol):
    """Produces a tensor's bytes; may be asked again and gives the same."""

    def pieces(self) -> Iterator[memoryview]: ...


@dataclass(frozen=True)
class Copied:
    """A tensor of the head, cast if ``dtype`` differs from the file's."""

    folder: Path
    info: TensorInfo
    dtype: str

    def pieces(self) -> Iterator[memoryview]:
        with (self.folder / self.info.file).open("rb", buffering=0) as file:
            for piece in read_chunks(file, self.info):
                yield cast(piece, self.info, self.dtype)


@dataclass(frozen=True)
class Rebuilt:
    """The full embedding: the target's table with the bytes of the head's MASK row (already in ``dtype``)."""

    folder: Path
    info: TensorInfo
    dtype: str
    row: bytes
    row_index: int

    def pieces(self) -> Iterator[memoryview]:
        at, done = self.row_index * len(self.row), 0
        with (self.folder / self.info.file).open("rb", buffering=0) as file:
            for piece in read_chunks(file, self.info):
                data = cast(piece, self.info, self.dtype)
                first, last = max(at, done), min(at + len(self.row), done + len(data))
                if first < last:
                    data[first - done : last - done] = self.row[first - at : last - at]
                done += len(data)
                yield data


@dataclass(frozen=True)
class Small:
    """A small tensor's bytes."""

    data: bytes

    def pieces(self) -> Iterator[memoryview]:
        yield memoryview(bytearray(self.data))


@dataclass(frozen=True)
class Output:
    """A tensor to be written and where its bytes come from.

    Attributes:
        origin: The head's tensor whose bytes pass through unchanged or cast, None for a derived one.
    """

    planned: Planned
    source: Source
    origin: Optional[TensorInfo] = None


def cast(piece: memoryview, info: TensorInfo, dtype: str) -> memoryview:
    """A piece of a tensor in another dtype (the piece itself where it is the same).

    Raises:
        PEagleError: A finite value overflows.
    """
    if dtype == info.dtype:
        return piece
    import torch  # only here: NumPy knows no bfloat16

    values = torch.frombuffer(piece, dtype=getattr(torch, _TORCH_NAMES[info.dtype]))
    data = memoryview(values.to(getattr(torch, _TORCH_NAMES[dtype])).view(torch.uint8).numpy())
    if not is_finite(data, dtype) and is_finite(piece, info.dtype):
        raise PEagleError(
            f"{info.file} {info.name} has values beyond the range of {dtype}",
            "they would become infinity",
            "leave out --dtype, or use bfloat16, which has the range of float32",
        )
    return data


def embedding_difference(
    head_folder: Path, own: TensorInfo, target_folder: Path, theirs: TensorInfo, mask_id: int
) -> Optional[int]:
    """First row except ``mask_id`` whose bits differ between a head's embedding and the target's, or None.

    The target's values are compared in the head's dtype.
    """
    rows, row_bytes = own.shape[0], (own.end - own.start) // own.shape[0]
    step = max(1, (8 << 20) // row_bytes)
    for start in range(0, rows, step):
        part = slice(start, min(rows, start + step))
        mine = np.frombuffer(read_bytes(head_folder, own, part), np.uint8).reshape(-1, row_bytes)
        piece = memoryview(read_bytes(target_folder, theirs, part))
        other = np.frombuffer(cast(piece, theirs, own.dtype), np.uint8).reshape(-1, row_bytes)
        differs = (mine != other).any(axis=1)
        if start <= mask_id < start + len(mine):
            differs[mask_id - start] = False
        if differs.any():
            return start + int(np.flatnonzero(differs)[0])
    return None
