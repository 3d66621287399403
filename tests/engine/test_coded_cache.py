"""A cache of coded pages on tiny random models: chunks, batches, prefixes, rewinding, and what it takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from bytefloor.engine.batch import Batch
from bytefloor.engine.cache import CachePlan, Room, SequenceCache, make_pools
from bytefloor.engine.device_support import check_list
from bytefloor.engine.engine import Engine
from bytefloor.engine.loading import CODED_CHUNK, KV_TYPES, check_kv, make_executor, open_tokenizer
from bytefloor.engine.progress import Silent
from bytefloor.engine.reference import Precision, ReferenceExecutor
from bytefloor.engine.request import Request
from bytefloor.engine.sampling_params import SamplingParams
from bytefloor.errors import CapacityError, RequestError, UnsupportedError
from bytefloor.files.checkpoint import open_checkpoint
from bytefloor.model import decoder
from bytefloor.model.config import Rounding
from bytefloor.model.decoder import build_step
from bytefloor.model.families import Model, load_model
from bytefloor.model.step import Step
from bytefloor.ops.page_codes import n_page_bytes
from tiny import build_tiny, prompt_ids

PAGE, RECENT, FIRST = 4, 6, 5
EXACT = Precision(compute=torch.float64, weights=torch.float64)
GREEDY = SamplingParams(temperature=0)


@pytest.fixture(autouse=True)
def _short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models have windows of 8."""
    monkeypatch.setattr(decoder, "RECENT", RECENT)
    monkeypatch.setattr(decoder, "FIRST", FIRST)


