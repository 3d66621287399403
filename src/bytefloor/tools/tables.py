"""Tables and plots of README and docs, made from the committed results: ``python -m bytefloor.tools.tables``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bytefloor.engine.synthetic import PREFIX, make_checkpoint
from bytefloor.model.families import load_model
from bytefloor.tools.bench_row_products import CUBLAS, FUSED
from bytefloor.tools.floor_model import fit, predict
from bytefloor.tools.frontier_tables import (
    load_frontiers,
    make_frontier_sections,
    make_plots,
    make_readme_part,
    make_recipe_table,
)
from bytefloor.tools.markdown import MISSING, markdown, with_table
from bytefloor.tools.profile_data import Profile, read_profile
from bytefloor.tools.profile_spans import matrices_of
from bytefloor.tools.results_page import make_results_page

ROOT = Path(__file__).resolve().parents[3]
README = ROOT / "README.md"
BENCH_PAGE = ROOT / "docs" / "bench.md"
PROFILE_PAGE = ROOT / "docs" / "profile.md"
QUALITY_PAGE = ROOT / "docs" / "perplexity.md"
FRONTIER_PAGE = ROOT / "docs" / "frontier.md"
NUMERICS_PAGE = ROOT / "docs" / "numerics.md"
RESULTS = ROOT / "docs" / "results"
RESULTS_PAGE = RESULTS / "README.md"
TABLED = {
    "decode": README, "prompt": README, "serve": README, "kernel": BENCH_PAGE, "kernel_rows": BENCH_PAGE,
    "perplexity": QUALITY_PAGE, "frontier": FRONTIER_PAGE,
}  # fmt: skip
"""Which page has the table of a verb's rows."""
FILES = ("bench*.json", "kernels*.json", "perplexity*.json")
"""Whose rows are in tables that files share. Those of other files would stand there twice, or answer something else."""
HEADINGS = ("model", "cache", "sequences", "depth", "tok/s", "sampled tok/s", "share of the floor", "card", "date")
SIZES = ("30MB", "75MB", "500MB")

Rows = list[dict[str, Any]]


def load_rows(folder: Path, verb: str = "decode") -> Rows:
    """The rows of a verb in all committed files of bench and perplexity, in the order of the files."""
    files = sorted(path for pattern in FILES for path in folder.glob(pattern))
    return [row for path in files for row in json.loads(path.read_text()) if row["verb"] == verb]


def make_table(rows: Rows) -> str:
    """Markdown, a line for each thing measured, the newest row of it: greedy and beside it sampled, where that is.

    Rows from before sampled decoding was measured are greedy, those from before executors were named ran on kernels,
    those from before caches of codes had one of bf16.
    """
    found: dict[tuple[str, str, int, int], dict[str, dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["date"]):
        name = row["model"] + (" (reference executor)" if row.get("executor") == "reference" else "")
        place = (name, row.get("kv", "bf16"), row.get("batch", 1), row["depth"])
        sampling, before = row.get("sampling", "greedy"), found.setdefault(place, {})
        if sampling in before and before[sampling]["date"] == row["date"]:
            raise ValueError(f"two rows of {place}, {sampling}, {row['date']}: which of them counts?")
        before[sampling] = row
    lines = []
    for (name, kv, n_sequences, depth), kinds in sorted(found.items(), key=lambda item: item[0]):
        rate = {sampling: f"{row['tok_s']:.0f}" for sampling, row in kinds.items()}
        row = kinds.get("greedy") or kinds["sampled"]
        tokens = rate.get("greedy", ""), rate.get("sampled", "")
        place = name, kv, str(n_sequences), f"{depth:,}"
        lines.append((*place, *tokens, f"{row['share']:.1%}", row["card"], row["date"]))
    return markdown(HEADINGS, lines)


def make_prompt_table(rows: Rows) -> str:
    """Markdown, a line for each prompt, the newest row of it. Rows whose arithmetic was not counted are left out."""
    headings = (
        "model", "cache", "prompt", "tok/s", "TFLOP/s", "share of the peak", "time in attention", "card", "date"
    )  # fmt: skip
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: row["date"]):
        if row.get("share_of_peak") is not None:
            found[row["model"], row["kv"], f"{row['n_prompt']:,}"] = row
    lines = [
        (*what, f"{row['tok_s']:,.0f}", f"{row['tflops']:.0f}", f"{row['share_of_peak']:.1%}",
         "" if row["attention_share"] is None else f"{row['attention_share']:.1%}", row["card"], row["date"])
        for what, row in found.items()
    ]  # fmt: skip
    if not lines:
        return MISSING
    peaks = [row["peak_tflops"] for row in found.values()]
    told = f"bf16 peak measured in these runs: {min(peaks):.0f} to {max(peaks):.0f} TFLOP/s."
    return markdown(headings, lines) + f"\n{told}\n"


