"""Kernels compiled for the CPU and run there, block after block: see warp/block.cpp."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path
from typing import Any

from bytefloor.engine.kernels import SOURCES, KernelSpec

BLOCK = Path(__file__).resolve().parent / "warp" / "block.cpp"


class BlockRunner:
    """Compiles into a folder, each kernel once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.loaded: dict[KernelSpec, ctypes.CDLL] = {}

    def run(self, kernel: KernelSpec, grid: tuple[int, int], *arguments: Any) -> None:
        """As Kernel.launch: tensors become pointers, None a null pointer, an int stays one."""
        if kernel not in self.loaded:
            self.loaded[kernel] = self._compile(kernel)
        values = [0 if a is None else a if isinstance(a, int) else a.data_ptr() for a in arguments]
        given = (ctypes.c_void_p * len(values))(*values)
        assert self.loaded[kernel].run(*grid, kernel.threads, given) == 0, "threads met at different places"

    def _compile(self, kernel: KernelSpec) -> ctypes.CDLL:
        folder = self.folder / str(len(self.loaded))
        folder.mkdir()
        (folder / "kernel.inc").write_text(kernel_text(kernel))
        command = ["g++", "-std=c++17", "-O1", "-w", "-ffp-contract=off", "-fno-strict-aliasing", "-shared", "-fPIC"]
        target = folder / "kernel.so"
        subprocess.run([*command, "-I", str(folder), str(BLOCK), "-o", str(target)], check=True)
        return ctypes.CDLL(str(target))


def kernel_text(kernel: KernelSpec) -> str:
    """Constants, the kernel with the headers that it includes itself, and a function that calls it."""
    text = (SOURCES / f"{kernel.name}.cu").read_text()
    text = re.sub(r'#include "(\w+\.cuh)"', lambda found: (SOURCES / found[1]).read_text(), text)
    # Nobody asks a block on a CPU for its times, see ops/stamps.cuh.
    text = "#undef STAMP\n#define STAMP(what, who)\n" + text
    for ours in (
        " AND_STAMPS",
        "#pragma once\n",
        "#include <cuda_bf16.h>\n",
        "extern __shared__ __align__(16) u8 shared[];\n",
    ):
        text = text.replace(ours, "")
    signature = re.search(rf"\b{kernel.name}\(([^)]*)\)\s*\{{", text)
    assert signature is not None
    types = [parameter.split()[:-1] for parameter in signature[1].split(",")]
    given = [
        f"({' '.join(words)})arguments[{i}]" if words[-1].endswith("*") else f"(int)(intptr_t)arguments[{i}]"
        for i, words in enumerate(types)
    ]
    constants = "".join(f"#define {key} {value}\n" for key, value in kernel.defines)
    undone = "".join(f"#undef {key}\n" for key, _ in kernel.defines)
    call = f"void call_kernel(void** arguments) {{ {kernel.name}({', '.join(given)}); }}\n"
    return constants + text + undone + call
