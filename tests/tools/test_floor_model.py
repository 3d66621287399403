"""The floor model on profiles whose rule is known, and on totals that a card gave."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from bytefloor.engine.synthetic import make_checkpoint
from bytefloor.errors import RequestError
from bytefloor.model.families import load_model
from bytefloor.tools.floor_model import ALONE, file_bytes, fit, moved_bytes, predict
from bytefloor.tools.profile_data import Matrix, Profile, Span, read_profile
from bytefloor.tools.profile_parts import parts_by_kind, whole
from bytefloor.tools.profile_recipes import changes_of_formats
from bytefloor.tools.profile_spans import matrices_of
from made_profiles import Truth, made_profile

RESULTS = Path(__file__).parents[2] / "docs" / "results"
LLAMA, GEMMA = "synthetic:llama31-8b/", "synthetic:gemma4-12b/"


@pytest.fixture(scope="module")
def llama() -> Profile:
    return made_profile(LLAMA + "Q4_K_M", chunks=())


def formats(profile: Profile) -> dict[str, str]:
    return {matrix.name: matrix.format for matrix in profile.matrices}


def test_what_is_known_is_found_again() -> None:
    profile = made_profile(LLAMA + "Q4_K_M", chunks=(), truth=Truth(paces={"Q6_K": 0.9}))
    model, truth = fit(profile), Truth()
    assert model.paces == {"Q6_K": pytest.approx(0.9, rel=0.01)}
    windowless = (None, 4096)
    for kind in ("qkv", "o", "gate_up", "down"):
        assert model.boundaries[kind, "product", windowless][0][1] == pytest.approx(truth.boundaries[kind], abs=0.2)
    assert model.boundaries["head", "product", None] == ((0, pytest.approx(truth.boundaries["head"], abs=0.5)),)
    assert model.boundaries["sampling", "logits", None][0][1] == pytest.approx(truth.boundaries["sampling"])


def test_a_pace_is_of_its_format_alone() -> None:
    """A head in Q6_K that reads slowly says nothing of other formats."""
    slow = made_profile(LLAMA + "Q4_K_M", (0,), (), Truth(paces={"Q6_K": 0.8}))
    other = made_profile(LLAMA + "Q8_0", (0,), ())
    found = predict(slow, fit(slow), formats(other))
    assert found.us == pytest.approx(other.tokens[0].wall_us, rel=0.01)


def test_what_kernels_beside_attention_take_more_at_a_depth_stays_theirs() -> None:
    """The cache that attention fetches early passes beside q, k and v, at whatever depth and in whatever format."""
    later = {**Truth().boundaries, "qkv": 5.9}

    def both(mixture: str) -> Profile:
        shallow, deep = (made_profile(LLAMA + mixture, (depth,), (), Truth(boundaries=boundaries))
                         for depth, boundaries in ((0, Truth().boundaries), (4096, later)))  # fmt: skip
        return replace(shallow, steps=(*shallow.steps, *deep.steps))

    fitted, other = both("Q4_K_M"), both("Q8_0")
    model = fit(fitted)
    for token in other.tokens:
        assert predict(fitted, model, formats(other), token.depth).us == pytest.approx(token.wall_us, rel=2e-3)
    between = predict(fitted, model, None, 2048).us
    ends = [token.wall_us for token in fitted.tokens]
    assert between == pytest.approx(sum(ends) / 2, rel=2e-3)
    # A launch that reads no cache takes no more beyond the last depth; attention itself reads on.
    span = next(span for span in fitted.tokens[0].spans if span.kind == "qkv")
    assert model.span_us(span, 100_000) == model.span_us(span, 4096)
    parts = {part.name: part for part in parts_by_kind(fitted, fitted.tokens[1], model)}
    assert parts["qkv"].residual_us == pytest.approx(0, abs=1)


def test_a_profile_is_its_own_prediction(llama: Profile) -> None:
    model = fit(llama)
    for token in llama.tokens:
        prediction = predict(llama, model, None, token.depth)
        assert prediction.us == pytest.approx(token.wall_us, rel=1e-3)
        assert prediction.needed_bytes == token.needed_bytes
        parts = [*parts_by_kind(llama, token, model), whole(llama, token, model)]
        assert all(abs(part.residual_us) < 0.002 * token.wall_us for part in parts)
        assert sum(part.residual_us for part in parts[:-1]) == pytest.approx(parts[-1].residual_us, abs=1e-6)


@pytest.mark.parametrize("name", ["llama31-8b", "gemma4-12b", "gemma4-e4b"])
@pytest.mark.parametrize("mixture", ["Q8_0", "BF16", "MLX-4bit", "FP4"])
def test_another_format_is_predicted_from_its_bytes(name: str, mixture: str) -> None:
    """Also where tables and head have formats of their own, and on a model whose per-layer matrices are small."""
    fitted, other = (made_profile(f"synthetic:{name}/{m}", (0, 4096), ()) for m in ("Q4_K_M", mixture))
    model = fit(fitted)
    for token in other.tokens:
        prediction = predict(fitted, model, formats(other), token.depth)
        assert prediction.needed_bytes == token.needed_bytes
        assert prediction.us == pytest.approx(token.wall_us, rel=0.01)


def test_depths_between_those_measured_and_beyond(llama: Profile) -> None:
    model = fit(llama)
    for depth in (1000, 20000, 65536):
        true = made_profile(LLAMA + "Q4_K_M", (depth,), ()).tokens[0]
        assert predict(llama, model, None, depth).us == pytest.approx(true.wall_us, rel=1e-3)
    # Of one depth alone the rest is taken for as fast as the limit allows.
    shallow = made_profile(LLAMA + "Q4_K_M", (0,), ())
    deep = llama.tokens[-1]
    assert predict(shallow, fit(shallow), None, deep.depth).us == pytest.approx(deep.wall_us, rel=1e-3)


def test_a_window_ends_what_attention_reads() -> None:
    gemma = made_profile(GEMMA + "Q4_K_M", (0, 4096, 32768), ())
    assert len({key for key in fit(gemma).boundaries if key[0] == "attention"}) == 2
    near, far = (predict(gemma, fit(gemma), None, depth).needed_bytes for depth in (4096, 8192))
    # 8 of 48 layers see everything: values of one head of 512 lanes, and 128 more of its keys, in bf16.
    assert far - near == 4096 * 8 * 2 * (512 + 128)


def test_a_smaller_cache_costs_less_where_it_is_long(llama: Profile) -> None:
    model = fit(llama)
    bf16, int8 = (predict(llama, model, None, 32768, kv) for kv in ("bf16", "int8"))
    assert bf16.needed_bytes - int8.needed_bytes == 32769 * 32 * 8 * (2 * 128 * 2 - 2 * (128 + 2))
    assert int8.us < 0.9 * bf16.us


def test_noise_and_hiccups_do_not_move_it(llama: Profile) -> None:
    generator = random.Random(1)

    def odd(span: Span) -> float:
        noise = generator.uniform(-0.1, 0.1)
        return 40.0 if span.layer in (3, 20) and span.kind == "down" else noise

    noisy = made_profile(LLAMA + "Q4_K_M", (0,), (), Truth(odd=odd))
    clean, found = fit(llama), fit(noisy)
    for key, curve in clean.boundaries.items():
        assert found.boundaries[key][0][1] == pytest.approx(curve[0][1], abs=0.3)
    token = noisy.tokens[0]
    parts = {part.name: part for part in parts_by_kind(noisy, token, found)}
    assert parts["down"].residual_us == pytest.approx(2 * 40, abs=3)


def test_a_short_head_says_nothing_of_a_pace() -> None:
    small = made_profile("synthetic:smollm2-135m/Q8_0", (0,), (), Truth(paces={"Q8_0": 0.8}))
    assert fit(small).paces == {"Q8_0": pytest.approx(0.8, rel=0.05)}
    token = small.tokens[0]
    headless = replace(token, spans=tuple(span for span in token.spans if span.kind != "head"))
    assert fit(replace(small, steps=(headless,))).paces == {}
    qkv_bytes = next(span.moved_bytes for span in token.spans if span.kind == "qkv")
    short = tuple(replace(s, moved_bytes=3 * qkv_bytes) if s.kind == "head" else s for s in token.spans)
    assert fit(replace(small, steps=(replace(token, spans=short),))).paces == {}


def test_without_a_token_there_is_no_model(llama: Profile) -> None:
    chunks = made_profile("synthetic:smollm2-135m/Q4_K_M", (), (64,))
    with pytest.raises(RequestError, match=r"without a token \(-d\)"):
        fit(chunks)


def test_what_is_stored_changes_nothing_for_the_reference_executor(llama: Profile) -> None:
    reference = replace(llama, executor="reference")
    model = fit(reference)
    others = {matrix.name: "Q8_0" for matrix in llama.matrices}
    assert predict(reference, model, others).us is None
    assert predict(reference, model, None, 0, "int8").us is None
    assert predict(reference, model, others).floor_us > predict(reference, model).floor_us
    assert predict(reference, model).us == pytest.approx(llama.tokens[0].wall_us, rel=1e-3)


def test_a_format_without_kernels_has_a_floor_and_no_prediction(llama: Profile) -> None:
    others = {matrix.name: "IQ1_S" for matrix in llama.matrices}
    found = predict(llama, fit(llama), others)
    assert found.us is None
    assert found.tok_s is None
    assert found.floor_tok_s > 2000


@pytest.mark.parametrize("mixture", ["Q4_K_M", "Q8_0", "BF16", "MLX-4bit", "FP4", "FP8"])
def test_bytes_of_a_format_are_those_of_files_and_of_the_packed_matrix(mixture: str) -> None:
    found = matrices_of(load_model(make_checkpoint(LLAMA + mixture, "cpu")))
    other = matrices_of(load_model(make_checkpoint(LLAMA + "Q4_0", "cpu"))) if mixture == "Q4_0" else found
    for matrix in other:
        stranger = replace(matrix, format="F32", n_bytes=0)
        assert file_bytes(stranger, matrix.format) == pytest.approx(matrix.n_bytes, rel=1e-3)
        assert moved_bytes(matrix, matrix.format) >= matrix.n_bytes * 0.999


def test_rows_of_no_whole_tile_are_packed_with_more() -> None:
    assert moved_bytes(Matrix("head", 100, 256, "Q8_0", 0), "Q8_0") == 112 * 256 * 34 // 32


def test_what_formats_cost_alone_is_what_the_card_showed() -> None:
    by_shape: dict[str, dict[str, dict]] = defaultdict(dict)
    for row in json.loads((RESULTS / "kernels-h200-2026-11-29.json").read_text()):
        by_shape[row["format"]][row["shape"]] = row
    slopes, starts = {}, {}
    for name, rows in by_shape.items():
        short, long = rows["75MB"], rows["500MB"]
        slopes[name] = (long["us"] - short["us"]) / (long["moved_bytes"] - short["moved_bytes"])
        starts[name] = short["us"] - slopes[name] * short["moved_bytes"]
    assert ALONE.keys() == by_shape.keys()
    for name, (pace, start) in ALONE.items():
        assert pace == pytest.approx(min(1.0, slopes["BF16"] / slopes[name]), abs=0.0051)
        assert start == pytest.approx(starts[name] - starts["BF16"], abs=0.1)


# --- what a card has measured


@cache
def measured(mixture: str) -> Profile:
    return read_profile(RESULTS / f"profile-gemma4-12b-{mixture}-h200.json")


@pytest.mark.parametrize(
    ("fitted", "other", "misses"),
    [
        ("Q4_K_M", "Q8_0", {0: 0.03, 32768: 0.03}),
        # Not within 5 %: what a format with fewer bits takes more at each boundary is not seen in this one.
        ("Q8_0", "Q4_K_M", {0: 0.051, 8192: 0.072, 32768: 0.051}),
        ("Q4_K_M", "Q4_K_M", {0: 0.01, 8192: 0.01, 32768: 0.01}),
        ("Q8_0", "Q8_0", {0: 0.01, 32768: 0.01}),
    ],
)
def test_one_profile_predicts_another(fitted: str, other: str, misses: dict[int, float]) -> None:
    model = fit(measured(fitted))
    assert [token.depth for token in measured(other).tokens] == list(misses)
    for token in measured(other).tokens:
        found = predict(measured(fitted), model, formats(measured(other)), token.depth)
        assert found.needed_bytes == token.needed_bytes
        assert found.tok_s == pytest.approx(1e6 / token.wall_us, rel=misses[token.depth])


def test_what_would_change_it_is_what_was_measured() -> None:
    profile, other = measured("Q4_K_M"), measured("Q8_0")
    (change,) = [one for one in changes_of_formats(profile, fit(profile)) if one.name == "Q8_0"]
    for found, token in zip((change.shallow, change.deep), other.tokens, strict=True):
        assert found.needed_bytes == token.needed_bytes
        assert found.tok_s == pytest.approx(1e6 / token.wall_us, rel=0.03)


def test_what_o_fetches_early_passes_beside_attention() -> None:
    """Of two formats the sum of both launches differs by o's bytes at the limit; each alone does not."""

    def mean_us(mixture: str, kind: str) -> float:
        links = measured(mixture).tokens[0].links_by_kind()[kind]
        return sum(link.us for link in links) / len(links)

    def bytes_us(mixture: str) -> float:
        links = measured(mixture).tokens[0].links_by_kind()["o"]
        return sum(link.span.moved_bytes for link in links) / len(links) / measured(mixture).stream_gb_s / 1e3

    more = bytes_us("Q8_0") - bytes_us("Q4_K_M")
    both = [mean_us(mixture, "attention") + mean_us(mixture, "o") for mixture in ("Q4_K_M", "Q8_0")]
    assert both[1] - both[0] == pytest.approx(more, abs=0.3)
    assert mean_us("Q8_0", "attention") - mean_us("Q4_K_M", "attention") > 0.8


@pytest.mark.parametrize(
    "mixture",
    ["Q8_0", "BF16", "MLX-4bit", "MLX-4bit-MLP-8bit", "MLX-4bit-down-8bit", "MLX-4bit-MLP-g32", "FP4", "NVFP4", "FP8"],
)
def test_mixtures_that_bench_has_measured(mixture: str) -> None:
    """Of Gemma 4 12B, by the profile of Q4_K_M: another day, another stream limit, whole tokens alone."""
    rows = json.loads((RESULTS / "bench-mixtures-h200-2026-11-29.json").read_text())
    (row,) = [
        row for row in rows
        if (row["model"], row["sampling"], row["depth"]) == (f"gemma4-12b/{mixture}", "greedy", 0)
    ]  # fmt: skip
    other = matrices_of(load_model(make_checkpoint(GEMMA + mixture, "cpu")))
    profile = measured("Q4_K_M")
    found = predict(profile, fit(profile), {matrix.name: matrix.format for matrix in other})
    assert found.tok_s == pytest.approx(row["tok_s"], rel=0.05)
