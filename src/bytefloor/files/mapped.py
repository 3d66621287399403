"""A file mapped into memory, and typed tensors over stretches of it."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

import torch
from torch import Tensor

from bytefloor.errors import FileError

# Python 3.13 names it; Linux has always had it. Without it a private writable mapping of a file larger than the
# machine's memory is refused by the kernel's overcommit check, although nothing is ever written.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


class MappedFile:
    """The bytes of one file. Private copy-on-write: torch wants writable memory, and the file must never change.

    The mapping lives as long as any tensor over it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                if self.size == 0:
                    raise FileError(f"{path}: the file is empty")
                self.memory = _map(file.fileno())
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise FileError(f"{path}: cannot be read: {reason}") from None

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """``shape`` elements of ``dtype`` from ``offset`` on; no copy, except where the file misaligns them."""
        count = 1
        for extent in shape:
            count *= extent
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        if offset % dtype.itemsize:
            flat = torch.frombuffer(self.memory, dtype=torch.uint8, count=count * dtype.itemsize, offset=offset)
            return flat.clone().view(dtype).reshape(shape)
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=offset).reshape(shape)


def _map(descriptor: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    return mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE | _NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
