"""Loading kernels: each once, counted as they come; an error does not wait for the rest. No GPU, no compiler."""

from __future__ import annotations

import threading
import time

import pytest

from bytefloor.engine import kernels
from bytefloor.engine.kernels import KernelSpec, load_kernels, spec
from bytefloor.errors import KernelError


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was compiled, by K; a kernel that is loaded is its spec and code. K=0 waits until K=1 is compiled."""
    found: list[str] = []
    is_second_done = threading.Event()

    def machine_code(kernel: KernelSpec, architecture: str) -> bytes:
        k = dict(kernel.defines)["K"]
        time.sleep(0.001)
        if k == "0":
            is_second_done.wait(20)
        if k == "13":
            raise KernelError("kernel 13: no such instruction")
        found.append(k)
        if k == "1":
            is_second_done.set()
        return f"{architecture} {k}".encode()

    monkeypatch.setattr(kernels, "machine_code", machine_code)
    monkeypatch.setattr(kernels, "Kernel", lambda kernel, code, overlaps: (kernel, code, overlaps))
    monkeypatch.setattr(kernels.os, "cpu_count", lambda: 2)
    return found


def test_kernels_are_counted_as_they_are_done(compiled: list[str]) -> None:
    """The first is the slowest: it holds up no count."""
    specs = [spec("unpack", 32, K=k) for k in (0, 1, 2, 1, 0)]
    told: list[tuple[int, int]] = []
    seen: list[list[str]] = []

    def progress(done: int, total: int) -> None:
        told.append((done, total))
        seen.append(list(compiled))

    loaded = load_kernels(specs, "sm_90a", progress)
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert compiled[0] == "1"
    assert loaded == {
        kernel: (kernel, f"sm_90a {k}".encode(), True) for k in range(3) for kernel in [spec("unpack", 32, K=k)]
    }


@pytest.mark.parametrize(("architecture", "overlaps"), [("sm_80", False), ("sm_89", False), ("sm_120a", True)])
def test_kernels_overlap_from_hopper_on(compiled: list[str], architecture: str, overlaps: bool) -> None:
    kernel = spec("unpack", 32, K=2)
    assert load_kernels([kernel], architecture)[kernel][2] == overlaps


def test_an_error_does_not_wait_for_kernels_not_begun(compiled: list[str]) -> None:
    specs = [spec("unpack", 32, K=k) for k in (13, *range(100, 2100))]
    with pytest.raises(KernelError, match="kernel 13"):
        load_kernels(specs, "sm_90a")
    assert len(compiled) < 2000


@pytest.mark.parametrize("number", [2**31, -(2**31) - 1])
def test_a_number_that_32_bits_do_not_hold_is_refused(number: int) -> None:
    """Floats from one plane of a chunk to the next could be as many."""
    with pytest.raises(KernelError, match=f"argument {number} of a kernel"):
        kernels._stored(number)
    assert kernels._stored(2**31 - 1).value == 2**31 - 1
