"""Rows sampled on a device of kernel twins: what is asked, what comes back, and what is the host's. See tests/gpu."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest

import kernel_twins
from bytefloor.engine.kernels import compile_kernel
from bytefloor.engine.row_sampler import RowSampler, row_sampler_bytes, row_sampler_specs
from bytefloor.engine.sampler import Sampler
from bytefloor.engine.sampling_params import SamplingParams
from cards import CARDS
from device_sampling import assert_alike, rows_of
from row_sampling import ASKED, Rows

V = 4200  # no whole groups


def twins(n_vocabulary: int) -> dict:
    return dict(kernel_twins.TwinDevice().load_kernels(row_sampler_specs(n_vocabulary), "sm_90a"))


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_twins.TwinDevice().install(monkeypatch)


@pytest.mark.parametrize("kind", ["smooth", "ties", "some ties"])
def test_each_row_gets_what_the_host_gives_it(kind: str) -> None:
    rng = random.Random(kind)
    params = [SamplingParams(**asked, seed=rng.randrange(2**64)) for asked in ASKED.values()]
    rows = Rows(params, V, [0, 7, V - 1], twins(V))
    for turn in range(4):
        logits, positions = rows_of(kind, len(params), V, turn), [rng.randrange(100_000) for _ in params]
        for found, wanted in zip(rows.by_device(logits, positions), rows.by_host(logits, positions), strict=True):
            assert_alike(found, wanted)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_handed_back_and_no_other(value: float) -> None:
    rows = Rows([SamplingParams(seed=1)] * 3, V, [], twins(V))
    logits = rows_of("smooth", 3, V, 1)
    logits[1, 4000 if value > 0 or np.isnan(value) else slice(None)] = value
    first, broken, last = rows.by_device(logits, [1, 2, 3])
    assert broken is None
    assert first is not None
    assert last is not None


def test_a_row_whose_best_are_banned_is_handed_back() -> None:
    """Of its 64 best 39 are left, of which a top_k of 40 cannot choose."""
    logits = np.sort(rows_of("smooth", 1, V, 2))[:, ::-1].copy()
    params = SamplingParams(seed=1, top_k=40)
    assert Rows([params], V, range(25), twins(V)).by_device(logits, [9]) == [None]
    rows = Rows([params], V, range(24), twins(V))
    assert_alike(rows.by_device(logits, [9])[0], rows.by_host(logits, [9])[0])


def test_what_needs_more_than_the_best_few_is_the_hosts() -> None:
    sampler = Rows([SamplingParams()], V, [], twins(V)).sampler
    assert all(sampler.can_serve(SamplingParams(**asked)) for asked in ASKED.values())
    others = (
        {"top_k": 0}, {"top_k": 65}, {"typical_p": 0.9}, {"mirostat_tau": 3.0}, {"dry_multiplier": 1.0},
        {"repetition_penalty": 1.1}, {"presence_penalty": 0.1}, {"logit_bias": {3: 1.0}}, {"logprobs_after": True},
    )  # fmt: skip
    assert not any(sampler.can_serve(SamplingParams(**asked)) for asked in others)
    # Without whole groups enough there are fewer.
    few = Rows([SamplingParams()], 300, [], twins(300)).sampler
    assert few.can_serve(SamplingParams(top_k=5, n_logprobs=5))
    assert not few.can_serve(SamplingParams(top_k=6))
    assert not few.can_serve(SamplingParams(temperature=0, n_logprobs=6))


def test_it_takes_the_memory_that_is_planned() -> None:
    sampler: RowSampler = Rows([SamplingParams()] * 5, V, [], twins(V)).sampler
    held = [each for each in vars(sampler).values() if hasattr(each, "nbytes")]
    banned = sampler._banned.nbytes
    assert sum(each.nbytes for each in held) - banned == row_sampler_bytes(V, 5)


def test_the_seed_of_a_request_reaches_its_row() -> None:
    logits = np.repeat(rows_of("smooth", 1, V, 3), 40, axis=0)
    rows = Rows([SamplingParams(seed=seed, temperature=3.0, min_p=0, top_p=1) for seed in range(40)], V, [], twins(V))
    found = [each.id for each in rows.by_device(logits, [5] * 40) if each is not None]
    assert len(found) == 40
    assert len(set(found)) > 10
    assert isinstance(rows.host[0], Sampler)


@pytest.mark.parametrize("architecture", list(CARDS))
def test_kernels_compile_for_every_architecture(architecture: str) -> None:
    pytest.importorskip("cuda.core")
    for n_vocabulary in (262144, 300):
        for kernel in row_sampler_specs(n_vocabulary):
            code, report = compile_kernel(kernel, architecture)
            assert len(code) > 1000
            # exp of float64 keeps a number on the stack.
            assert all(int(n) <= 8 for n in re.findall(r"(\d+) bytes spill", report))
