"""A base's log-probabilities on disk: 2 bytes for each token of the vocabulary at each prediction.

Little-endian. 16 bytes that say what it is; the header's length and CRC-32, 4 bytes each; the header, JSON; then a row
a prediction: `low` and `step` float32, `nll` float64, `best` int32, `codes` uint16 [V], CRC-32 of all these. A
log-probability is low + step * code, less what it takes for the probabilities to add up to 1. nll is the right token's,
as it was, and best the most probable token. docs/perplexity.md says how near that is.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bytefloor.errors import FileError
from bytefloor.tools.outputs import check_output, draft_of

MAGIC = b"bytefloor base 1"
LARGEST_CODE = 2**16 - 1
MOST_HEADER_BYTES = 1 << 20


@dataclass(frozen=True)
class BaseHeader:
    """What was asked, and of whom. digest: of all windows, see ``windows.digest``. n_rows: predictions.

    kv, by, protocol, stride: as ``perplexity`` was asked. context: of every window, None for conversations.
    """

    model: str
    format: str
    kv: str | None
    by: str
    n_vocabulary: int
    n_rows: int
    protocol: str
    context: int | None
    stride: int | None
    digest: str


@dataclass(frozen=True)
class BaseRows:
    """Of n predictions. log_p: float64 [n, V]; nll float64 [n]; best int64 [n]."""

    log_p: Tensor
    nll: Tensor
    best: Tensor


def is_saved_base(path: Path) -> bool:
    """Whether a file begins as these do."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def check_base(path: Path) -> None:
    """See `check_output`. A base is moved to its place, which a device or a pipe would lose."""
    if path.exists() and not path.is_file():
        raise FileError(f"{path}: cannot be written: it is no file")
    check_output(path, MAGIC, "a saved base")


def row_type(n_vocabulary: int) -> np.dtype[Any]:
    """One prediction in the file."""
    codes = ("codes", "<u2", (n_vocabulary,))
    return np.dtype([("low", "<f4"), ("step", "<f4"), ("nll", "<f8"), ("best", "<i4"), codes, ("crc", "<u4")])


class BaseWriter:
    """Writes beside the path and moves it there when all rows are written: what is there is whole."""

    def __init__(self, path: Path, header: BaseHeader) -> None:
        self._path, self._header, self._n_rows = path, header, 0
        self._draft = draft_of(path)
        text = json.dumps(asdict(header)).encode()
        with self._told():
            self._file: BinaryIO = self._draft.open("wb")
            self._file.write(MAGIC + _number(len(text)) + _number(zlib.crc32(text)) + text)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Errors of the system name the file."""
        try:
            yield
        except OSError as error:
            raise FileError(f"{self._path}: cannot be written: {error.strerror}") from None

    def __enter__(self) -> BaseWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            with self._told():
                self._file.close()
                if kind is None and self._n_rows == self._header.n_rows:
                    self._draft.replace(self._path.resolve())
        finally:
            self._draft.unlink(missing_ok=True)

    def add(self, log_p: Tensor, targets: Tensor) -> None:
        """The next predictions: float64 [n, V] and the right tokens, int64 [n]."""
        low, high = (extreme.float() for extreme in log_p.aminmax(dim=-1))
        step = (high - low) / LARGEST_CODE
        # A row whose values are all one has no step.
        size = torch.where(step > 0, step, torch.ones_like(step)).double()
        codes = ((log_p - low.double()[:, None]) / size[:, None]).round().clamp(0, LARGEST_CODE)
        rows = np.zeros(len(log_p), row_type(log_p.shape[-1]))
        rows["low"], rows["step"] = low.cpu().numpy(), step.cpu().numpy()
        rows["nll"] = -log_p.gather(1, targets[:, None])[:, 0].cpu().numpy()
        rows["best"] = log_p.argmax(-1).cpu().numpy()
        rows["codes"] = codes.int().cpu().numpy()
        rows["crc"] = [_checksum(row) for row in rows]
        with self._told():
            self._file.write(rows.tobytes())
        self._n_rows += len(rows)


class BaseReader:
    """Reads what a ``BaseWriter`` wrote. FileError for anything else, before the first row where it can be seen."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb")
        try:
            self.header = self._read_header()
            self._row = row_type(self.header.n_vocabulary)
            self._check_size()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> BaseReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def _read_header(self) -> BaseHeader:
        start = self._file.read(len(MAGIC) + 8)
        n_bytes, crc = (int.from_bytes(start[i : i + 4], "little") for i in (len(MAGIC), len(MAGIC) + 4))
        if len(start) < len(MAGIC) + 8 or not start.startswith(MAGIC):
            raise FileError(f"{self._path}: not a saved base")
        text = self._file.read(min(n_bytes, MOST_HEADER_BYTES))
        if len(text) < n_bytes or zlib.crc32(text) != crc:
            raise FileError(f"{self._path}: the header is cut short or damaged")
        found = json.loads(text)
        names = {field.name for field in fields(BaseHeader)}
        if not isinstance(found, Mapping) or set(found) != names:
            raise FileError(f"{self._path}: the header does not have the fields {', '.join(sorted(names))}")
        return BaseHeader(**found)

    def _check_size(self) -> None:
        start = self._file.tell()
        found, expected = self._path.stat().st_size - start, self.header.n_rows * self._row.itemsize
        if found != expected:
            raise FileError(
                f"{self._path}: {found} bytes of rows, expected {expected}: "
                f"{self.header.n_rows} rows over {self.header.n_vocabulary} tokens"
            )

    def read(self, n_rows: int, device: torch.device) -> BaseRows:
        """The next rows. FileError where one is damaged."""
        rows: npt.NDArray[Any] = np.fromfile(self._file, self._row, n_rows)
        if len(rows) < n_rows:
            raise FileError(f"{self._path}: ends within its rows")
        for row in rows:
            if _checksum(row) != row["crc"]:
                raise FileError(f"{self._path}: a row is damaged: its checksum is another")
        codes = torch.from_numpy(rows["codes"].astype(np.int32)).to(device)
        low, step, nll = (torch.from_numpy(rows[name].astype(np.float64)).to(device) for name in ("low", "step", "nll"))
        log_p = (low[:, None] + step[:, None] * codes).log_softmax(-1)
        return BaseRows(log_p, nll, torch.from_numpy(rows["best"].astype(np.int64)).to(device))


def _checksum(row: npt.NDArray[Any]) -> int:
    """Of a row but for its own checksum, which stands at the end."""
    return zlib.crc32(row.tobytes()[:-4])


def _number(value: int) -> bytes:
    return value.to_bytes(4, "little")