@pytest.fixture(scope="module", params=["gemma4-unified", "gemma4-e", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Sliding layers and K=V; shared keys and values; and heads of 48, of which 16 lanes turn together."""
    tiny = build_tiny(request.param, tmp_path_factory.mktemp("tiny"))
    return load_model(open_checkpoint(tiny.directory))


def list_of(model: Model, storage: str = "k4v2") -> Step:
    return build_step(model.config, model.weights, Rounding(cache=storage))


def make(model: Model, storage: str = "k4v2", precision: Precision = EXACT, **plan: int) -> ReferenceExecutor:
    settings = {"capacity": 96, "chunk": 24, "page_size": PAGE} | plan
    executor = ReferenceExecutor(list_of(model, storage), CachePlan(**settings), precision=precision)
    executor.poison()
    return executor


class Text:
    """A sequence on an executor: logits of all of its rows, however they come."""

    def __init__(self, executor: ReferenceExecutor, cache: SequenceCache | None = None) -> None:
        self.executor, kinds = executor, executor.step.kinds
        self.cache = cache or SequenceCache(executor.plan, kinds, make_pools(executor.plan, kinds))

    def read(self, ids: Sequence[int], chunk: int) -> Tensor:
        found = []
        for start in range(0, len(ids), chunk):
            rows, batch = ids[start : start + chunk], Batch()
            self.cache.append_rows(batch, rows, range(len(rows)))
            found.append(self.executor.run(batch))
            self.cache.commit(len(rows))
        return torch.cat(found)

    def fork(self) -> Text:
        return Text(self.executor, self.cache.fork())


def same(found: Tensor, expected: Tensor) -> bool:
    """But for the order of sums in float64; a code more or less is a thousandth at least."""
    return bool((found - expected).abs().max() < 1e-9)


def test_without_roundings_it_is_the_plain_cache(model: Model) -> None:
    """Turned lanes, three kinds of pages and masks of their own change nothing by themselves."""
    ids = prompt_ids(60)
    expected = Text(make(model, "float32")).read(ids, 24)
    for chunk in (24, 7, 1):
        executor = make(model, precision=Precision(torch.float64, torch.float64, rounds=False))
        assert same(Text(executor).read(ids, chunk), expected)


def test_chunks_change_nothing(model: Model) -> None:
    ids = prompt_ids(60)
    expected, exact = Text(make(model, chunk=60)).read(ids, 60), Text(make(model, "float32")).read(ids, 24)
    for chunk in (24, 7, 1):
        assert same(Text(make(model)).read(ids, chunk), expected)
    # Codes are there: rows that see none have what bf16 leaves.
    error = (expected - exact).square().mean(-1).sqrt() / exact.square().mean(-1).sqrt()
    assert float(error[: RECENT + FIRST].max()) < 0.02
    assert float(error[24:].mean()) > 0.1


def test_a_rewound_sequence_goes_on_as_if_it_had_never_been_longer(model: Model) -> None:
    """To any length whose recent pages are there; to others it is refused."""
    ids, other = prompt_ids(52), prompt_ids(24, seed=9)
    text = Text(make(model))
    text.read(ids, 7)
    lengths = [n for n in range(1, 53) if text.cache.can_rewind(n)]
    # The oldest position of the window of row 52 lies in a page; that page is the oldest that is there.
    windows = [kind.window for kind in text.executor.step.kinds if kind.window is not None]
    assert lengths == list(range(max((53 - window) // PAGE * PAGE + window - 1 for window in windows), 53))
    assert len(lengths) in (2, 4)
    for length in lengths:
        twin = text.fork()
        twin.cache.rewind(length)
        assert same(twin.read(other, 5), Text(make(model)).read([*ids[:length], *other], 24)[length:])
        twin.cache.free()
    with pytest.raises(CapacityError, match=f"cannot rewind from 52 to {lengths[0] - 1}"):
        text.cache.rewind(lengths[0] - 1)


@pytest.mark.parametrize("n_right", [2, 5])
def test_rows_that_were_not_kept_leave_nothing(model: Model, n_right: int) -> None:
    """As drafts: pages are coded behind eight rows, of which some turn out wrong, and coded again."""
    ids, wrong = prompt_ids(40), prompt_ids(8, seed=9)
    text, found = Text(make(model)), []
    while text.cache.length + 8 <= len(ids):
        start, batch = text.cache.length, Batch()
        text.cache.append_rows(batch, [*ids[start : start + n_right], *wrong[: 8 - n_right]], range(n_right))
        found.append(text.executor.run(batch))
        text.cache.commit(n_right)
        text.cache.rewind(start + n_right)
    assert same(torch.cat(found), Text(make(model)).read(ids[: text.cache.length], 24))


def test_two_owners_of_the_same_pages_go_their_ways(model: Model) -> None:
    """Forked in the middle of a page, before its neighbours are coded; rows by turns."""
    ids, ends = prompt_ids(30), (prompt_ids(30, seed=5), prompt_ids(30, seed=6))
    first = Text(make(model, n_sequences=2))
    first.read(ids, 24)
    both, found = (first, first.fork()), ([], [])
    for start in range(0, 30, 3):
        for text, end, parts in zip(both, ends, found, strict=True):
            parts.append(text.read(end[start : start + 3], 3))
    for end, parts in zip(ends, found, strict=True):
        assert same(torch.cat(parts), Text(make(model)).read([*ids, *end], 24)[30:])


def make_engine(model: Model, **plan: int) -> Engine:
    executor = make(model, **({"capacity": 60, "chunk": 16} | plan))
    return Engine(executor, open_tokenizer(model.checkpoint), model.config.vocabulary_size)


def answers(engine: Engine, requests: list[Request]) -> tuple[list[list[int]], list[int]]:
    """Tokens of each, and how many of each prompt were found in the cache."""
    order = [engine.add(request) for request in requests]
    found: dict[int, list[int]] = {request_id: [] for request_id in order}
    cached: dict[int, int] = {}
    while engine.has_work:
        for delta in engine.step():
            found[delta.request_id] += [delta.sampled.id] if delta.sampled else []
            if delta.finish is not None:
                cached[delta.request_id] = delta.finish.n_cached
    return [found[request_id] for request_id in order], [cached[request_id] for request_id in order]


def requests_of(*lengths: int, n_tokens: int = 10) -> list[Request]:
    return [
        Request(tuple(prompt_ids(length, seed=i)), max_tokens=n_tokens, sampling=GREEDY, ignores_end=True)
        for i, length in enumerate(lengths)
    ]


def test_sequences_together_and_short_of_pages_give_what_each_gives_alone(model: Model) -> None:
    requests = requests_of(3, 30, 8, 17)
    alone = [answers(make_engine(model), [request])[0][0] for request in requests]
    assert answers(make_engine(model, n_sequences=4), requests)[0] == alone
    engine = make_engine(model, n_sequences=4, positions=60)
    assert answers(engine, requests)[0] == alone
    assert engine.load.n_preempted > 0


def test_as_many_run_as_there_are_places_for(model: Model) -> None:
    """First pages are as many as sequences; nobody is kept waiting for more of them."""
    engine = make_engine(model, n_sequences=4, n_snapshots=0)
    for request in requests_of(9, 9, 9, 9):
        engine.add(request)
    for _ in range(6):
        list(engine.step())
    assert engine.load.n_running == 4


def test_a_prefix_that_was_kept_gives_the_answer_of_one_that_was_not(model: Model) -> None:
    engine, told = make_engine(model), prompt_ids(21)
    for turn in range(3):
        request = Request(tuple(told), max_tokens=7, sampling=GREEDY, ignores_end=True)
        (ids,), (n_cached,) = answers(engine, [request])
        assert ids == answers(make_engine(model, n_snapshots=0), [request])[0][0]
        assert (n_cached > 0) == (turn > 0)
        told += [*ids, *prompt_ids(3, seed=turn)]


# --- what it takes


class Notes(Silent):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)


def test_pools_are_bytes_and_bf16_and_what_was_planned(model: Model) -> None:
    step, plan, notes = list_of(model), CachePlan(96, 24, 2, page_size=PAGE), Notes()
    executor = ReferenceExecutor(step, plan, progress=notes)
    kinds = {kind.name: kind for kind in step.kinds}
    taken = {name: pool.nbytes for name, pool in executor.pools.items()}
    assert taken == {name: plan.n_bytes(kind, step.n_cache_layers[name]) for name, kind in kinds.items()}
    assert executor.cache_bytes() == sum(taken.values())
    for name, kind in kinds.items():
        pool, n_layers = executor.pools[name], step.n_cache_layers[name]
        if kind.storage == "k4v2":
            of_head = n_page_bytes(PAGE, kind.head_size)
            assert (pool.dtype, pool.shape[0]) == (torch.uint8, n_layers)
            assert pool[0, 0].nbytes == kind.n_kv_heads * of_head
            assert of_head == PAGE * kind.head_size * 6 // 8 + 6 * (PAGE + kind.head_size)
        else:
            assert pool.dtype == torch.bfloat16
            assert name.startswith(("recent.", "first."))
    assert "192 positions, k4v2, recent and first ones bf16" in notes.said[0]
    # A window and a page border for each of two, a chunk for both; four prefixes of a window; the null page.
    recent = next(kind for kind in step.kinds if kind.window == RECENT)
    assert plan.n_pages(recent) == 2 * (3 + 1) + 6 + 4 * 3 + 1
    first = next(kind for kind in step.kinds if kind.most == FIRST)
    assert plan.n_pages(first) == CachePlan(96, 24, 2, page_size=PAGE, positions=96).n_pages(first) == 2 * 2 + 4 * 2 + 1


def test_a_token_reads_codes_but_for_recent_and_first_positions(model: Model) -> None:
    step, n = list_of(model), 64
    expected = 0
    for call in step.calls:
        if call.op.reads_cache:
            assert call.cache is not None
            kind = call.cache.kind
            live = n if kind.window is None else kind.window
            old = live - RECENT
            kept = FIRST if kind.window is None else 0
            codes, floats = (old - kept) * kind.head_bytes, (RECENT + kept) * 4 * kind.head_size
            expected += kind.n_kv_heads * (codes + floats)
    assert step.token_bytes(n - 1)[1] == expected


def test_kinds_and_layers_of_a_list(model: Model) -> None:
    step = list_of(model)
    assert step.storage == "k4v2"
    coded = [kind for kind in step.kinds if kind.storage == "k4v2"]
    assert coded
    assert len(step.kinds) == 3 * len(coded)
    for kind in coded:
        assert kind.rotated == 0
        assert (kind.beside["recent"].window, kind.beside["first"].window) == (RECENT, kind.window)
        for other in kind.beside.values():
            assert (other.storage, other.n_kv_heads, other.head_size) == ("bf16", kind.n_kv_heads, kind.head_size)
            assert step.n_cache_layers[other.name] == step.n_cache_layers[kind.name]
    owners = [call for call in step.calls if call.op.name == "code_pages"]
    assert len(owners) == sum(step.n_cache_layers[kind.name] for kind in coded)


def test_windows_of_recent_positions_alone_stay_bf16(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "RECENT", 8)
    sliding = [kind for kind in list_of(model).kinds if kind.name.startswith("sliding8.")]
    assert {(kind.storage, kind.recent) for kind in sliding} <= {("bf16", None)}
    ids = prompt_ids(60)
    assert same(Text(make(model)).read(ids, 7), Text(make(model, chunk=60)).read(ids, 60))


def test_a_model_with_nothing_to_code_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    from dataclasses import replace

    model = load_model(open_checkpoint(build_tiny("qwen3", tmp_path_factory.mktemp("tiny")).directory))
    config = replace(model.config, layers=tuple(replace(layer, window=RECENT) for layer in model.config.layers))
    with pytest.raises(UnsupportedError, match=f"k4v2: every layer has a window of at most {RECENT} positions"):
        build_step(config, model.weights, Rounding(cache="k4v2"))


# --- who has it


def test_the_kernels_say_what_they_have(model: Model) -> None:
    step = build_step(model.config, model.weights, Rounding(activations="int16_g32", cache="k4v2"))
    with pytest.raises(UnsupportedError, match=r"a cache of one of bf16, int8, fp8; .* cache \['k4v2'\]"):
        check_list(step)


def test_the_name_is_known_and_chunks_are_short(model: Model) -> None:
    check_kv("k4v2")
    assert "k4v2" in KV_TYPES
    with pytest.raises(RequestError, match="--kv k4v4: expected bf16, int8, fp8 or k4v2"):
        check_kv("k4v4")
    executor, notices = make_executor(model, Room(256), torch.device("cpu"), kv="k4v2")
    assert (executor.plan.chunk, executor.step.storage, notices) == (CODED_CHUNK, "k4v2", ())
    # Codes would make a text depend on its drafts.
    assert executor.most_draft_rows == 1


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
