"""The figures of README and docs/bench.md are those of docs/results."""

from __future__ import annotations

import json
from pathlib import Path

from bytefloor.tools.tables import RESULTS, load_rows, make_kernel_table, make_limit_line, make_pages, make_table

WANTED = {
    "verb", "model", "format", "n_prompt", "n_gen", "depth", "batch", "tok_s", "share", "file_bytes", "moved_bytes",
    "stream_gb_s", "capacity", "device_memory_gb", "checksum", "card", "commit", "date",
}  # fmt: skip


def test_pages_are_made_from_the_committed_results() -> None:
    assert load_rows(RESULTS)
    for path, text in make_pages().items():
        assert path.read_text() == text


def test_greedy_and_sampled_tokens_of_a_measurement_share_a_line() -> None:
    row = {"model": "m", "depth": 8192, "tok_s": 99.6, "share": 0.4567, "card": "c", "date": "d"}
    sampled = {**row, "sampling": "sampled", "executor": "kernels", "tok_s": 90.2, "share": 0.4}
    several = {**row, "batch": 8, "kv": "int8", "tok_s": 700.0}
    lines = make_table([row, sampled, several, {**row, "executor": "reference"}]).splitlines()
    assert lines[2:] == [
        "| m | bf16 | 1 | 8,192 | 100 | 90 | 45.7% | c | d |",
        "| m | int8 | 8 | 8,192 | 700 |  | 45.7% | c | d |",
        "| m (reference executor) | bf16 | 1 | 8,192 | 100 |  | 45.7% | c | d |",
    ]


def test_sizes_stand_beside_each_other_and_other_shapes_are_left_out(tmp_path: Path) -> None:
    row = {"verb": "kernel", "shape": "30MB", "format": "Q4_K", "share": 0.7, "card": "c", "date": "d"}
    row["stream_gb_s"] = 4400.0
    rows = [
        row,
        {**row, "shape": "500MB", "share": 0.93, "stream_gb_s": 4660.0},
        {**row, "shape": "qwen3-8b.o"},
        {**row, "format": "Q6_K"},
    ]
    (tmp_path / "kernels-c.json").write_text(json.dumps(rows))
    (tmp_path / "bench-c.json").write_text(json.dumps([{"verb": "decode"}]))
    assert make_kernel_table(load_rows(tmp_path, "kernel")).splitlines()[2:] == [
        "| Q4_K | 70.0% |  | 93.0% | c | d |",
        "| Q6_K | 70.0% |  |  | c | d |",
        "",
        "Read bandwidth measured, GB/s: 30MB 4400 to 4400, 500MB 4660 to 4660.",
    ]
    assert make_kernel_table([]) == "Not measured yet.\n"


def test_the_limit_stands_beside_the_fastest_product() -> None:
    rows, kernels = [{"stream_gb_s": 4341.6}, {"stream_gb_s": 4427.4}], [{"gb_s": 4011.1}, {"gb_s": 4724.7}]
    assert "4342 to 4427 GB/s; the fastest product alone reads 4725 GB/s" in make_limit_line(rows, kernels)
    assert make_limit_line(rows, []) == make_limit_line([], kernels) == ""


def test_committed_rows_say_where_they_come_from() -> None:
    for row in load_rows(RESULTS):
        assert set(row) >= WANTED
        assert row["card"]
        assert row["date"]
        assert 0 < row["share"] < 1
