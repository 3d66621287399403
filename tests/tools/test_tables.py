"""What README and docs say in tables is what docs/results holds."""

from __future__ import annotations

import json
import re
from pathlib import Path

from bytefloor.tools.floor_model import fit, predict
from bytefloor.tools.frontier_tables import load_frontiers
from bytefloor.tools.markdown import MISSING, with_table
from bytefloor.tools.tables import (
    README,
    RESULTS,
    load_rows,
    make_kernel_table,
    make_limit_line,
    make_pages,
    make_prediction_table,
    make_prompt_table,
    make_quality_table,
    make_rows_table,
    make_serve_table,
    make_table,
    make_tables,
)
from made_profiles import made_profile

WANTED = {
    "verb", "model", "format", "n_prompt", "n_gen", "depth", "batch", "tok_s", "share", "file_bytes", "moved_bytes",
    "stream_gb_s", "capacity", "device_memory_gb", "checksum", "card", "commit", "date",
}  # fmt: skip
MARK = re.compile(r"<!-- (\w+): begin -->")


def test_pages_are_made_from_the_committed_results() -> None:
    assert load_rows(RESULTS)
    for path, text in make_pages().items():
        assert path.read_text() == text, f"{path}: run python -m bytefloor.tools.tables"


def test_every_mark_on_a_page_has_its_table() -> None:
    """A table between marks that nobody makes would grow old unseen."""
    tables = {path: sorted(named) for path, named in make_tables(load_frontiers(RESULTS)).items()}
    assert all(table for named in make_tables(load_frontiers(RESULTS)).values() for table in named.values())
    pages = [README, *README.parent.glob("docs/**/*.md")]
    assert {path: sorted(MARK.findall(path.read_text())) for path in pages if MARK.search(path.read_text())} == tables


def test_predictions_are_of_all_others_of_the_same_model() -> None:
    small, other = (made_profile(f"synthetic:smollm2-135m/{name}", (0, 64), ()) for name in ("Q4_K_M", "Q8_0"))
    stranger = made_profile("synthetic:llama31-8b/Q4_K_M", (0,), ())
    bench = {"model": f"{other.model.split('/')[0]}/BF16", "depth": 0, "tok_s": 1000.0, "date": "d"}
    lines = make_prediction_table([small, other, stranger], [bench]).splitlines()[2:]
    cells = [line.strip("| ").split(" | ") for line in lines]
    assert [(row[0], row[1], row[2], row[3]) for row in cells] == [
        (fitted.model, *what)
        for fitted, rest in ((small, other), (other, small))
        for what in ((rest.model, "0", "profile"), (rest.model, "64", "profile"), (bench["model"], "0", "bench, d"))
    ]
    said = predict(small, fit(small), {matrix.name: matrix.format for matrix in other.matrices}, 64).tok_s
    assert said is not None
    true = 1e6 / other.tokens[1].wall_us
    assert cells[1][4:] == [f"{true:.1f}", f"{said:.1f}", f"{said / true - 1:+.1%}"]
    assert make_prediction_table([stranger], []) == MISSING


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


def test_quality_has_a_line_for_each_cache_and_base_and_the_newest_counts() -> None:
    row = {
        "model": "m", "format": "Q4_K", "kv": "int8", "base": None, "protocol": "chunks", "context": 512, "by": "chunk",
        "executor": "kernels", "card": "c", "date": "1", "n_predictions": 4080, "n_windows": 16,
        "perplexity": {"value": 10.123456, "error": 0.5}, "divergence": None,
    }  # fmt: skip
    far = {
        "kl": {"value": 0.00123, "error": 0.00004},
        "kl_percentiles": {"99.9": 0.056},
        "same_best": {"value": 0.98765, "error": 0.002},
    }
    newer = {**row, "date": "2", "perplexity": {"value": 11.0, "error": 0.5}}
    beside = {**row, "base": "b", "divergence": far}
    what = "| m, Q4_K | int8 | 4,080 (16 x 512, by chunk) |"
    assert make_quality_table([newer, row, beside]).splitlines()[2:] == [
        f"{what} 11.0000 ± 0.5000 |  |  |  |  | kernels | c | 2 |",
        f"{what} 10.1235 ± 0.5000 | b | 1.23e-03 ± 4e-05 | 5.6e-02 | 98.77% ± 0.20% | kernels | c | 1 |",
    ]
    assert make_quality_table([]) == "Not measured yet.\n"


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


