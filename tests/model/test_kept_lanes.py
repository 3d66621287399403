"""K=V layers keep V and the lanes of K that turn: the same model as with all of K."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from bytefloor.engine.cache import CachePlan
from bytefloor.engine.reference import Precision, ReferenceExecutor
from bytefloor.engine.score import score_chunks
from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.model import decoder
from bytefloor.model.config import Rounding
from bytefloor.model.decoder import build_step
from bytefloor.model.families import Model, load_model
from bytefloor.model.step import CacheKind, Step
from tiny import build_tiny, prompt_ids

EXACT = Precision(compute=torch.float64, weights=torch.float64)


def logits_of(step: Step, ids: list[int], chunk: int, precision: Precision = EXACT) -> Tensor:
    executor = ReferenceExecutor(step, CachePlan(256, chunk, page_size=8), precision=precision)
    executor.poison()
    return torch.cat(list(score_chunks(executor, ids, chunk)))


def plain_step(model: Model, storage: str) -> Step:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "rotated_lanes", lambda config, layer: 0)
        return build_step(model.config, model.weights, Rounding(cache=storage))


@pytest.fixture(params=["gemma4-unified", "gemma4-31b", "shared"])
def model(request: pytest.FixtureRequest, shared_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    """Tiny heads have fewer lanes that turn than a kernel takes at once."""
    monkeypatch.setattr(decoder, "PAIRS_TOGETHER", 1)
    name = request.param
    path = shared_dir / "models" / "gemma4-tiny" if name == "shared" else build_tiny(name, tmp_path).directory
    return load_model(open_checkpoint(path))


def test_logits_are_those_of_the_plain_form(model: Model) -> None:
    """In float64, as a prompt and in chunks; NaN outside the live band."""
    step, plain = build_step(model.config, model.weights, Rounding()), plain_step(model, "float32")
    assert [kind.rotated > 0 for kind in step.kinds] == [kind.window is None for kind in step.kinds]
    ids = prompt_ids(40)
    expected = logits_of(plain, ids, 40)
    for chunk in (40, 7):
        assert (logits_of(step, ids, chunk) - expected).abs().max() < 1e-9


def test_in_bf16_it_costs_what_the_plain_form_costs(model: Model) -> None:
    """V is rounded before the weight, K after it: the same size of error, not the same error."""
    step, plain = build_step(model.config, model.weights, Rounding(cache="bf16")), plain_step(model, "bf16")
    ids = prompt_ids(40)
    exact = logits_of(plain, ids, 40, Precision(torch.float64, torch.float64, rounds=False))
    costs = [(logits_of(each, ids, 40) - exact).norm() for each in (step, plain)]
    assert 0 < costs[0] < 2 * costs[1]


def test_fewer_lanes_than_a_kernel_takes_at_once_keep_all_of_k(tmp_path: Path) -> None:
    """They turn in four pairs of 16."""
    model = load_model(open_checkpoint(build_tiny("gemma4-31b", tmp_path).directory))
    assert not any(kind.rotated for kind in build_step(model.config, model.weights, Rounding(cache="bf16")).kinds)


def test_codes_keep_all_of_k(model: Model) -> None:
    for storage in ("int8", "fp8"):
        step = build_step(model.config, model.weights, Rounding(cache=storage))
        assert not any(kind.rotated for kind in step.kinds)


def test_a_position_of_gemma4_12b_takes_640_values() -> None:
    """Of 1,024: 512 of V and 2 x 64 lanes that turn."""
    assert CacheKind("global", 1, 512, None, "bf16", 128).position_bytes == 2 * 640
    assert CacheKind("global", 1, 512, None, "bf16").position_bytes == 2 * 1024
