"""Compiling and launching CUDA C++ at run time: NVRTC through cuda-core, several at once, kept on disk."""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bytefloor.errors import KernelError

SOURCES = Path(__file__).resolve().parent.parent / "ops"
FORMS = ("stream.cuh", "stream_codes.cuh", "stream_lookups.cuh")
"""The structs of the stream forms, the first with what all of them need."""
HEADERS = (*FORMS, "stream_tokens.cuh", "ring.cuh", "handover.cuh")
INCLUDED = (
    "stamps.cuh",
    "tensor_core.cuh",
    "warpgroup.cuh",
    "fragments.cuh",
    "product_items.cuh",
    "prologue.cuh",
    "attention_storage.cuh",
    "attention_heads.cuh",
    "attention_round.cuh",
    "attention_merge.cuh",
    "activation.cuh",
    "row_tiles.cuh",
    "stream_records.cuh",
    "attention_rows_load.cuh",
)
"""What those, and kernels, include themselves."""
ARCHITECTURES = ("sm_90a",)
"""Offered: what a card has run. Kernels compile for sm_80, 86, 89, 100a and 120a too."""


@dataclass(frozen=True)
class KernelSpec:
    """One compiled variant: file and entry have one name; the model's constants are ``defines``.

    shared_bytes: dynamic shared memory a block. threads: threads a block.
    """

    name: str
    defines: tuple[tuple[str, str], ...]
    threads: int
    shared_bytes: int = 0

    @property
    def source(self) -> str:
        """Headers first: the constants' names are short and must not meet theirs."""
        includes = "".join(f'#include "{header}"\n' for header in HEADERS)
        constants = "".join(f"#define {key} {value}\n" for key, value in self.defines)
        # Behind the constants, one of which it may be asked by.
        return includes + constants + '#include "stamps.cuh"\n' + (SOURCES / f"{self.name}.cu").read_text()


def spec(name: str, threads: int, shared_bytes: int = 0, **defines: object) -> KernelSpec:
    """A KernelSpec from keyword constants; booleans become 0 or 1, floats keep all their digits."""

    def text(value: object) -> str:
        if isinstance(value, bool):
            return str(int(value))
        return f"{value!r}f" if isinstance(value, float) else str(value)

    return KernelSpec(name, tuple((key, text(value)) for key, value in defines.items()), threads, shared_bytes)


def compile_kernel(kernel: KernelSpec, architecture: str) -> tuple[bytes, str]:
    """Machine code, and the assembler's report of registers and spills. KernelError with the compiler's message."""
    import io

    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        arch=architecture, std="c++17", include_path=[str(SOURCES), *_toolkit_headers()], ptxas_options=["-v"]
    )
    log = io.StringIO()
    try:
        code = Program(kernel.source, "c++", options).compile("cubin", logs=log)
    except Exception as error:
        raise KernelError(f"kernel {kernel.name} for {architecture}: {error}") from None
    return bytes(code.code), log.getvalue()


def _toolkit_headers() -> list[str]:
    from cuda.pathfinder import find_nvidia_header_directory

    found = find_nvidia_header_directory("cudart")
    return [found] if found else []


def cache_folder() -> Path:
    """Where machine code is kept between runs."""
    base = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    return base / "bytefloor" / "kernels"


def _key(kernel: KernelSpec, architecture: str) -> str:
    from cuda.bindings import nvrtc

    digest = hashlib.sha256()
    for part in (kernel.source, *((SOURCES / header).read_text() for header in (*HEADERS, *INCLUDED)), architecture):
        digest.update(part.encode())
    digest.update(repr(nvrtc.nvrtcVersion()).encode())
    return digest.hexdigest()[:32]


def machine_code(kernel: KernelSpec, architecture: str) -> bytes:
    """From the disk, or compiled and put there. A rename makes a file appear whole or not at all, so no lock is held
    while compiling: two processes that race do the same work twice and leave the same bytes."""
    path = cache_folder() / f"{_key(kernel, architecture)}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        pass
    code, _ = compile_kernel(kernel, architecture)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}.{id(kernel)}")
        draft.write_bytes(code)
        draft.replace(path)
    except OSError:
        pass  # a read-only home costs a second compilation, nothing else
    return code


