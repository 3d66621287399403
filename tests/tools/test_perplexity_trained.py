"""perplexity of trained checkpoints against llama.cpp and `transformers`, and through the kernels' twins."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import kernel_twins
from bytefloor.engine import loading
from bytefloor.engine.batch import Batch
from bytefloor.engine.device import DeviceExecutor
from bytefloor.engine.synthetic import SHAPES, Shape, make_checkpoint, with_tokenizer
from bytefloor.files.stored import Checkpoint
from bytefloor.tools import scoring
from bytefloor.tools.perplexity import PerplexityOptions, measure
from bytefloor.tools.perplexity_view import lines_of

N_CHUNKS = 2
"""Of 16: all of them take a minute and more. docs/results/perplexity-cpu-*.json has what they give."""
OPTIONS = PerplexityOptions(n_windows=N_CHUNKS, device="cpu")
CPU = torch.device("cpu")
BY_TRANSFORMERS = {"smollm2_path": 21.092617789500554, "gemma3_270m_path": 18.3858189874463}
"""Of the first two chunks, in float32, by transformers 5.24 and accelerate 1.15 (gguf_file=...), which take another
minute and packages that nothing else here needs."""
RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"


@pytest.fixture(scope="module")
def text(shared_dir: Path) -> str:
    """What the recorded values are of."""
    return (shared_dir / "data" / "eval.txt").read_bytes()[:60000].decode()


def recorded(shared_dir: Path, file: str) -> dict[str, Any]:
    rows = json.loads((shared_dir / "golden" / "perplexity.json").read_text())["rows"]
    (row,) = [row for row in rows if row["file"].lower() == file.lower()]
    return row


@pytest.mark.parametrize("fixture", list(BY_TRANSFORMERS))
def test_running_values_are_those_of_llama_cpp(
    request: pytest.FixtureRequest, shared_dir: Path, text: str, fixture: str
) -> None:
    """Within 1 %: it rounds activations to 8 bits. The second value is that of `transformers`, within 0.1 %."""
    path = request.getfixturevalue(fixture)
    row = measure(str(path), text, OPTIONS)
    assert row.running == pytest.approx(recorded(shared_dir, path.name)["running"][:N_CHUNKS], rel=0.01)
    assert row.running[1] == pytest.approx(BY_TRANSFORMERS[fixture], rel=1e-3)
    assert row.n_predictions == 255 * N_CHUNKS


def test_all_sixteen_values_as_committed(shared_dir: Path) -> None:
    """docs/results has what this computes, and what llama.cpp computed."""
    (newest, *_) = sorted(RESULTS.glob("perplexity-cpu-2*.json"), reverse=True)
    rows = {row["format"]: row for row in json.loads(newest.read_text()) if row["divergence"] is None}
    files = {"Q4_1": "SmolLM2-135M-Instruct.Q4_1.gguf", "Q8_0": "gemma-3-270m-q4_k_m.gguf"}
    for name, file in files.items():
        expected, found = recorded(shared_dir, file), rows[name]
        assert (len(found["running"]), found["n_predictions"], found["context"]) == (16, 4080, 512)
        assert found["running"] == pytest.approx(expected["running"], rel=0.01)
        assert found["perplexity"]["error"] == pytest.approx(expected["stderr"], rel=0.01)


@pytest.mark.parametrize("name", ["gemma4-tiny", "gemma4-tiny-e"])
def test_perplexity_is_that_of_transformers(shared_dir: Path, text: str, name: str) -> None:
    path = shared_dir / "models" / name
    row = measure(str(path), text, OPTIONS)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = scoring.open_source(str(path)).tokenizer.encode(text)
    nll = []
    for i in range(N_CHUNKS):
        chunk = torch.tensor([2, *ids[512 * i + 1 : 512 * (i + 1)]])
        with torch.inference_mode():
            logits = model(input_ids=chunk[None]).logits[0, 256:511].double()
        nll.append(torch.nn.functional.cross_entropy(logits, chunk[257:512], reduction="none"))
        assert row.running[i] == pytest.approx(math.exp(torch.cat(nll).mean()), rel=1e-3)


# --- on a device


TINY = Shape("llama", 256, 512, 2, 8, 2, 64, 272, 256, False, {"rope.freq_base": 1e4})


@pytest.fixture
def twins(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A CPU that the executor takes for a device with kernels, and a model of random weights; the rows of each step."""
    device, seen = kernel_twins.TwinDevice(), list[int]()
    device.install(monkeypatch)
    monkeypatch.setitem(SHAPES, "tiny", TINY)

    def make(model: Any, room: Any, where: Any, **more: Any) -> tuple[DeviceExecutor, tuple[str, ...]]:
        step = loading.build_step(model.config, model.weights, loading.DEVICE_ROUNDING)
        executor = DeviceExecutor(step, room.plan(loading.KERNEL_CHUNK), device="cpu")
        device.know(executor)
        run = executor.run

        def watched(batch: Batch) -> torch.Tensor:
            seen.append(len(batch.tokens))
            return run(batch)

        executor.run = watched  # type: ignore[method-assign,assignment]
        return executor, ()

    def opened(path: Path) -> Checkpoint:
        return with_tokenizer(make_checkpoint(str(path), CPU))

    monkeypatch.setattr(scoring, "open_checkpoint", opened)
    monkeypatch.setattr(scoring, "find_model", lambda name: Path(name))
    monkeypatch.setattr(scoring, "make_executor", make)
    return seen


def test_by_token_goes_through_the_graph_of_decoding(twins: list[int]) -> None:
    """A row a step; the same numbers as many rows at once, but for what these round to bf16."""
    options = PerplexityOptions(context=40, n_windows=2, device="cpu")
    letters = "".join(chr(65 + i * i % 26) for i in range(200))
    chunk = measure("synthetic:tiny/Q8_0", letters, options)
    assert twins == 2 * [39]
    twins.clear()
    token = measure(
        "synthetic:tiny/Q8_0", letters, PerplexityOptions(context=40, n_windows=2, by="token", device="cpu")
    )
    assert twins == 2 * 39 * [1]
    assert (chunk.executor, token.executor, token.kv) == ("kernels", "kernels", "bf16")
    assert token.perplexity.value == pytest.approx(chunk.perplexity.value, rel=1e-2)
    assert token.perplexity.value != chunk.perplexity.value
    assert "by token; cache bf16; kernels on cpu" in lines_of(token)[1]
