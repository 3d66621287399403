"""GGUF files that must be refused, each with a message, at once, and without allocating what they ask for."""

import struct
import time
import tracemalloc

import container_bytes as make
import pytest

from bytefloor.errors import FileError, UnsupportedError
from bytefloor.files.checkpoint import open_checkpoint

F32 = make.TYPE_F32
ARCH = make.string("general.architecture", "llama")
BIG = 1 << 60


def tensors(*entries, **changes):
    return make.two_tensors(entries=list(entries), **changes)


# The 34 kinds of bad file that llama.cpp's own test makes, ours: what is wrong -> (the file, the message).
BAD_FILES = {
    "header: wrong magic": (make.gguf_bytes([ARCH], magic=b"FUGE"), "neither GGUF nor safetensors"),
    "header: version 0": (make.gguf_bytes([ARCH], version=0), "version 0"),
    "header: version 1": (make.gguf_bytes([ARCH], version=1), "version 1 is obsolete"),
    "header: version of the future": (make.gguf_bytes([ARCH], version=4), "version 4 is newer"),
    "header: big-endian": (make.gguf_bytes([ARCH], version=3 << 24), "big-endian"),
    "header: ends in the counts": (make.gguf_bytes()[:20], "needs 24 bytes"),
    "header: more tensors than bytes": (make.gguf_bytes([ARCH], n_entries=BIG), "announces"),
    "header: more pairs than bytes": (make.gguf_bytes([ARCH], n_pairs=BIG), "announces"),
    "pair: fewer than announced": (make.gguf_bytes([ARCH, ARCH[:-20]], n_pairs=2), "needs|occurs twice"),
    "pair: empty key": (make.gguf_bytes([make.u32("", 1)]), "key 0 has 0 bytes"),
    "pair: key of 2^30 bytes": (make.gguf_bytes([struct.pack("<Q", 1 << 30) + bytes(40)]), "needs 1073741824 bytes"),
    "pair: key longer than any": (make.gguf_bytes([make.u32("k" * 70_000, 1)]), "70000 bytes"),
    "pair: key not UTF-8": (make.gguf_bytes([make.pair(b"a\xff", make.U8, b"\1")]), "not valid UTF-8"),
    "pair: duplicate key": (make.gguf_bytes([make.u32("k", 1), make.u32("k", 1)]), "key k occurs twice"),
    "pair: unknown value type": (make.gguf_bytes([make.pair("k", 13, bytes(8))]), "unknown value type 13"),
    "pair: string of 2^30 bytes": (make.gguf_bytes([make.pair("k", make.STRING, struct.pack("<Q", 1 << 30))]), "needs"),
    "pair: boolean 2": (make.gguf_bytes([make.pair("k", make.BOOL, b"\2")]), "boolean k is stored as 2"),
    "pair: value cut off": (make.gguf_bytes([make.pair("k", make.F64, bytes(4))]), "value of k needs 8 bytes"),
    "array: unknown item type": (make.gguf_bytes([make.array("k", 77, 1, bytes(8))]), "unknown item type 77"),
    "array: of arrays": (make.gguf_bytes([make.array("k", make.ARRAY, 1, bytes(12))]), "array of arrays"),
    "array: more numbers than bytes": (make.gguf_bytes([make.array("k", make.U8, 1 << 30, bytes(9))]), "needs"),
    "array: more strings than bytes": (make.gguf_bytes([make.array("k", make.STRING, BIG, bytes(9))]), "needs"),
    "array: string past the end": (
        make.gguf_bytes([make.array("k", make.STRING, 2, make.text("a") + struct.pack("<Q", 99))]),
        "string 1 of array k"),
    "array: boolean 7": (make.gguf_bytes([make.array("k", make.BOOL, 2, b"\1\7")]), "holds the boolean 7"),
    "tensor: empty name": (tensors(make.entry("", (8, 2), F32, 0)), "name of tensor 0 has 0 bytes"),
    "tensor: name past the end": (make.gguf_bytes(entries=[struct.pack("<Q", 999) + bytes(30)]), "needs 999 bytes"),
    "tensor: duplicate name": (
        tensors(make.entry("a", (8, 2), F32, 0), make.entry("a", (8,), F32, 64)), "tensor a occurs twice"),
    "tensor: five dimensions": (tensors(make.entry("a", (2, 2, 2, 1, 1), F32, 0)), "5 dimensions"),
    "tensor: a million dimensions": (tensors(make.entry("a", (2,), F32, 0, n_dims=10**6)), "1000000 dimensions"),
    "tensor: dimension beyond 63 bits": (tensors(make.entry("a", (1 << 63,), F32, 0)), "beyond 64 bits"),
    "tensor: product wraps": (tensors(make.entry("a", (1 << 33, 1 << 33), F32, 0)), "beyond 64 bits"),
    "tensor: bytes wrap": (tensors(make.entry("a", (1 << 62,), F32, 0)), "bytes short"),
    "tensor: row not whole blocks": (tensors(make.entry("a", (33,), make.TYPE_Q4_0, 0)), "not a multiple of the Q4_0"),
    "tensor: offset not aligned": (
        tensors(make.entry("a", (8,), F32, 0), make.entry("b", (8,), F32, 33)), "not a multiple of 32"),
    "tensor: offset leaves a hole": (
        tensors(make.entry("a", (8,), F32, 0), make.entry("b", (8,), F32, 64)), "offset 64, expected 32"),
    "tensor: offset overlaps": (
        tensors(make.entry("a", (8, 2), F32, 0), make.entry("b", (8,), F32, 32)), "offset 32, expected 64"),
    "tensor: offset beyond everything": (
        tensors(make.entry("a", (8,), F32, 1 << 62)), "expected 0"),
    "tensor: laid out with another alignment": (
        make.two_tensors(pairs=[make.u32("general.alignment", 64)],
                         entries=[make.entry("a", (8,), F32, 0), make.entry("b", (8,), F32, 32)]), "multiple of 64"),
    "data: none": (make.two_tensors(data=b""), "bytes short"),
    "data: one byte missing": (make.two_tensors()[:-1], r"file is 1 bytes short: has \d+ of \d+ \(tensor b.weight\)"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_FILES)
def test_bad_file_is_refused_cheaply(tmp_path, what):
    """G18, G05, G06: a message, no other exception, no memory, no time."""
    raw, message = BAD_FILES[what]
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw)
    tracemalloc.start()
    start = time.process_time()
    with pytest.raises((FileError, UnsupportedError), match=message) as caught:
        open_checkpoint(path)
    seconds = time.process_time() - start
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert peak < 4 << 20
    assert seconds < 0.5


