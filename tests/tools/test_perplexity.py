"""perplexity: windows against loops, models against `transformers`, and what is refused."""

from __future__ import annotations

import io
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

from bytefloor.cli import app
from bytefloor.engine.reference import ReferenceExecutor
from bytefloor.errors import NumericalError, RequestError
from bytefloor.model import decoder
from bytefloor.tools import perplexity_view, scoring
from bytefloor.tools.perplexity import PerplexityOptions, PerplexityRow, measure
from bytefloor.tools.scoring import Source, open_source
from bytefloor.tools.windows import Window, cut_in_chunks, cut_with_stride, digest, first_windows
from tiny import TinyModel, build_tiny, reference_logits
from tools.test_conversation import TEMPLATE

TEXT = "The quick brown fox jumps over the lazy dog, again and again, in the rain. " * 6
CHUNKS = PerplexityOptions(context=64, device="cpu")
NO_BOS = {"add_bos_token": False}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Gemma: begins with BOS, slides, caps its logits."""
    return build_tiny("gemma3", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """The same in bf16."""
    return build_tiny("gemma3", tmp_path_factory.mktemp("tiny"), torch.bfloat16)


def without_bos(tiny: TinyModel, folder: Path) -> Path:
    shutil.copytree(tiny.directory, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, **NO_BOS}))
    return folder


def ids_of(path: Path, text: str = TEXT) -> list[int]:
    return open_source(str(path)).tokenizer.encode(text)


def log_probabilities(model: TinyModel, window: list[int]) -> torch.Tensor:
    return reference_logits(model, window).double().log_softmax(-1)


def chunks_by_hand(ids: list[int], n: int, bos: int | None) -> Iterator[tuple[list[int], list[int]]]:
    """Each chunk, and which of its positions count."""
    for i in range(len(ids) // n):
        chunk = ids[i * n : (i + 1) * n]
        yield [chunk[0] if bos is None else bos, *chunk[1:]], list(range(n // 2 + 1, n))


def nll_by_hand(model: TinyModel, windows: Iterator[tuple[list[int], list[int]]]) -> list[float]:
    found = []
    for ids, targets in windows:
        log_p = log_probabilities(model, ids)
        found += [-float(log_p[t - 1, ids[t]]) for t in targets]
    return found


# --- windows


@pytest.mark.parametrize("bos", [None, 999])
@pytest.mark.parametrize(("n", "context"), [(512, 512), (1300, 512), (100, 7), (96, 8)])
def test_chunks_are_those_of_the_protocol(n: int, context: int, bos: int | None) -> None:
    ids = list(range(n))
    windows = cut_in_chunks(ids, context, bos)
    assert [(window.ids, list(window.targets)) for window in windows] == list(chunks_by_hand(ids, context, bos))
    assert len(windows) == n // context
    if context == 512:
        assert (windows.targets[0], windows.targets[-1], len(windows.targets)) == (257, 511, 255)


@pytest.mark.parametrize("bos", [None, 999])
@pytest.mark.parametrize(
    ("n", "context", "stride"), [(100, 16, 4), (101, 16, 4), (104, 16, 4), (17, 16, 15), (40, 8, 1)]
)
def test_strides_are_those_of_the_protocol(n: int, context: int, stride: int, bos: int | None) -> None:
    """As llama.cpp counts: chunk i starts at i * stride; rows j from context - stride - 1 predict start + j + 1."""
    ids, expected = list(range(n)), []
    for i in range((n - context + stride - 1) // stride):
        shown = ids[i * stride : i * stride + context]
        if bos is not None:
            shown[0] = bos
        expected.append((shown, [j + 1 for j in range(context - stride - 1, context - 1)]))
    found = cut_with_stride(ids, context, stride, bos)
    assert [(window.ids, list(window.targets)) for window in found] == expected
    assert len(found) == len(expected)


def test_texts_and_numbers_that_make_no_window_are_refused() -> None:
    ids = list(range(63))
    with pytest.raises(RequestError, match="the text has 63 tokens, expected at least 64"):
        cut_in_chunks(ids, 64, None)
    with pytest.raises(RequestError, match="the text has 63 tokens, expected at least 64"):
        cut_with_stride(ids, 63, 8, None)
    with pytest.raises(RequestError, match="-c 3: expected at least 4"):
        cut_in_chunks(ids, 3, None)
    for stride in (0, 16):
        with pytest.raises(RequestError, match=f"--stride {stride}: expected 1 to 15"):
            cut_with_stride(ids, 16, stride, None)
    windows = cut_in_chunks(ids, 8, None)
    with pytest.raises(RequestError, match="--chunks 0: expected at least 1"):
        first_windows(windows, 0)
    assert [len(first_windows(windows, n)) for n in (1, 7, 8, None)] == [1, 7, 7, 7]


def test_a_digest_is_of_every_token_and_of_which_count() -> None:
    windows = [Window([1, 2, 3], [1, 2], "a"), Window([4, 5], [1], "b")]
    assert digest(windows) == digest([replace(windows[0], name="x"), windows[1]])
    others = [
        [Window([1, 2, 4], [1, 2], "a"), windows[1]],
        [Window([1, 2, 3], [2], "a"), windows[1]],
        [Window([1, 2, 3, 1], [2], "a"), windows[1]],
        windows[:1],
    ]
    assert len({digest(each) for each in [windows, *others]}) == 5


# --- models


@pytest.mark.parametrize("by", ["chunk", "token"])
def test_perplexity_of_chunks_is_that_of_transformers(tiny: TinyModel, by: str) -> None:
    ids = ids_of(tiny.directory)
    expected = nll_by_hand(tiny, chunks_by_hand(ids, 64, 2))
    told: list[tuple[int, int, float]] = []
    row = measure(str(tiny.directory), TEXT, replace(CHUNKS, by=by), lambda *each: told.append(each))
    assert (row.n_windows, row.n_predictions, row.bos, row.protocol, row.by) == (
        len(ids) // 64,
        len(expected),
        True,
        "chunks",
        by,
    )
    assert row.perplexity.value == pytest.approx(math.exp(np.mean(expected)), rel=1e-4)
    error = math.exp(np.mean(expected)) * np.std(expected, ddof=1) / math.sqrt(len(expected))
    assert row.perplexity.error == pytest.approx(error, rel=1e-3)
    running = [math.exp(np.mean(expected[: 31 * (i + 1)])) for i in range(row.n_windows)]
    assert row.running == pytest.approx(running, rel=1e-4)
    assert told == [(i + 1, row.n_windows, each) for i, each in enumerate(row.running)]
    assert row.divergence is None


def test_a_model_that_wants_no_bos_gets_none(tiny: TinyModel, tmp_path: Path) -> None:
    """Q04: the file's rule; with the other the number is another."""
    path = without_bos(tiny, tmp_path / "plain")
    options = replace(CHUNKS, context=16)
    row = measure(str(path), TEXT, options)
    expected = nll_by_hand(tiny, chunks_by_hand(ids_of(path), 16, None))
    assert row.bos is False
    assert row.perplexity.value == pytest.approx(math.exp(np.mean(expected)), rel=1e-4)
    assert abs(row.perplexity.value / measure(str(tiny.directory), TEXT, options).perplexity.value - 1) > 1e-3