def test_the_newest_row_of_each_prompt_is_shown() -> None:
    old = {"model": "m", "kv": "bf16", "n_prompt": 2048, "tok_s": 9000.0, "card": "c", "date": "1"}
    row = {**old, "date": "2", "tok_s": 30123.4, "tflops": 487.6, "peak_tflops": 700.4, "share_of_peak": 0.6961}
    row["attention_share"] = 0.0812
    newer, longer = {**row, "date": "3", "tok_s": 31000.0}, {**row, "n_prompt": 32768, "peak_tflops": 690.0}
    assert make_prompt_table([newer, old, row, longer]).splitlines()[2:] == [
        "| m | bf16 | 2,048 | 31,000 | 488 | 69.6% | 8.1% | c | 3 |",
        "| m | bf16 | 32,768 | 30,123 | 488 | 69.6% | 8.1% | c | 2 |",
        "",
        "bf16 peak measured in these runs: 690 to 700 TFLOP/s.",
    ]
    assert "| 69.6% |  | c |" in make_prompt_table([{**row, "attention_share": None}])
    assert make_prompt_table([old, {**row, "share_of_peak": None}]) == "Not measured yet.\n"


def test_both_ways_of_a_product_stand_in_a_line() -> None:
    row = {"verb": "kernel_rows", "shape": "s", "format": "Q4_K", "rows": 512, "card": "c", "date": "2"}
    row |= {"route": "fused", "us": 101.26, "tflops": 512.3, "share_of_peak": 0.731}
    other = {**row, "route": "unpack+cublas", "us": 140.0, "tflops": 300.0, "share_of_peak": 0.4}
    more = {**row, "rows": 32, "us": 9.0}
    assert make_rows_table([other, row, more, {**row, "date": "1", "us": 500.0}]).splitlines()[2:] == [
        "| s | Q4_K | 512 | 101.3 | 140.0 | 512 | 73.1% | c | 2 |",
        "| s | Q4_K | 32 | 9.0 |  | 512 | 73.1% | c | 2 |",
    ]
    # A time of another day is not set beside it, nor the share of the other way under the kernel's name.
    assert make_rows_table([{**row, "date": "1"}, other]).splitlines()[2:] == [
        "| s | Q4_K | 512 |  | 140.0 |  |  | c | 2 |"
    ]
    assert make_rows_table([]) == "Not measured yet.\n"


def test_loads_have_a_line_each_and_the_newest_counts() -> None:
    row = {
        "verb": "serve", "model": "m", "streams": 32, "rate_s": None, "is_cold": False, "n_prompt": 128, "n_gen": 64,
        "tok_s": 1234.5, "engine_tok_s": 1300.0, "ttft_ms_p50": 20.04, "ttft_ms_p99": 31.0, "tpot_ms_p50": None,
        "card": "C", "date": "2026-01-02",
    }  # fmt: skip
    rows = [
        row | {"tok_s": 1.0, "date": "2026-01-01"}, row, row | {"streams": None, "rate_s": 2.5, "engine_tok_s": None},
        row | {"streams": 1, "is_cold": True}, row | {"n_gen_least": 64}, row | {"n_gen_least": 32},
    ]  # fmt: skip
    lines = make_serve_table(rows).splitlines()[2:]
    assert lines == [
        "| m | 32 | 128 | 64 | 1,234 | 1,300 | 20.0 | 31.0 |  | C | 2026-01-02 |",
        "| m | 2.5 a second | 128 | 64 | 1,234 |  | 20.0 | 31.0 |  | C | 2026-01-02 |",
        "| m | 1, new connections | 128 | 64 | 1,234 | 1,300 | 20.0 | 31.0 |  | C | 2026-01-02 |",
        "| m | 32 | 128 | 32 to 64 | 1,234 | 1,300 | 20.0 | 31.0 |  | C | 2026-01-02 |",
    ]
    assert make_serve_table([]) == MISSING


def test_each_table_goes_between_its_own_marks() -> None:
    text = "a\n<!-- x: begin -->\nold\n<!-- x: end -->\nb\n<!-- y: begin -->\n<!-- y: end -->\nc\n"
    assert with_table(text, "x", "new\n") == text.replace("old", "new")
    assert with_table(text, "y", "new\n") == text.replace("<!-- y: end", "new\n<!-- y: end")


def test_committed_rows_say_where_they_come_from() -> None:
    for row in load_rows(RESULTS):
        assert set(row) >= WANTED
        assert row["card"]
        assert row["date"]
        assert 0 < row["share"] < 1