@pytest.mark.parametrize("value", [0, 3, 12, 1 << 30])
def test_bad_alignment_is_refused(tmp_path, value):
    """G01: no division by zero, no gigabyte of padding."""
    path = tmp_path / "bad.gguf"
    path.write_bytes(make.two_tensors(pairs=[make.u32("general.alignment", value)]))
    with pytest.raises(FileError, match=rf"general.alignment is {value}, expected a power of two"):
        open_checkpoint(path)


@pytest.mark.parametrize(("kind", "raw", "name"), [
    (make.I32, struct.pack("<i", -32), "i32"), (make.U64, struct.pack("<Q", 32), "u64"),
    (make.STRING, make.text("32"), "string"), (make.BOOL, b"\1", "bool"),
])  # fmt: skip
def test_alignment_of_the_wrong_type_is_refused(tmp_path, kind, raw, name):
    """G01, G02: negative and wrongly typed alignments."""
    path = tmp_path / "bad.gguf"
    path.write_bytes(make.two_tensors(pairs=[make.pair("general.alignment", kind, raw)]))
    with pytest.raises(FileError, match=rf"value type {name}, expected u32"):
        open_checkpoint(path)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_cut_file_says_how_much_is_missing_and_where(tmp_path, share):
    """G07: the data region ends early."""
    n_rows = 512
    entries = [make.entry("a", (16, n_rows), F32, 0), make.entry("b", (16, n_rows), F32, 64 * n_rows)]
    raw = make.gguf_bytes([ARCH], entries, bytes(128 * n_rows))
    kept = int(len(raw) * share)
    path = tmp_path / "cut.gguf"
    path.write_bytes(raw[:kept])
    name = "a" if share <= 0.5 else "b"
    found = rf"has {kept} of {len(raw)} \(tensor {name}\)"
    with pytest.raises(FileError, match=f"file is {len(raw) - kept} bytes short: {found}"):
        open_checkpoint(path)


def test_small_file_asking_for_gigabytes_is_refused_under_a_memory_limit(tmp_path):
    """G06: 160 bytes that ask for 1 GiB of strings, in a process that could not give it."""
    import resource

    path = tmp_path / "greedy.gguf"
    path.write_bytes(make.gguf_bytes([make.array("k", make.STRING, 1 << 30, bytes(90))]))
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), limits[1]))
    try:
        with pytest.raises(FileError, match="needs 8589934592 bytes"):
            open_checkpoint(path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
