"""Several sequences at once on the device executor, with Python twins in place of kernels."""

from __future__ import annotations

import pytest
import torch
from test_device_wiring import SHAPES, TIES, difference
from torch import Tensor

from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import CachePlan, SequenceCache, make_pools
from bytefloor.engine.device import DeviceExecutor
from bytefloor.engine.device_batch import sizes_for
from bytefloor.engine.engine import Engine
from bytefloor.engine.loading import DEVICE_ROUNDING
from bytefloor.engine.progress import Silent
from bytefloor.engine.request import Request
from bytefloor.engine.sampling_params import SamplingParams
from bytefloor.engine.synthetic import checkpoint_of
from bytefloor.model.decoder import build_step
from bytefloor.model.families import load_model
from bytefloor.model.step import Step
from device_sampling import Numbers
from kernel_twins import TwinDevice
from rows_reference import DeviceReference

N_SEQUENCES = 11
LENGTHS = (3, 40, 27, 61, 1, 33, 12, 50, 8, 22, 45)
"""Of what each sequence has before it decodes with the others: in one tile and several, inside windows and beyond."""
N_STEPS = 6


class Lines(Silent):
    """What is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, line: str) -> None:
        """A line."""
        self.lines.append(line)


@pytest.fixture(params=list(SHAPES))
def step(request: pytest.FixtureRequest) -> Step:
    model = load_model(checkpoint_of(request.param, SHAPES[request.param], "Q4_K_M", "cpu"))
    return build_step(model.config, model.weights, DEVICE_ROUNDING)


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch, step: Step) -> DeviceExecutor:
    twins = TwinDevice()
    twins.install(monkeypatch)
    made = DeviceExecutor(step, CachePlan(128, 100, N_SEQUENCES), device="cpu")
    twins.know(made)
    made.poison()
    return made


def ids_of(sequence: int) -> list[int]:
    generator = torch.Generator().manual_seed(sequence)
    return torch.randint(0, 270, (LENGTHS[sequence] + N_STEPS,), generator=generator).tolist()


def expected_logits(step: Step, sequence: int) -> Tensor:
    """Of the tokens that are decoded, by the reference, alone: rows of the prompt together, then one by one."""
    ids, reference = ids_of(sequence), DeviceReference(step, 128)
    reference.run(ids[: LENGTHS[sequence]])
    return torch.cat([reference.run([token]) for token in ids[LENGTHS[sequence] :]])


def test_ragged_sequences_come_and_go_between_steps(executor: DeviceExecutor, step: Step) -> None:
    """S06, S07, X02: many numbers of rows, unequal lengths, graphs with padding; no row sees another's."""
    assert executor.batch_sizes == (4, 8, 16)
    pools = make_pools(executor.plan, step.kinds)
    caches = [SequenceCache(executor.plan, step.kinds, pools) for _ in range(N_SEQUENCES)]
    found: list[list[Tensor]] = [[] for _ in range(N_SEQUENCES)]
    for sequence, cache in enumerate(caches):
        batch, n = Batch(), LENGTHS[sequence]
        cache.append_rows(batch, ids_of(sequence)[:n], [])
        executor.run(batch)
        cache.commit(n)
    present = [list(range(n)) for n in (11, 2, 7, 3, 9, 5)]
    while any(len(rows) < N_STEPS for rows in found):
        chosen = [s for s in (present.pop(0) if present else range(N_SEQUENCES)) if len(found[s]) < N_STEPS]
        batch = Batch()
        for s in chosen:
            caches[s].append_rows(batch, [ids_of(s)[caches[s].length]], [0])
        for s, row in zip(chosen, executor.run(batch), strict=True):
            found[s].append(row)
            caches[s].commit(1)
    for sequence, rows in enumerate(found):
        assert difference(torch.stack(rows), expected_logits(step, sequence)) < TIES


def test_decoding_rows_ride_beside_a_prompt(executor: DeviceExecutor, step: Step) -> None:
    """A prompt's chunk, a sequence of a few rows and two that decode in one batch; logits in the order asked for."""
    pools = make_pools(executor.plan, step.kinds)
    caches = [SequenceCache(executor.plan, step.kinds, pools) for _ in range(4)]
    for s in (1, 2):
        batch = Batch()
        caches[s].append_rows(batch, ids_of(s)[: LENGTHS[s]], [])
        executor.run(batch)
        caches[s].commit(LENGTHS[s])
    batch = Batch()
    for s, n in ((1, 1), (3, LENGTHS[3] + N_STEPS), (2, 1), (0, 5)):
        caches[s].append_rows(batch, ids_of(s)[caches[s].length :][:n], [n - 1])
    found = executor.run(batch)
    prompts = [DeviceReference(step, 128).run(ids_of(s)[:n])[-1] for s, n in ((3, LENGTHS[3] + N_STEPS), (0, 5))]
    rows = (expected_logits(step, 1)[0], prompts[0], expected_logits(step, 2)[0], prompts[1])
    for i, expected in enumerate(rows):
        assert difference(found[i], expected) < TIES


@pytest.mark.parametrize(
    ("n", "sizes"), [(1, ()), (2, (4,)), (4, (4,)), (5, (4, 8)), (9, (4, 8, 16)), (64, (4, 8, 16))]
)
def test_graphs_follow_from_how_many_run_at_once(n: int, sizes: tuple[int, ...]) -> None:
    assert sizes_for(n) == sizes


def test_requests_at_once_get_the_answers_they_get_alone(executor: DeviceExecutor) -> None:
    """S06, S07: prompts of unequal length join and leave; greedy and sampled; the last one goes on in the loop."""
    requests = [
        Request(tuple(ids_of(s)[: LENGTHS[s]]), sampling=SamplingParams(temperature=temperature, seed=s), max_tokens=n)
        for s, temperature, n in ((0, 0.0, 4), (1, 0.0, 9), (4, 1.3, 6), (8, 0.0, 3), (2, 0.7, 12))
    ]

    def engine() -> Engine:
        return Engine(executor, Numbers(270), executor.step.logits.shape[-1])

    alone = [[d.sampled.id for d in engine().generate(request) if d.sampled] for request in requests]
    shared = engine()
    ids = {shared.add(request): i for i, request in enumerate(requests)}
    found: list[list[int]] = [[] for _ in requests]
    while shared.has_work:
        for delta in shared.step():
            if delta.sampled is not None:
                found[ids[delta.request_id]].append(delta.sampled.id)
    assert found == alone
