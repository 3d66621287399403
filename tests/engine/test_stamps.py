"""Kernels with stamps: as many registers, no more spills, and what is made of the times."""

from __future__ import annotations

import re

import numpy as np
import pytest

from bytefloor.engine.kernels import compile_kernel
from bytefloor.engine.stamps import Times, _times, stamped
from engine.test_launches import H200, MOST_SPILLED_BYTES, REGISTERS, REPRESENTATIVE

NAMES = ("gemma4 12B gate and up", "q8_0 head", "attention 256", "attention int8 128", "embed", "logits")


@pytest.mark.parametrize("name", NAMES)
def test_stamps_cost_no_room(name: str) -> None:
    kernel = REPRESENTATIVE[name](H200)
    _, report = compile_kernel(stamped(kernel), "sm_90a")
    registers, spilled = re.search(r"Used (\d+) registers", report), re.findall(r"(\d+) bytes spill stores", report)
    assert registers is not None
    assert max(map(int, spilled)) <= MOST_SPILLED_BYTES
    if kernel.name == "product":  # two of them are on a multiprocessor at once
        assert 2 * kernel.threads * int(registers[1]) <= REGISTERS


def test_without_stamps_a_kernel_has_neither_clock_nor_argument() -> None:
    kernel = REPRESENTATIVE["embed"](H200)
    plain, with_stamps = compile_kernel(kernel, "sm_90a")[0], compile_kernel(stamped(kernel), "sm_90a")[0]
    assert len(with_stamps) > len(plain)
    assert ("STAMPED", "1") not in kernel.defines


def test_a_launch_begins_with_its_first_block_and_ends_with_its_last() -> None:
    there, ready, done = [105, 100, 130], [140, 150, 145], [190, 200, 180]
    assert _times(np.array([there, ready, done])) == Times(100, 140, 200)


def test_what_a_block_without_work_left_of_an_earlier_step_does_not_count() -> None:
    there, ready, done = [1005, 1000], [1040, 140], [1100, 190]
    assert _times(np.array([there, ready, done])) == Times(1000, 1040, 1100)
    assert _times(np.array([[1000], [0], [0]])) == Times(1000, 1000, 1000)
