"""Text made of frontier's rows, and the list of all results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bytefloor.tools.frontier_tables import (
    load_frontiers,
    make_frontier_sections,
    make_frontier_table,
    make_plots,
    make_readme_part,
    make_recipe_table,
)
from bytefloor.tools.results_page import make_results_page
from bytefloor.tools.tables import RESULTS, RESULTS_PAGE, make_fidelity_table, make_pages
from tools.test_frontier_plot import refused, row, source

ON = {"executor": "kernels", "card": "NVIDIA H200"}


def test_a_table_has_the_source_first_then_the_nearest_and_reasons_last() -> None:
    rows = [source(), row("far", 0.1, 30.0), refused("none"), row("near", 0.01, 20.0, substitutes=["x for y"])]
    assert make_frontier_table(rows).splitlines() == [
        "| recipe | bits | MB | MB a token | KL, nats | same best token | perplexity | front | notes |",
        "|---|---|---|---|---|---|---|---|---|",
        "| source | 4.50 | 50.0 | 50.0 |  |  | 10.0000 |  |  |",
        "| near | 4.50 | 20.0 | 20.0 | 1.00e-02 ± 2e-04 | 90.00% ± 1.00% | 10.0000 | yes | x for y |",
        "| far | 4.50 | 30.0 | 30.0 | 1.00e-01 ± 2e-03 | 90.00% ± 1.00% | 10.0000 |  |  |",
        "| none |  |  |  |  |  |  |  | refused: a reason |",
    ]


def test_speeds_are_shown_where_kernels_ran_and_marked_where_they_did_not() -> None:
    rows = [source(**ON), row("a", 0.1, 30.0, 2345.6, **ON), row("b", 0.2, 20.0)]
    lines = make_frontier_table(rows).splitlines()
    assert "| tok/s | share | front |" in lines[0]
    assert lines[3].endswith("| 10.0000 | 2,346 / 235 | 50.0% / 50.0% | yes |  |")
    assert "| 100 / 10 (reference) |" in lines[4]
    assert lines[4].endswith("|  |  |")


def test_a_section_says_what_is_compared_with_what() -> None:
    text = make_frontier_sections({"frontier-m-cpu": [source(source_formats=["Q4_1"]), row("a", 0.1, 30.0)]})
    assert text.startswith(
        "### m<1>.gguf, cpu\n\nM: KL is to m<1>.gguf (Q4_1, itself quantised), over 4,080 predictions "
    )
    assert "(16 x 512); cache float32; reference on cpu, 2026-11-30.\n" in text
    assert "![Quality of each recipe](results/frontier-m-cpu.svg)" in text
    on = make_frontier_sections({"f": [source(**ON), row("a", 0.1, 30.0, **ON)]})
    assert "kernels on NVIDIA H200, 2026-11-30; tok/s and share at a depth of 0 / 9.\n" in on
    assert make_frontier_sections({}) == make_readme_part({}) == "Not measured yet.\n"


def test_the_readme_shows_originals_then_the_longest_front_then_kernels_then_the_newest() -> None:
    points = [row("a", 0.1, 20.0, 300.0), row("b", 0.2, 10.0, 500.0), row("c", 0.3, 15.0, 400.0)]
    files = {"old": [source(date="1"), *points], "new": [source(date="2"), *points]}
    files["newest"] = [source(date="3", source_formats=["Q4_1"]), *points]
    part = make_readme_part(files)
    assert part.startswith("![Quality of each recipe](docs/results/new.svg)\n\nm<1>.gguf (BF16), cpu: 2 of 3 recipes ")
    assert "from `a` (4.5 bits a weight, KL 1.00e-01 ± 2e-03) to `b` (4.5 bits a weight, KL 2.00e-01" in part
    on = [{**point, **ON} for point in points]
    files["a point"] = [source(**ON, date="9"), row("a", 0.1, 20.0, 300.0, **ON), row("b", 0.2, 10.0, 299.0, **ON)]
    files["quantised"] = [source(**ON, date="9", source_formats=["Q4_1"]), *on]
    assert make_readme_part(files) == part
    files["card"] = [source(**ON, date="0"), *on]
    part = make_readme_part(files)
    assert "docs/results/card.svg" in part
    assert "to `b` (4.5 bits a weight, 500 tok/s, KL 2.00e-01 ± 4e-03)" in part


def test_recipes_stand_with_their_words() -> None:
    assert "| mlp-4bit-g32 | `affine-8b-g64 *.mlp.*=affine-4b-g32` |\n" in make_recipe_table()


def test_committed_plots_and_lists_are_those_of_the_results() -> None:
    """No result without its line, no plot without its result."""
    pages, frontiers = make_pages(), load_frontiers(RESULTS)
    assert frontiers
    assert {path.stem for path in RESULTS.glob("*.svg")} == set(frontiers)
    assert {path.name for path in pages if path.suffix == ".svg"} == set(make_plots(frontiers))
    listed = pages[RESULTS_PAGE]
    for path in RESULTS.glob("*.json"):
        assert f"| [{path.name}]({path.name}) | " in listed


def test_committed_rows_are_whole_and_of_one_run() -> None:
    for rows in load_frontiers(RESULTS).values():
        assert rows[0]["recipe"] == "source"
        for key in ("source", "card", "commit", "context", "source_formats"):
            assert len({json.dumps(row[key]) for row in rows}) == 1
        assert {row["state"] for row in rows} <= {"source", "measured", "refused"}
        measured = [row for row in rows if row["state"] == "measured"]
        assert len({row["n_predictions"] for row in measured}) == 1
        for each in measured:
            assert 0 <= each["divergence"]["kl"]["value"] < 2
            assert each["divergence"]["base_perplexity"] == rows[0]["perplexity"]
        assert all(row["reason"] for row in rows if row["state"] == "refused")


def test_a_list_of_results_says_what_where_from_and_where_shown(tmp_path: Path) -> None:
    bench = [{"verb": "decode", "model": f"m{i}", "card": "c", "date": "1", "commit": None} for i in range(6)]
    (tmp_path / "bench-a.json").write_text(json.dumps([*bench, {**bench[0], "verb": "prompt", "commit": "abc"}]))
    kernel = {"verb": "kernel", "shape": "s", "card": "c", "date": "2", "commit": "d+"}
    (tmp_path / "kernels-b.json").write_text(json.dumps([kernel]))
    (tmp_path / "fidelity-c.json").write_text(json.dumps({"model": "m", "what": "w", "card": "c"}))
    pages = {
        Path("x/log.md"): "see kernels-*.json, fidelity-c.json and `docs/results/bench-a.json`",
        Path("x/other.md"): "nothing.json",
    }
    text = make_results_page(tmp_path, {"bench-a.json": {Path("README.md")}}, pages)
    assert text.splitlines()[-3:] == [
        "| [bench-a.json](bench-a.json) | tokens a second (6 rows), prompts (1 row) | m0, m1, m2, m3 and 2 more "
        "| c | 1 | abc | README.md, log.md |",
        "| [fidelity-c.json](fidelity-c.json) | w | m | c |  |  | log.md |",
        "| [kernels-b.json](kernels-b.json) | kernels alone (1 row) | s | c | 2 | d+ |  |",
    ]
    (tmp_path / "other.json").write_text(json.dumps([{**kernel, "verb": "dance"}]))
    with pytest.raises(ValueError, match=r"other.json: rows of dance, expected decode, prompt"):
        make_results_page(tmp_path, {}, {})


def test_fidelity_is_weighted_by_positions(tmp_path: Path) -> None:
    part = {"kl_device": 2e-6, "kl_bf16_cache_only": 1e-6, "top1": 1.0, "n": 100}
    other = {**part, "kl_device": 6e-6, "top1": 0.96, "n": 300}
    (tmp_path / "fidelity-a.json").write_text(json.dumps({"model": "m", "card": "c", "prompts": [part, other]}))
    chunk = {"kl_prompt": 1e-5, "kl_bf16_cache_only": 3e-6, "top1": 0.99, "n": 1988, "chunk": 2048}
    short = {**chunk, "chunk": 1, "kl_prompt": 1.0}
    (tmp_path / "fidelity-b.json").write_text(json.dumps({"model": "m", "card": "c", "chunks": [short, chunk]}))
    assert make_fidelity_table(tmp_path).splitlines()[2:] == [
        "| m | decoding | 400 | 5.0e-06 | 1.0e-06 | 97.00% | c |",
        "| m | prompts, chunks of 2,048 | 1,988 | 1.0e-05 | 3.0e-06 | 99.00% | c |",
    ]
    assert make_fidelity_table(tmp_path / "none") == "Not measured yet.\n"
