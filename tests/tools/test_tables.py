"""The README's figures are those of docs/results."""

from __future__ import annotations

from bytefloor.tools.tables import README, RESULTS, load_rows, make_table, with_table

WANTED = {
    "verb", "model", "format", "n_prompt", "n_gen", "depth", "batch", "tok_s", "share", "file_bytes", "moved_bytes",
    "stream_gb_s", "capacity", "device_memory_gb", "checksum", "card", "commit", "date",
}  # fmt: skip


def test_the_readme_is_made_from_the_committed_results() -> None:
    rows = load_rows(RESULTS)
    assert rows
    text = README.read_text()
    assert with_table(text, make_table(rows)) == text


def test_committed_rows_say_where_they_come_from() -> None:
    for row in load_rows(RESULTS):
        assert set(row) >= WANTED
        assert row["card"]
        assert row["date"]
        assert 0 < row["share"] < 1