def make_serve_table(rows: Rows) -> str:
    """Markdown, a line for each load over HTTP, the newest row of it. What was not measured is left empty."""
    headings = (
        "model", "requests at a time", "prompt", "answer", "tok/s", "without HTTP", "first token, ms", "99 of 100",
        "each token, ms", "card", "date",
    )  # fmt: skip
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: row["date"]):
        many = str(row["streams"]) if row["streams"] else f"{row['rate_s']} a second"
        how = f"{many}, new connections" if row["is_cold"] else many
        least = row.get("n_gen_least", row["n_gen"])  # rows from before answers could differ have none
        answer = f"{row['n_gen']:,}" if least == row["n_gen"] else f"{least:,} to {row['n_gen']:,}"
        found[row["model"], how, f"{row['n_prompt']:,}", answer] = row

    def cell(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value:,.{digits}f}"

    lines = [
        (*what, cell(row["tok_s"], 0), cell(row["engine_tok_s"], 0), cell(row["ttft_ms_p50"], 1),
         cell(row["ttft_ms_p99"], 1), cell(row["tpot_ms_p50"], 2), row["card"], row["date"])
        for what, row in found.items()
    ]  # fmt: skip
    return markdown(headings, lines) if lines else MISSING


def make_rows_table(rows: Rows) -> str:
    """Markdown, a line for each product of many rows, the newest of it: the kernel beside unpacking and cuBLAS."""
    headings = (
        "shape",
        "format",
        "rows",
        "kernel, us",
        "unpack + cuBLAS, us",
        "TFLOP/s",
        "share of the peak",
        "card",
        "date",
    )
    found: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["date"]):
        place = row["shape"], row["format"], str(row["rows"])
        before = found.setdefault(place, {})
        if any(other["date"] != row["date"] for other in before.values()):
            before.clear()
        before[row["route"]] = row
    lines = []
    for what, routes in found.items():
        us = {route: f"{row['us']:.1f}" for route, row in routes.items()}
        row = routes.get(FUSED) or routes[CUBLAS]
        speed = ("", "") if FUSED not in routes else (f"{row['tflops']:.0f}", f"{row['share_of_peak']:.1%}")
        lines.append((*what, us.get(FUSED, ""), us.get(CUBLAS, ""), *speed, row["card"], row["date"]))
    return markdown(headings, lines) if lines else MISSING


def make_quality_table(rows: Rows) -> str:
    """Markdown, a line for each model, cache and protocol, the newest row of it; without a base or beside one."""
    headings = (
        "model", "cache", "predictions", "perplexity", "base", "mean KL, nats", "99.9 % of KL", "same best token",
        "executor", "card", "date",
    )  # fmt: skip
    found: dict[tuple[Any, ...], tuple[str, ...]] = {}
    for row in sorted(rows, key=lambda row: row["date"]):
        far = row["divergence"]
        beside = ("", "", "", "")
        if far is not None:
            kl, same = far["kl"], far["same_best"]
            told = f"{kl['value']:.2e} ± {kl['error']:.0e}", f"{far['kl_percentiles']['99.9']:.1e}"
            beside = (row["base"], *told, f"{same['value']:.2%} ± {same['error']:.2%}")
        perplexity = f"{row['perplexity']['value']:.4f} ± {row['perplexity']['error']:.4f}"
        name = f"{row['model']}, {row['format']}"
        budget = row.get("kv_budget")  # rows from before there were budgets have none
        cache = row["kv"] if budget is None else f"{row['kv']}, prompts cut to {budget}"
        place = name, cache, row["base"], row["protocol"], row["context"], row["by"], row["executor"], row["card"]
        n = f"{row['n_predictions']:,} ({row['n_windows']} x {row['context']}, by {row['by']})"
        found[place] = (name, cache, n, perplexity, *beside, row["executor"], row["card"], row["date"])
    return markdown(headings, list(found.values())) if found else MISSING


