"""Where the bytes of each written tensor come from, in pieces; the same pieces are written and compared afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, Optional, Protocol

import torch

from sgl_peagle.errors import PEagleError
from sgl_peagle.heads.safetensors_io import TORCH_DTYPES, Planned, TensorInfo, is_finite, read_chunks, read_tensor


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
    """The full embedding: the target's table with the head's MASK row."""

    folder: Path
    info: TensorInfo
    dtype: str
    row: torch.Tensor
    row_index: int

    def pieces(self) -> Iterator[memoryview]:
        at, width = self.row_index * self.row.numel(), self.row.numel()
        row = self.row.to(TORCH_DTYPES[self.dtype])
        done = 0  # values so far
        with (self.folder / self.info.file).open("rb", buffering=0) as file:
            for piece in read_chunks(file, self.info):
                data = cast(piece, self.info, self.dtype)
                values = torch.frombuffer(data, dtype=row.dtype)
                first, last = max(at, done), min(at + width, done + len(values))
                if first < last:
                    values[first - done : last - done] = row[first - at : last - at]
                done += len(values)
                yield data


@dataclass(frozen=True)
class Small:
    """A small tensor held in memory."""

    tensor: torch.Tensor

    def pieces(self) -> Iterator[memoryview]:
        if self.tensor.numel():
            flat = self.tensor.contiguous().reshape(-1)
            yield memoryview(flat.view(torch.uint8).numpy())


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
    values = torch.frombuffer(piece, dtype=info.torch_dtype).to(TORCH_DTYPES[dtype])
    data = memoryview(values.view(torch.uint8).numpy())
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
    """First row except ``mask_id`` in which a head's embedding differs from the target's, or None.

    The target's values are compared in the head's dtype.
    """
    rows, step = own.shape[0], max(1, (8 << 20) // max(1, own.shape[1] * 4))
    for start in range(0, rows, step):
        part = slice(start, min(rows, start + step))
        mine = read_tensor(head_folder, own, part)
        other = read_tensor(target_folder, theirs, part).to(mine.dtype)
        differs = (mine != other).any(dim=1)
        if start <= mask_id < start + len(mine):
            differs[mask_id - start] = False
        if bool(differs.any()):
            return start + int(differs.nonzero()[0])
    return None