def test_perplexity_of_strides_is_that_of_transformers(tiny: TinyModel) -> None:
    row = measure(str(tiny.directory), TEXT, replace(CHUNKS, stride=24, n_windows=5))
    ids = ids_of(tiny.directory)
    windows = (([2, *ids[24 * i + 1 : 24 * i + 64]], list(range(40, 64))) for i in range(5))
    expected = nll_by_hand(tiny, windows)
    assert row.perplexity.value == pytest.approx(math.exp(np.mean(expected)), rel=1e-4)
    assert (row.protocol, row.stride, row.n_windows, row.n_predictions) == ("stride", 24, 5, 120)


@pytest.mark.parametrize("most", [scoring.LOGITS_BYTES, 4 * 283 * 7], ids=["whole", "seven-rows"])
@pytest.mark.parametrize("way", ["model", "saved"])
def test_divergence_is_that_of_transformers(
    tiny: TinyModel, other: TinyModel, way: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = str(tiny.directory)
    if way == "saved":
        base = str(tmp_path / "base")
        measure(str(tiny.directory), TEXT, replace(CHUNKS, save_base=Path(base)))
    # However rows are cut into steps and blocks, also otherwise than when the base was saved.
    monkeypatch.setattr(scoring, "LOGITS_BYTES", most)
    monkeypatch.setattr(scoring, "BLOCK", 5)
    found = measure(str(other.directory), TEXT, replace(CHUNKS, base=base)).divergence
    assert found is not None
    kl, dp = [], []
    for ids, targets in chunks_by_hand(ids_of(tiny.directory), 64, 2):
        p, q = (log_probabilities(model, ids)[targets[0] - 1 : -1] for model in (tiny, other))
        kl += (p.exp() * (p - q)).sum(-1).tolist()
        right = torch.tensor(ids[targets[0] :])[:, None]
        dp += (q.gather(1, right).exp() - p.gather(1, right).exp()).flatten().tolist()
    assert found.kl.value == pytest.approx(np.mean(kl), rel=2e-2)
    assert found.kl_percentiles["99"] == pytest.approx(np.percentile(kl, 99), rel=2e-2)
    assert found.p_difference.value == pytest.approx(np.mean(dp), abs=2e-6)
    assert found.base_perplexity.value == pytest.approx(
        measure(str(tiny.directory), TEXT, CHUNKS).perplexity.value, rel=1e-6
    )


@pytest.mark.parametrize("by", ["chunk", "token"])
def test_a_file_beside_itself(tiny: TinyModel, by: str, tmp_path: Path) -> None:
    path, options = str(tiny.directory), replace(CHUNKS, by=by, n_windows=2)
    found = measure(path, TEXT, replace(options, base=path)).divergence
    assert found is not None
    assert (found.kl.value, found.kl.error, found.kl_largest) == (0, 0, 0)
    assert (found.same_best.value, found.ratio.value, found.ratio.error, found.p_difference_rms.value) == (1, 1, 0, 0)
    measure(path, TEXT, replace(options, save_base=tmp_path / "base"))
    saved = measure(path, TEXT, replace(options, base=str(tmp_path / "base"))).divergence
    assert saved is not None
    assert 0 <= saved.kl.value < 1e-7
    assert (saved.same_best.value, saved.ratio.value) == (1, 1)


def test_a_base_with_shorter_steps_sets_those_of_both(tiny: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one may run on kernels and the other on the reference executor; sliding layers hold no longer step."""
    path, make, chunks = str(tiny.directory), scoring.make_executor, iter([64, 11])

    def shorter(model: Any, room: Any, *args: Any, **more: Any) -> Any:
        return make(model, replace(room, chunk=next(chunks)), *args, **more)

    monkeypatch.setattr(scoring, "make_executor", shorter)
    found = measure(path, TEXT, replace(CHUNKS, base=path, n_windows=1)).divergence
    assert found is not None
    assert found.kl.value == 0


def test_what_a_cache_of_codes_costs(tiny: TinyModel) -> None:
    """S13: the base keeps what it keeps by default."""
    path = str(tiny.directory)
    rows = {kv: measure(path, TEXT, replace(CHUNKS, kv=kv, base=path, n_windows=3)) for kv in ("bf16", "int8", "fp8")}
    assert [row.kv for row in rows.values()] == ["bf16", "int8", "fp8"]
    kl = {kv: row.divergence.kl.value for kv, row in rows.items() if row.divergence is not None}
    assert 0 < kl["bf16"] < kl["int8"] < kl["fp8"] < 0.1


def test_what_a_cache_of_coded_pages_costs(tiny: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of 192 sees codes only where fewer positions are recent; the same ones row by row."""
    path = str(tiny.directory)
    options = replace(CHUNKS, kv="k4v2", n_windows=1, context=192, base=path)
    whole = measure(path, TEXT, options)
    monkeypatch.setattr(decoder, "RECENT", 16)
    monkeypatch.setattr(decoder, "FIRST", 0)
    by_chunk, by_token = (measure(path, TEXT, replace(options, by=by)) for by in ("chunk", "token"))
    costs = [row.divergence.kl.value for row in (whole, by_chunk, by_token) if row.divergence is not None]
    assert {row.kv for row in (whole, by_chunk)} == {"k4v2"}
    assert costs[1] > 30 * costs[0] > 0
    assert costs[2] == pytest.approx(costs[1], rel=0.05)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_fail_with_position_and_token(
    tiny: TinyModel, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q04: NaN = fail."""
    real, n_runs = ReferenceExecutor.run, iter(range(99))

    def broken(self: ReferenceExecutor, batch: Any, observe: Any = None) -> torch.Tensor:
        logits = real(self, batch).clone()
        if next(n_runs) == 1:
            logits[5, 7] = value
        return logits

    monkeypatch.setattr(ReferenceExecutor, "run", broken)
    ids = ids_of(tiny.directory)
    token = ids[64 + 37]
    text = open_source(str(tiny.directory)).tokenizer.token_text(token)
    what = "NaN" if math.isnan(value) else "infinity"
    words = (
        f"gemma3: window 2, from token 64 of the text on, position 37, token {token} '{text}': the logits hold {what}"
    )
    with pytest.raises(NumericalError, match=words):
        measure(str(tiny.directory), TEXT, CHUNKS)


def test_a_model_that_says_nothing_is_refused(tiny: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """K13."""
    monkeypatch.setattr(ReferenceExecutor, "run", lambda self, batch, observe=None: torch.zeros(len(batch.wanted), 283))
    with pytest.raises(NumericalError, match="the same probability"):
        measure(str(tiny.directory), TEXT, CHUNKS)


def test_bases_that_were_asked_something_else_are_refused(
    tiny: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, base = str(tiny.directory), tmp_path / "base"
    options = replace(CHUNKS, n_windows=2)
    measure(path, TEXT, replace(options, save_base=base))

    def refused(words: str, text: str = TEXT, model: str = path, **more: Any) -> None:
        with pytest.raises(RequestError, match=words):
            measure(model, text, replace(options, **({"base": str(base)} | more)))

    refused("digest of the text, or of the tokens made of it, was", TEXT.replace("fox", "cat"))
    refused("-c was 64 when it was saved, and is 32 now", context=32)
    refused("protocol was chunks when it was saved, and is stride now", stride=8)
    refused("--chunks. was 62 when it was saved, and is 93 now", n_windows=3)
    plain = str(without_bos(tiny, tmp_path / "plain"))
    refused("digest", model=plain)
    refused("plain: its tokenizer or template makes other tokens of this text", base=plain)
    monkeypatch.setattr(Source, "n_vocabulary", property(lambda self: 300 if self.name == "plain" else 283))
    refused("plain: a vocabulary of 300 rows, that of gemma3 has 283", base=plain)
    refused("vocabulary's size was 283 when it was saved, and is 300 now", model=plain)
    refused("both --base and --save-base", save_base=base)


def test_a_measurement_that_fails_leaves_no_base(
    tiny: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReferenceExecutor, "run", lambda self, batch, observe=None: torch.full((31, 283), math.nan))
    with pytest.raises(NumericalError):
        measure(str(tiny.directory), TEXT, replace(CHUNKS, save_base=tmp_path / "base"))
    assert list(tmp_path.iterdir()) == []


# --- conversations


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> tuple[TinyModel, Path]:
    model = build_tiny("qwen3", tmp_path_factory.mktemp("chat"))
    folder = model.directory.parent / "chatty"
    shutil.copytree(model.directory, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return model, folder


def conversation(*turns: str) -> str:
    roles = ("user", "assistant") * len(turns)
    return json.dumps({"messages": [{"role": r, "content": t} for r, t in zip(roles, turns, strict=False)]})


def test_conversations_count_where_the_assistant_speaks(chatty: tuple[TinyModel, Path]) -> None:
    model, path = chatty
    text = conversation("what is a name?", "words", "and then?", "nothing") + "\n" + conversation("hm", "well")
    row = measure(str(path), text, PerplexityOptions(is_chat=True, device="cpu"))
    whole = "[user] what is a name?\n[assistant] words\n[user] and then?\n[assistant] nothing\n"
    expected = []
    for shown, answers in ((whole, (" words\n", " nothing\n")), ("[user] hm\n[assistant] well\n", (" well\n",))):
        ids = ids_of(path, shown)
        log_p, tokenizer = log_probabilities(model, ids), open_source(str(path)).tokenizer
        ends = np.cumsum([len(tokenizer.token_bytes(id)) for id in ids]) - len("<bos>")
        for answer in answers:
            first = shown.index(f"[assistant]{answer}") + len("[assistant]")
            # The space before an answer is the template's, and no token joins it with what follows.
            inside = [i for i, end in enumerate(ends) if first + 1 < end <= first + len(answer)]
            expected += [-float(log_p[i - 1, ids[i]]) for i in inside]
    assert row.n_predictions == len(expected)
    assert row.perplexity.value == pytest.approx(math.exp(np.mean(expected)), rel=1e-4)
    assert (row.protocol, row.bos, row.stride, row.context) == ("chat", None, None, len(ids_of(path, whole)))


def test_conversations_that_do_not_fit_or_are_none(chatty: tuple[TinyModel, Path]) -> None:
    path, text = str(chatty[1]), conversation("hello " * 20, "yes")
    options = PerplexityOptions(is_chat=True, device="cpu")
    with pytest.raises(RequestError, match=r"line 1, messages\[1\]: \d+ tokens, the context holds 50"):
        measure(path, text, replace(options, context=50))
    with pytest.raises(RequestError, match="line 1: the body is not JSON"):
        measure(path, TEXT, options)
    with pytest.raises(RequestError, match="--stride says nothing to --chat"):
        measure(path, text, replace(options, stride=4))
    with pytest.raises(RequestError, match="--chunks 0"):
        measure(path, text, replace(options, n_windows=0))


# --- the command line


def bytefloor(*args: str, input: str = "") -> Result:
    return CliRunner().invoke(app, ["perplexity", *args], input=input)


def test_the_row_is_shown_as_lines_or_json_and_saved(tiny: TinyModel, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(TEXT)
    where = ("-m", str(tiny.directory), "-c", "64", "--chunks", "2", "--device", "cpu")
    shown = bytefloor(
        *where, "-f", str(tmp_path / "text"), "--base", str(tiny.directory), "--save", str(tmp_path / "row")
    )
    assert shown.exit_code == 0, shown.output
    (row,) = json.loads((tmp_path / "row").read_text())
    first, second = row["running"]
    assert f"[1]{first:.4f},[2]{second:.4f},\n" in shown.stderr
    value, error = row["perplexity"]["value"], row["perplexity"]["error"]
    assert f"perplexity {value:.4f} +/- {error:.5f}\n" in shown.stdout
    for words in (
        "62 predictions in 2 chunks of 64, the second half of each; BOS in place of each one's first token; by chunk",
        "KL divergence, nats: mean 0 +/- 0; median 0, 90 % 0,",
        "same best token: 100.000 +/- 0.000 %",
        "ratio of perplexities 1.000000 +/- 0.0000000",
    ):
        assert words in shown.stdout
    piped = bytefloor(*where, "--json", input=TEXT)
    found = json.loads(piped.stdout)
    assert set(found) == {field.name for field in fields(PerplexityRow)}
    assert (found["perplexity"], found["divergence"], found["verb"]) == (row["perplexity"], None, "perplexity")


def test_on_a_terminal_a_bar_stands_until_the_line_of_all_values(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, force_interactive=True, width=80)
    monkeypatch.setattr(perplexity_view, "Console", lambda **more: console)
    with perplexity_view.RunningEstimate() as show:
        show(1, 2, 4.25)
        assert "[1]4.2500," not in shown.getvalue()
        show(2, 2, 5.5)
    assert "[1/2] 4.2500" in shown.getvalue()
    assert shown.getvalue().endswith("[1]4.2500,[2]5.5000,\n")


@pytest.mark.parametrize(
    ("args", "text", "words"),
    [
        ([], "", "there is no text to score: name a file with -f, or pipe one in"),
        (["-f", "nofile"], "", "nofile: cannot be read: No such file"),
        (["-c", "64"], "short", "the text has 6 tokens, expected at least 64"),
        (["-c", "32k"], TEXT, "context 32768 is out of range"),
        (["--by", "word"], TEXT, "--by word: expected chunk or token"),
        (["--kv", "int4"], TEXT, "--kv int4: expected"),
        (["-c", "64", "--base", "no.gguf"], TEXT, "no.gguf: no such file or directory"),
    ],
)
def test_what_is_refused_is_one_line(tiny: TinyModel, args: list[str], text: str, words: str) -> None:
    result = bytefloor("-m", str(tiny.directory), "--device", "cpu", *args, input=text)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr.splitlines()[-1]
