"""safetensors files as byte ranges: headers, chunked reading, and streaming writing.

The safetensors library checks every file that is read, and is used for its headers. What it lacks is writing tensor
by tensor (``save_file`` wants all tensors in memory) and reading without mapping (mapped pages count as resident).
Both are simple: a file is 8 bytes of header length, a JSON header, and the tensors' bytes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO, Iterator, Mapping, Optional, Sequence

import torch
from safetensors import SafetensorError, safe_open

from sgl_peagle.errors import PEagleError

#: Bytes read, checked and written at a time.
CHUNK = 16 << 20

TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor is: file name, name in the file, shape, safetensors dtype name, and its byte range."""

    file: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    end: int

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype in torch."""
        return TORCH_DTYPES[self.dtype]


def read_headers(file: Path) -> list[TensorInfo]:
    """The tensors of a safetensors file, in the order of their bytes.

    Raises:
        PEagleError: The file is truncated or is not a safetensors file.
    """
    infos: list[TensorInfo] = []
    try:
        with safe_open(file, framework="pt") as handle:  # the library checks header, ranges and length
            list(handle.keys())
        with file.open("rb") as raw:
            length = int.from_bytes(raw.read(8), "little")
            header = json.loads(raw.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise PEagleError(
            f"{file} cannot be read: {error}",
            "the file is truncated or is not a safetensors file",
            "download or copy the head again",
        ) from error
    header.pop("__metadata__", None)
    for name, entry in header.items():
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        infos.append(TensorInfo(file.name, name, tuple(entry["shape"]), entry["dtype"], start, end))
    return sorted(infos, key=lambda info: (info.start, info.end))


def fill(file: BinaryIO, buffer: memoryview, what: str) -> None:
    """Read until ``buffer`` is full.

    Raises:
        PEagleError: The file ends early (it changed while it was read).
    """
    at = 0
    while at < len(buffer):
        got = file.readinto(buffer[at:])  # type: ignore[attr-defined]
        if not got:
            raise PEagleError(f"{what} ends early", "the file changed while it was read", "try again")
        at += got


def read_chunks(file: BinaryIO, info: TensorInfo, chunk: int = CHUNK) -> Iterator[memoryview]:
    """The bytes of one tensor in pieces of ``chunk``; each piece is valid until the next one is asked for."""
    buffer = memoryview(bytearray(min(chunk, max(info.end - info.start, 1))))
    file.seek(info.start)
    left = info.end - info.start
    while left:
        piece = buffer[: min(left, len(buffer))]
        fill(file, piece, f"{info.file} {info.name}")
        left -= len(piece)
        yield piece


def is_finite(piece: memoryview | bytes | bytearray, dtype: str) -> bool:
    """Whether all values in the bytes of a tensor are finite; integers always are."""
    torch_dtype = TORCH_DTYPES[dtype]
    if not torch_dtype.is_floating_point or not len(piece):
        return True
    values = torch.frombuffer(piece, dtype=torch_dtype)
    if torch_dtype.itemsize == 2:  # the exponent is all ones for inf and NaN; integers are quicker than isfinite
        exponent = 0x7F80 if torch_dtype == torch.bfloat16 else 0x7C00
        return int((values.view(torch.int16) & 0x7FFF).max()) < exponent
    return bool(values.isfinite().all())


def read_tensor(folder: Path, info: TensorInfo, rows: Optional[slice] = None) -> torch.Tensor:
    """One tensor, or some of its rows, in memory of its own.

    Args:
        folder: Folder of the file.
        info: The tensor.
        rows: Rows to read (first dimension, step 1); None reads all.
    """
    row_bytes = (info.end - info.start) // max(info.shape[0], 1) if info.shape else 0
    start, stop, shape = info.start, info.end, info.shape
    if rows is not None:
        first, last, _ = rows.indices(info.shape[0])
        start, stop, shape = info.start + first * row_bytes, info.start + last * row_bytes, (last - first, *info.shape[1:])
    data = bytearray(stop - start)
    with (folder / info.file).open("rb", buffering=0) as file:
        file.seek(start)
        fill(file, memoryview(data), f"{info.file} {info.name}")
    if not data:
        return torch.empty(shape, dtype=info.torch_dtype)
    return torch.frombuffer(data, dtype=info.torch_dtype).view(shape)


@dataclass(frozen=True)
class Planned:
    """A tensor to be written: name, safetensors dtype name and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return prod(self.shape) * TORCH_DTYPES[self.dtype].itemsize


def header_bytes(tensors: Sequence[Planned], metadata: Mapping[str, str]) -> bytes:
    """The beginning of a safetensors file that will hold these tensors, in this order."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for tensor in tensors:
        end = at + tensor.size
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts at a multiple of 8
    return len(text).to_bytes(8, "little") + text