def make_prediction_table(profiles: Sequence[Profile], rows: Rows) -> str:
    """Markdown: what the model fitted to each profile says of every token of the others of its model, and of the rows
    that bench measured of its model's other mixtures, beside what was measured."""
    headings = "fitted to", "predicted", "depth", "measured by", "tok/s", "by the model", "missed by"
    lines = []
    for profile in profiles:
        name, model = profile.model.split("/")[0], fit(profile)
        shapes = {matrix.name: (matrix.n, matrix.k) for matrix in profile.matrices}
        found = [
            (other.model, token.depth, "profile", 1e6 / token.wall_us, other.matrices)
            for other in profiles
            if other is not profile and shapes == {matrix.name: (matrix.n, matrix.k) for matrix in other.matrices}
            for token in other.tokens
        ]
        found += [
            (row["model"], row["depth"], f"bench, {row['date']}", row["tok_s"],
             matrices_of(load_model(make_checkpoint(PREFIX + row["model"], "cpu"))))
            for row in rows
            if row["model"].split("/")[0] == name and row["model"] != profile.model
        ]  # fmt: skip
        for other_name, depth, by, tok_s, matrices in found:
            said = predict(profile, model, {matrix.name: matrix.format for matrix in matrices}, depth).tok_s
            if said is not None:
                told = f"{tok_s:.1f}", f"{said:.1f}", f"{said / tok_s - 1:+.1%}"
                lines.append((profile.model, other_name, f"{depth:,}", by, *told))
    return markdown(headings, lines) if lines else MISSING


def load_profiles(folder: Path) -> list[Profile]:
    """Committed ones, by their names."""
    return [read_profile(path) for path in sorted(folder.glob("profile-*.json"))]


def load_mixtures(folder: Path) -> Rows:
    """What bench measured of one model in many mixtures, a greedy token of one sequence alone."""
    files = sorted(folder.glob("bench-mixtures-*.json"))
    rows = [row for path in files for row in json.loads(path.read_text())]
    return [row for row in rows if row["verb"] == "decode" and row["sampling"] == "greedy" and row.get("batch", 1) == 1]


def make_limit_line(rows: Rows, kernels: Rows) -> str:
    """What shares are shares of, and the fastest product beside it."""
    limits = [row["stream_gb_s"] for row in rows]
    if not limits or not kernels:
        return ""
    fastest = max(row["gb_s"] for row in kernels)
    limit = f"Read bandwidth measured in these runs: {min(limits):.0f} to {max(limits):.0f} GB/s"
    return f"\n{limit}; the fastest product alone reads {fastest:.0f} GB/s.\n"


def make_kernel_table(rows: Rows) -> str:
    """Markdown: the share of the stream limit at each size, a line for each format, card and date; and those limits."""
    shares: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        if row["shape"] in SIZES:
            shares.setdefault((row["format"], row["card"], row["date"]), {})[row["shape"]] = f"{row['share']:.1%}"
    lines = [(key[0], *(cells.get(size, "") for size in SIZES), *key[1:]) for key, cells in shares.items()]
    if not lines:
        return MISSING
    limits = {size: [row["stream_gb_s"] for row in rows if row["shape"] == size] for size in SIZES}
    told = ", ".join(f"{size} {min(found):.0f} to {max(found):.0f}" for size, found in limits.items() if found)
    return markdown(("format", *SIZES, "card", "date"), lines) + f"\nRead bandwidth measured, GB/s: {told}.\n"


def make_fidelity_table(folder: Path) -> str:
    """Markdown, a line for each trained model and road: mean KL to float32 over all recorded positions."""
    headings = ("checkpoint", "road", "positions", "KL, nats", "of which the bf16 cache", "same best token", "card")
    lines = []
    for path in sorted(folder.glob("fidelity*.json")):
        content = json.loads(path.read_text())
        if "prompts" in content:
            road, key, parts = "decoding", "kl_device", content["prompts"]
        else:
            longest = max(content["chunks"], key=lambda part: part["chunk"])
            road, key, parts = f"prompts, chunks of {longest['chunk']:,}", "kl_prompt", [longest]
        n = sum(part["n"] for part in parts)
        means = {
            name: sum(part[name] * part["n"] for part in parts) / n for name in (key, "kl_bf16_cache_only", "top1")
        }
        kl, cache = f"{means[key]:.1e}", f"{means['kl_bf16_cache_only']:.1e}"
        lines.append((content["model"], road, f"{n:,}", kl, cache, f"{means['top1']:.2%}", content["card"]))
    return markdown(headings, sorted(lines)) if lines else MISSING