class Kernel:
    """A loaded kernel. ``launch`` goes on any stream, captured or not."""

    def __init__(self, kernel: KernelSpec, code: bytes, overlaps: bool) -> None:
        """overlaps: whether it may begin while the kernel before it runs, which chips before Hopper cannot."""
        from cuda.bindings import driver
        from cuda.core import ObjectCode

        self.spec, self._overlaps = kernel, overlaps
        self._module = ObjectCode.from_cubin(code)
        loaded = self._module.get_kernel(kernel.name)
        self._function = _checked(driver.cuKernelGetFunction(loaded.handle), kernel.name)
        attributes = driver.CUfunction_attribute
        for attribute, value in (
            (attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, kernel.shared_bytes),
            # All of it, for every kernel: a multiprocessor that must change the split between shared memory and cache
            # drains first, and then the kernels of a chain no longer overlap.
            (attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100),
        ):
            _checked(driver.cuFuncSetAttribute(self._function, attribute, value), kernel.name)

    def launch(self, stream: int, grid: tuple[int, ...], arguments: Sequence[Any]) -> None:
        """Once, see ``prepare``."""
        self.prepare(stream, grid, arguments)()

    def prepare(self, stream: int, grid: tuple[int, ...], arguments: Sequence[Any]) -> Callable[[], None]:
        """A launch that can be made again and again for little. arguments: tensors become pointers, None a null
        pointer, int a 32-bit int, float a 32-bit float.

        The launch is a programmatic dependent of what precedes it: the kernel itself sees to it that what it reads has
        been written, by the parity of the values or by waiting for the kernels before.
        """
        from cuda.bindings import driver

        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1)[:3]
        config.blockDimX, config.blockDimY, config.blockDimZ = self.spec.threads, 1, 1
        config.sharedMemBytes = self.spec.shared_bytes
        config.hStream = stream
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        value = driver.CUlaunchAttributeValue()
        value.programmaticStreamSerializationAllowed = 1
        attribute.value = value
        if self._overlaps:
            config.attrs, config.numAttrs = [attribute], 1
        values = [_stored(argument) for argument in arguments]
        places = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        start = ctypes.addressof(places)

        def launch(kept: Sequence[Any] = (values, places, arguments)) -> None:
            """kept: what the pointers point to."""
            _checked(driver.cuLaunchKernelEx(config, self._function, start, 0), self.spec.name)

        return launch


def _stored(argument: Any) -> ctypes.c_int | ctypes.c_float | ctypes.c_void_p:
    """An argument as the driver copies it. KernelError for a number that 32 bits do not hold, which C would cut."""
    if isinstance(argument, float):
        return ctypes.c_float(argument)
    if isinstance(argument, int):
        if not -(2**31) <= argument < 2**31:
            raise KernelError(f"argument {argument} of a kernel: expected a number of 32 bits")
        return ctypes.c_int(argument)
    return ctypes.c_void_p(0 if argument is None else argument.data_ptr())


def _checked(result: tuple, name: str) -> Any:
    if int(result[0]) != 0:
        raise KernelError(f"kernel {name}: the driver answered {result[0].name}")
    return result[1] if len(result) > 1 else None


def current(device: torch.device) -> AbstractContextManager[object]:
    """The device that kernels are loaded for."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def load_kernels(
    specs: Sequence[KernelSpec], architecture: str, progress: Callable[[int, int], None] | None = None
) -> Mapping[KernelSpec, Kernel]:
    """Each distinct spec once, compiled on as many threads as there are cores. progress: (done, in all).

    They belong to the current device. KernelError of the first that does not compile, without waiting for those not
    begun.
    """
    import cuda.core  # noqa: F401  (imported here once: its first import is not safe from several threads)

    unique = list(dict.fromkeys(specs))
    overlaps = int(architecture.removeprefix("sm_").rstrip("a")) >= 90
    loaded: dict[KernelSpec, Kernel] = {}
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        waiting = {pool.submit(machine_code, kernel, architecture): kernel for kernel in unique}
        try:
            for done in as_completed(waiting):
                loaded[waiting[done]] = Kernel(waiting[done], done.result(), overlaps)
                if progress is not None:
                    progress(len(loaded), len(unique))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return loaded
