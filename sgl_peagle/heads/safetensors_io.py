"""safetensors files as byte ranges: headers, chunked reading, and the beginning of a file to be streamed.

The safetensors library checks every file that is read, and is used for its headers. What it lacks is writing tensor
by tensor (``save_file`` wants all tensors in memory) and reading without mapping (mapped pages count as resident).
Both are simple: a file is 8 bytes of header length, a JSON header, and the tensors' bytes. NumPy does the rest, so
that the command line need not wait for torch.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO, Iterator, Mapping, Optional, Sequence

import numpy as np
from safetensors import SafetensorError, safe_open

from sgl_peagle.errors import PEagleError

#: Bytes read, checked and written at a time.
CHUNK = 1 << 20

#: safetensors' dtype name -> NumPy's. NumPy has no bfloat16: its bits are read as integers.
_NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "U8": "u1", "BOOL": "?"}

FLOATS = ("F32", "BF16", "F16", "F64")

#: Values looked at together: as many as stay in the cache.
_BLOCK = 256 << 10


def item_size(dtype: str) -> int:
    """Bytes of one value."""
    return np.dtype(_NUMPY[dtype]).itemsize


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
    def is_float(self) -> bool:
        """Whether it holds floating-point values."""
        return self.dtype in FLOATS


def read_headers(file: Path) -> list[TensorInfo]:
    """The tensors of a safetensors file, in the order of their bytes.

    Raises:
        PEagleError: The file is truncated or is not a safetensors file.
    """
    infos: list[TensorInfo] = []
    try:
        with safe_open(file, framework="np") as handle:  # the library checks header, ranges and length
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


def copy_range(source: BinaryIO, info: TensorInfo, out: BinaryIO, at: int) -> None:
    """Copy a tensor's bytes to position ``at`` of another file; within the kernel where the system can."""
    done, size = 0, info.end - info.start
    try:
        while done < size:
            moved = os.copy_file_range(source.fileno(), out.fileno(), size - done, info.start + done, at + done)
            if not moved:
                break
            done += moved
    except (AttributeError, OSError):  # not Linux, or two file systems that cannot: done bytes stay as they are
        pass
    if done < size:
        rest = TensorInfo(info.file, info.name, info.shape, info.dtype, info.start + done, info.end)
        out.seek(at + done)
        for piece in read_chunks(source, rest):
            write_all(out, piece)


def write_all(out: BinaryIO, piece: memoryview) -> None:
    """Write a whole piece (an unbuffered file may take a part of it)."""
    while len(piece):
        piece = piece[out.write(piece) :]


def is_finite(piece: memoryview | bytes | bytearray, dtype: str) -> bool:
    """Whether all values in the bytes of a tensor are finite; integers always are."""
    if dtype not in FLOATS:
        return True
    if item_size(dtype) != 2:
        return bool(np.isfinite(np.frombuffer(piece, _NUMPY[dtype])).all())
    # The exponent is all ones for infinity and NaN. Integers in cache-sized blocks are many times quicker than isfinite.
    bits, exponent = np.frombuffer(piece, "<i2"), 0x7F80 if dtype == "BF16" else 0x7C00
    magnitude = np.empty(min(len(bits), _BLOCK), "<i2")
    for start in range(0, len(bits), _BLOCK):
        block = bits[start : start + _BLOCK]
        np.bitwise_and(block, 0x7FFF, out=magnitude[: len(block)])
        if magnitude[: len(block)].max() >= exponent:
            return False
    return True


def equal_bytes(a: memoryview, b: memoryview) -> bool:
    """Whether two buffers hold the same bytes (eight at a time: memoryviews compare slowly)."""
    whole = len(a) - len(a) % 8
    same = len(a) == len(b) and np.array_equal(np.frombuffer(a[:whole], "<i8"), np.frombuffer(b[:whole], "<i8"))
    return same and bytes(a[whole:]) == bytes(b[whole:])


def read_bytes(folder: Path, info: TensorInfo, rows: Optional[slice] = None) -> bytearray:
    """The bytes of one tensor, or of some of its rows (first dimension, step 1)."""
    start, stop = info.start, info.end
    if rows is not None:
        first, last, _ = rows.indices(info.shape[0])
        row_bytes = (info.end - info.start) // max(info.shape[0], 1)
        start, stop = info.start + first * row_bytes, info.start + last * row_bytes
    data = bytearray(stop - start)
    with (folder / info.file).open("rb", buffering=0) as file:
        file.seek(start)
        fill(file, memoryview(data), f"{info.file} {info.name}")
    return data


def read_values(folder: Path, info: TensorInfo, rows: Optional[slice] = None) -> np.ndarray:
    """One tensor, or some of its rows, flattened; bfloat16 comes as float32 of the same values."""
    values = np.frombuffer(read_bytes(folder, info, rows), _NUMPY[info.dtype])
    return (values.astype("<u4") << 16).view("<f4") if info.dtype == "BF16" else values


@dataclass(frozen=True)
class Planned:
    """A tensor to be written: name, safetensors dtype name and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return prod(self.shape) * item_size(self.dtype)


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