def make_eviction_table(folder: Path) -> str:
    """Markdown, a line for each model and budget: what cut prompts cost, beside as many of the latest positions."""
    one = ("mean KL, nats", "median window", "same best token")
    headings = ("checkpoint", "budget", *one, *(f"latest: {what}" for what in one), "windows where it is further off")
    found: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for path in sorted(folder.glob("eviction*.json")):
        for row in json.loads(path.read_text()):
            found.setdefault((f"{row['model']}, {row['format']}", row["kv_budget"]), {})[row["keeps"]] = row
    lines = []
    for (name, budget), choices in found.items():
        chosen, latest = choices["last rows"], choices["latest"]
        pairs = list(zip(chosen["kl_of_windows"], latest["kl_of_windows"], strict=True))
        told = [
            cell
            for row in (chosen, latest)
            for cell in (
                f"{row['kl_windows']['value']:.3f} ± {row['kl_windows']['error']:.3f}",
                f"{median(row['kl_of_windows']):.3f}",
                f"{row['divergence']['same_best']['value']:.1%}",
            )
        ]
        lines.append((name, f"{budget:,}", *told, f"{sum(a < b for a, b in pairs)} of {len(pairs)}"))
    return markdown(headings, lines) if lines else MISSING


def make_tables(frontiers: dict[str, Rows]) -> dict[Path, dict[str, str]]:
    """By page and mark."""
    rows, kernels = load_rows(RESULTS), load_rows(RESULTS, "kernel")
    return {
        README: {
            "results": make_table(rows) + make_limit_line(rows, kernels),
            "prompts": make_prompt_table(load_rows(RESULTS, "prompt")),
            "serve": make_serve_table(load_rows(RESULTS, "serve")),
            "frontier": make_readme_part(frontiers),
        },
        BENCH_PAGE: {
            "results": make_kernel_table(kernels),
            "rows": make_rows_table(load_rows(RESULTS, "kernel_rows")),
        },
        PROFILE_PAGE: {"predictions": make_prediction_table(load_profiles(RESULTS), load_mixtures(RESULTS))},
        QUALITY_PAGE: {"results": make_quality_table(load_rows(RESULTS, "perplexity"))},
        FRONTIER_PAGE: {"recipes": make_recipe_table(), "results": make_frontier_sections(frontiers)},
        NUMERICS_PAGE: {"fidelity": make_fidelity_table(RESULTS), "eviction": make_eviction_table(RESULTS)},
    }


def make_pages() -> dict[Path, str]:
    """Each file that is made of results, as it should be: pages with tables, plots, the list of all results."""
    frontiers = load_frontiers(RESULTS)
    tables = make_tables(frontiers)
    pages = {path: path.read_text() for path in (README, *sorted((ROOT / "docs").glob("*.md")))}
    for path, named in tables.items():
        for name, table in named.items():
            pages[path] = with_table(pages[path], name, table)
    listed = make_results_page(RESULTS, _tabled(RESULTS), pages)
    plots = {RESULTS / name: plot for name, plot in make_plots(frontiers).items()}
    return {**{path: pages[path] for path in tables}, **plots, RESULTS_PAGE: listed}


def _tabled(folder: Path) -> dict[str, set[Path]]:
    """Pages with tables of a file's rows, by the file's name."""
    files = [path for pattern in (*FILES, "frontier*.json") for path in folder.glob(pattern)]
    found = {path.name: {TABLED[row["verb"]] for row in json.loads(path.read_text())} for path in files}
    return found | {path.name: {NUMERICS_PAGE} for name in ("fidelity*", "eviction*") for path in folder.glob(name)}


def main() -> None:
    """Rewrite what changed; plots whose results are gone go too."""
    pages = make_pages()
    for path in RESULTS.glob("*.svg"):
        if path not in pages:
            path.unlink()
    for path, text in pages.items():
        path.write_text(text)


if __name__ == "__main__":
    main()
