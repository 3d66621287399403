"""Instructions counted in machine code, which the compiler makes without a GPU."""

import pytest

from bytefloor.engine.kernels import compile_kernel
from bytefloor.engine.stream_limit import read_spec
from bytefloor.errors import KernelError
from bytefloor.formats import stream
from bytefloor.tools.instructions import instructions_a_byte, section_bytes

pytest.importorskip("cuda.core")
WARPS, HERTZ, BYTES_A_SECOND = 132 * 4, 1.98e9, 4.8e12
"""Schedulers of an H200, each of which issues one instruction a cycle, and what its memory can give."""


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "BF16", "F16"])
def test_the_inner_loop_leaves_issue_slots_free(name):
    """More than the schedulers can issue while the bytes arrive would be slower than memory, whatever else."""
    form = stream.choose(name, 16, 4096)
    issued = instructions_a_byte(form, "sm_90a")
    # Two loads and two tensor core instructions a kilobyte are the least that there can be.
    assert 0.004 < issued < WARPS * HERTZ / BYTES_A_SECOND


def test_more_work_is_more_instructions():
    by_name = {n: instructions_a_byte(stream.choose(n, 16, 4096), "sm_90a") for n in ("Q4_K", "Q5_K", "Q8_0", "Q4_0")}
    per_weight = {n: by_name[n] * stream.choose(n, 16, 4096).record_bytes for n in by_name}
    assert per_weight["Q4_K"] < per_weight["Q5_K"]
    assert by_name["Q8_0"] < by_name["Q4_0"]


def test_a_section_that_is_not_there_is_named():
    code, _ = compile_kernel(read_spec(), "sm_90a")
    assert section_bytes(code, ".text.read") % 128 == 0
    with pytest.raises(KernelError, match=r"without a section \.text\.write"):
        section_bytes(code, ".text.write")
