"""The floor model on profiles whose rule is known, and on totals that a card gave."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from bytefloor.engine.synthetic import make_checkpoint
from bytefloor.errors import RequestError
from bytefloor.model.families import load_model
from bytefloor.tools.floor_model import ALONE, file_bytes, fit, moved_bytes, predict
from bytefloor.tools.profile_data import Matrix, Profile, Span
from bytefloor.tools.profile_parts import parts_by_kind, whole
from bytefloor.tools.profile_spans import matrices_of
from made_profiles import Truth, made_profile

RESULTS = Path(__file__).parents[2] / "docs" / "results"
LLAMA, GEMMA = "synthetic:llama31-8b/", "synthetic:gemma4-12b/"


@pytest.fixture(scope="module")
def llama() -> Profile:
    return made_profile(LLAMA + "Q4_K_M", chunks=())


def formats(profile: Profile) -> dict[str, str]:
    return {matrix.name: matrix.format for matrix in profile.matrices}


def test_what_is_known_is_found_again(llama: Profile) -> None:
    model, truth = fit(llama), Truth()
    assert model.efficiency == pytest.approx(truth.efficiency, rel=0.01)
    assert model.starts == pytest.approx(truth.starts, abs=0.05)
    for kind in ("qkv", "o", "gate_up", "down", "head"):
        assert model.boundaries_us[kind, "product"] == pytest.approx(truth.boundaries[kind], abs=0.2)
    assert model.boundaries_us["sampling", "logits"] == pytest.approx(truth.boundaries["sampling"])


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
    assert len(fit(gemma).curves) == 2
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
    for key, us in clean.boundaries_us.items():
        assert found.boundaries_us[key] == pytest.approx(us, abs=0.3)
    token = noisy.tokens[0]
    parts = {part.name: part for part in parts_by_kind(noisy, token, found)}
    assert parts["down"].residual_us == pytest.approx(2 * 40, abs=3)


def test_a_short_head_says_nothing_of_the_efficiency() -> None:
    small = made_profile("synthetic:smollm2-135m/Q4_K_M", (0,), (), Truth(efficiency=0.8))
    assert fit(small).efficiency == pytest.approx(0.8, rel=0.05)
    tiny = replace(small.tokens[0], spans=tuple(span for span in small.tokens[0].spans if span.kind != "head"))
    assert fit(replace(small, steps=(tiny,))).efficiency == 1.0


def test_starts_are_halved_where_nothing_tells_them_apart() -> None:
    assert fit(made_profile(LLAMA + "Q8_0", (0,), ())).starts == 0.5


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


@pytest.mark.parametrize(
    ("mixture", "miss"),
    [
        ("Q8_0", 0.05), ("BF16", 0.05), ("MLX-4bit", 0.05), ("MLX-4bit-MLP-8bit", 0.05), ("MLX-4bit-down-8bit", 0.05),
        ("MLX-4bit-MLP-g32", 0.05), ("FP4", 0.05), ("NVFP4", 0.05), ("FP8", 0.05),
    ],
)  # fmt: skip
def test_mixtures_that_a_card_has_measured(mixture: str, miss: float) -> None:
    """Of Gemma 4 12B, whole tokens alone: launches of Q4_K_M get as long as its token was, then the others follow.

    What a launch waits for is split by guess, which does not matter for what all of them take together.
    """
    rows = json.loads((RESULTS / "bench-mixtures-h200-2026-11-29.json").read_text())
    measured = {
        row["model"]: 1e6 / row["tok_s"]
        for row in rows
        if row["sampling"] == "greedy" and row["depth"] == 0 and row.get("batch", 1) == 1
    }
    quick = Truth(efficiency=1.0, gb_s=4700.0, overhead=0.0, starts=0.5)
    token = made_profile(GEMMA + "Q4_K_M", (0,), (), quick).tokens[0]
    more = (measured["gemma4-12b/Q4_K_M"] - token.wall_us) / len(token.spans)
    slow = replace(quick, boundaries={kind: us + more for kind, us in quick.boundaries.items()})
    fitted = made_profile(GEMMA + "Q4_K_M", (0,), (), slow)
    assert fitted.tokens[0].wall_us == pytest.approx(measured["gemma4-12b/Q4_K_M"], rel=1e-4)
    other = matrices_of(load_model(make_checkpoint(GEMMA + mixture, "cpu")))
    found = predict(fitted, fit(fitted), {matrix.name: matrix.format for matrix in other})
    assert found.us == pytest.approx(measured[f"gemma4-12b/{mixture}"], rel=miss)
