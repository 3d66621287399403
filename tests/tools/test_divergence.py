"""Divergences against the plainest numpy, and bases on disk: what comes back, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bytefloor.errors import FileError
from bytefloor.tools.divergence import Estimate, Rows, compared, joined, mean_of, perplexity_of, summarise
from bytefloor.tools.saved_base import MAGIC, BaseHeader, BaseReader, BaseRows, BaseWriter, is_saved_base

N, V = 40, 300
CPU = torch.device("cpu")
HEADER = BaseHeader("a", "Q8_0", None, "chunk", V, N, "chunks", 64, None, "00")


def log_probabilities(seed: int, spread: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(N, V, generator=generator, dtype=torch.float64)).log_softmax(-1)


LOG_P = log_probabilities(1)
LOG_Q = (LOG_P + 0.3 * log_probabilities(2)).log_softmax(-1)
TARGETS = torch.arange(N) * 7 % V


def rows_between(log_p: torch.Tensor, log_q: torch.Tensor) -> Rows:
    base_nll = -log_p.gather(1, TARGETS[:, None])[:, 0]
    return compared(log_p, log_p.argmax(-1), base_nll, log_q, TARGETS)


def test_each_number_is_what_a_loop_makes_of_it() -> None:
    found = summarise(rows_between(LOG_P, LOG_Q))
    kl, same, dp, ln_p, ln_q = [], [], [], [], []
    for row in range(N):
        p, q, right = np.exp(LOG_P[row].numpy()), np.exp(LOG_Q[row].numpy()), int(TARGETS[row])
        kl.append(sum(p[i] * np.log(p[i] / q[i]) for i in range(V)))
        same.append(max(range(V), key=p.__getitem__) == max(range(V), key=q.__getitem__))
        dp.append(q[right] - p[right])
        ln_p.append(np.log(p[right]))
        ln_q.append(np.log(q[right]))

    def error(values: list[float]) -> float:
        return float(np.std(values, ddof=1) / np.sqrt(N))

    def assert_is(estimate: Estimate, value: float, error: float) -> None:
        assert (estimate.value, estimate.error) == (pytest.approx(value), pytest.approx(error))

    assert_is(found.kl, np.mean(kl), error(kl))
    share = np.mean(same)
    assert 0 < share < 1
    assert_is(found.same_best, share, np.sqrt(share * (1 - share) / (N - 1)))
    assert_is(found.p_difference, np.mean(dp), error(dp))
    rms = np.sqrt(np.mean(np.square(dp)))
    assert_is(found.p_difference_rms, rms, error(list(np.square(dp))) / (2 * rms))
    assert_is(found.base_perplexity, np.exp(-np.mean(ln_p)), np.exp(-np.mean(ln_p)) * error(ln_p))
    # var(a - b) of means = var(a) + var(b) - 2 cov(a, b).
    covariance = np.cov(ln_p, ln_q, ddof=1) / N
    log_error = np.sqrt(covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1])
    log_ratio = np.mean(ln_p) - np.mean(ln_q)
    assert_is(found.log_ratio, log_ratio, log_error)
    assert_is(found.ratio, np.exp(log_ratio), np.exp(log_ratio) * log_error)
    assert found.correlation == pytest.approx(np.corrcoef(ln_p, ln_q)[0, 1])
    ordered = sorted(kl)
    assert found.kl_percentiles["50"] == pytest.approx((ordered[19] + ordered[20]) / 2)
    # Between the two values around 0.9 of the way from the first to the last.
    assert found.kl_percentiles["90"] == pytest.approx(0.9 * ordered[35] + 0.1 * ordered[36])
    assert list(found.kl_percentiles) == ["50", "90", "95", "99", "99.9"]
    assert found.kl_largest == pytest.approx(ordered[-1])


def test_a_model_beside_itself_is_no_distance_away() -> None:
    found = summarise(rows_between(LOG_P, LOG_P))
    assert (found.kl.value, found.kl.error, found.kl_largest) == (0, 0, 0)
    assert (found.same_best.value, found.p_difference_rms.value, found.p_difference_rms.error) == (1, 0, 0)
    assert (found.ratio.value, found.ratio.error) == (1, 0)
    assert found.correlation == pytest.approx(1)


def test_one_prediction_has_no_error() -> None:
    one = Rows(*(getattr(rows_between(LOG_P, LOG_Q), name)[:1] for name in Rows.__dataclass_fields__))
    found = summarise(one)
    assert (found.kl.error, found.ratio.error, found.p_difference_rms.error, found.correlation) == (None,) * 4
    assert mean_of([2.0]).error is None
    assert perplexity_of(np.array([0.5])).value == pytest.approx(np.exp(0.5))


def test_parts_are_joined_in_order() -> None:
    whole = rows_between(LOG_P, LOG_Q)
    halves = [Rows(*(getattr(whole, name)[at] for name in Rows.__dataclass_fields__)) for at in (slice(9), slice(9, N))]
    assert summarise(joined(halves)) == summarise(whole)


# --- on disk


def write(path: Path, header: BaseHeader = HEADER, log_p: torch.Tensor = LOG_P) -> Path:
    with BaseWriter(path, header) as writer:
        writer.add(log_p[:30], TARGETS[:30])
        writer.add(log_p[30:], TARGETS[30 : len(log_p)])
    return path


def read(path: Path, *sizes: int) -> list[BaseRows]:
    with BaseReader(path) as reader:
        return [reader.read(n, CPU) for n in sizes]


def test_a_saved_base_is_read_back_in_pieces_of_any_size(tmp_path: Path) -> None:
    path = write(tmp_path / "base")
    assert is_saved_base(path)
    with BaseReader(path) as reader:
        assert reader.header == HEADER
    parts = read(path, 1, 29, 10)
    log_p = torch.cat([part.log_p for part in parts])
    # Half a step, and what float32 leaves of its ends; then all are moved until they add up.
    half_a_step = (LOG_P.amax(-1) - LOG_P.amin(-1)) / 65535 / 2
    assert bool(((log_p - LOG_P).abs().amax(-1) < 2 * half_a_step + 4e-6).all())
    assert float((log_p - LOG_P).abs().max()) > 1e-6
    assert torch.allclose(log_p.exp().sum(-1), torch.ones(N, dtype=torch.float64), atol=1e-12)
    assert torch.equal(torch.cat([part.nll for part in parts]), -LOG_P.gather(1, TARGETS[:, None])[:, 0])
    assert torch.equal(torch.cat([part.best for part in parts]), LOG_P.argmax(-1))


def test_sixteen_bits_cost_next_to_nothing(tmp_path: Path) -> None:
    (base,) = read(write(tmp_path / "base"), N)
    itself = summarise(compared(base.log_p, base.best, base.nll, LOG_P, TARGETS))
    assert 0 <= itself.kl.value < 1e-7
    assert (itself.same_best.value, itself.ratio.value, itself.p_difference_rms.value) == (1, 1, 0)
    beside, exact = (
        summarise(rows)
        for rows in (compared(base.log_p, base.best, base.nll, LOG_Q, TARGETS), rows_between(LOG_P, LOG_Q))
    )
    assert beside.kl.value == pytest.approx(exact.kl.value, rel=1e-5)


def test_a_row_in_which_all_are_equal(tmp_path: Path) -> None:
    uniform = torch.zeros(N, V, dtype=torch.float64).log_softmax(-1)
    (base,) = read(write(tmp_path / "base", log_p=uniform), N)
    assert torch.allclose(base.log_p, uniform, atol=1e-6)


def test_what_was_not_finished_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "base"
    with BaseWriter(path, HEADER) as writer:
        writer.add(LOG_P[:-1], TARGETS[:-1])
    writer = BaseWriter(path, HEADER)
    writer.add(LOG_P, TARGETS)
    writer.__exit__(KeyError, KeyError(), None)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileError, match="cannot be written: No such file"):
        BaseWriter(tmp_path / "nowhere" / "base", HEADER)


def test_cut_and_damaged_files_are_refused(tmp_path: Path) -> None:
    good = write(tmp_path / "base").read_bytes()
    row_bytes = 20 + 2 * V + 4

    def refused(data: bytes, words: str, n_rows: int = N) -> None:
        (tmp_path / "bad").write_bytes(data)
        with pytest.raises(FileError, match=words):
            read(tmp_path / "bad", n_rows)

    for n in (1, row_bytes, 5 * row_bytes):
        refused(good[:-n], f"{N * row_bytes - n} bytes of rows, expected {N * row_bytes}: {N} rows over {V} tokens")
    refused(good + b"x", f"{N * row_bytes + 1} bytes of rows")
    refused(good[: len(MAGIC) + 30], "header is cut short or damaged")
    refused(good[: len(MAGIC) + 5], "not a saved base")
    refused(b"another file, and a long one", "not a saved base")
    refused(good.replace(b'"Q8_0"', b'"Q4_0"'), "header is cut short or damaged")
    start = len(good) - N * row_bytes
    for place in (start, start + 18, len(good) - 1):
        damaged = bytearray(good)
        damaged[place] ^= 1
        refused(bytes(damaged), "a row is damaged")
    refused(good, "ends within its rows", N + 1)


def test_a_header_without_a_field_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bytefloor.tools.saved_base.asdict", lambda header: {"model": header.model})
    path = write(tmp_path / "base", replace(HEADER, model="b"))
    with pytest.raises(FileError, match="does not have the fields"):
        BaseReader(path)


def test_other_files_are_no_bases(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("bytefloor")
    assert not any(is_saved_base(path) for path in (tmp_path, tmp_path / "text", tmp_path / "nothing"))
