"""How many instructions a warp issues for each byte of weights: counted in machine code, without a device."""

from __future__ import annotations

import struct
from functools import cache

from bytefloor.engine.kernels import compile_kernel, spec
from bytefloor.errors import KernelError
from bytefloor.formats.stream import StreamForm

INSTRUCTION_BYTES = 16
"""Since Volta."""
FEW, MANY = 1, 5
"""Records in a row: what surrounds them, and the filling up of the code, is in both counts."""


def instructions_a_byte(form: StreamForm, architecture: str) -> float:
    """Instructions of one warp for a record, over the record's bytes: codes to integers, products, scales, sums.

    The code is straight and unrolled, so what is there is what is issued.
    """
    sizes = [_code_bytes(form.name, times, architecture) for times in (FEW, MANY)]
    return (sizes[1] - sizes[0]) / INSTRUCTION_BYTES / (MANY - FEW) / form.record_bytes


@cache
def _code_bytes(form_name: str, times: int, architecture: str) -> int:
    code, _ = compile_kernel(spec("dot", 32, FORM=form_name, TIMES=times), architecture)
    return section_bytes(code, ".text.dot")


def section_bytes(elf: bytes, name: str) -> int:
    """Size of a section of a 64-bit little-endian ELF file. KernelError where there is none of that name."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry_bytes, n_entries, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    # name, type, flags, address, offset, size
    sections = [struct.unpack_from("<IIQQQQ", elf, table + i * entry_bytes) for i in range(n_entries)]
    names = elf[sections[names_index][4] :][: sections[names_index][5]]
    for at, _, _, _, _, size in sections:
        if names[at : names.index(b"\0", at)].decode() == name:
            return int(size)
    raise KernelError(f"machine code without a section {name}")
