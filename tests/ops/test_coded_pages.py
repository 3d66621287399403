"""Which pages are coded, when, and who sees them in codes: by positions alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from bytefloor.ops.attention_coded import reference as attention_coded
from bytefloor.ops.cache_write import reference as cache_write
from bytefloor.ops.code_pages import reference as code_pages
from bytefloor.ops.page_codes import n_page_bytes
from plain_tiles import code_values

PAGE, J, H, E, SCALE = 8, 2, 4, 16, 0.4
N = 61


@dataclass
class Rule:
    """window: of the layer. recent, first: positions that are seen as they were written."""

    window: int | None = None
    recent: int = 16
    first: int = 8


RULES = [Rule(), Rule(recent=13, first=0), Rule(recent=8, first=17), Rule(window=27), Rule(40, recent=9, first=3)]
CHUNKS = [[N], [1] * N, [7] * 8 + [5], [1, 30, 30], [24, 37], [33, 1, 1, 26]]


def drawn(seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """q [N, H, E]; k, v [N, J, E] as bf16 holds them: float64."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(N, n, E, generator=generator, dtype=torch.float64) for n in (H, J, J))
    sizes = 0.2 + 2 * torch.rand(N, 1, 1, generator=generator)
    return q, (k * sizes).bfloat16().double(), (v * sizes).bfloat16().double()


def plain(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Tensor:
    """Row by row, position by position."""
    n = len(k)
    coded_k, coded_v = k.clone(), v.clone()
    for start in range(0, n - PAGE + 1, PAGE):
        page = torch.stack((k[start : start + PAGE], v[start : start + PAGE])).transpose(1, 2)
        coded_k[start : start + PAGE], coded_v[start : start + PAGE] = code_values(page).transpose(1, 2)
    out = torch.zeros_like(q)
    for p in range(n):
        seen = range(0 if rule.window is None else max(0, p - rule.window + 1), p + 1)
        for h in range(H):
            j = h // (H // J)
            scores, values = [], []
            for s in seen:
                begins, ends = s // PAGE * PAGE, s // PAGE * PAGE + PAGE
                is_written = begins < rule.first or ends > p - rule.recent + 1
                keys, of_position = (k, v) if is_written else (coded_k, coded_v)
                scores.append(SCALE * q[p, h] @ keys[s, j])
                values.append(of_position[s, j])
            out[p, h] = torch.stack(scores).softmax(0) @ torch.stack(values)
    return out


@dataclass
class Pages:
    """Pools full of NaN, and tables of sequences in which page ids are out of order."""

    rule: Rule
    chunk: int
    n_sequences: int = 1
    pools: dict[str, Tensor] = field(init=False)
    tables: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        span = N if self.rule.window is None else self.rule.window - 1 + self.chunk
        sizes = {"": span, "recent_": self.rule.recent - 1 + self.chunk, "first_": max(1, self.rule.first)}
        lengths = {name: -(-size // PAGE) + (name != "first_") for name, size in sizes.items()}
        generator = torch.Generator().manual_seed(3)
        self.tables, self.pools = {}, {}
        for name, length in lengths.items():
            n = self.n_sequences * length
            self.tables[f"{name}table"] = torch.randperm(n, generator=generator).view(self.n_sequences, length)
            floats = torch.full((n, 2, J, PAGE, E), torch.nan, dtype=torch.float64)
            coded = torch.full((n, 1, J, n_page_bytes(PAGE, E)), 0xFF, dtype=torch.uint8)
            self.pools[name.rstrip("_") or "cache"] = floats if name else coded

    def step(self, rows: Sequence[tuple[int, range, tuple[Tensor, Tensor, Tensor]]]) -> Tensor:
        """Rows of each sequence, its slots and what was drawn for it; attention's output."""
        slots = torch.tensor([slot for _, own, _ in rows for slot in own])
        sequence = torch.tensor([index for index, own, _ in rows for _ in own])
        q, k, v = (torch.cat([drawn[i][own.start : own.stop] for _, own, drawn in rows]) for i in range(3))
        cache_write(k, v, slots, sequence, self.tables["recent_table"], self.pools["recent"], "bf16")
        rule = {"recent_window": self.rule.recent, "n_first": self.rule.first}
        code_pages(slots, sequence, **self.tables, **self.pools, **rule)
        found = attention_coded(
            q, slots, sequence, **self.tables, **self.pools, scale=SCALE, window=self.rule.window, **rule
        )
        return found

    def codes(self, sequence: int = 0) -> Tensor:
        """Of all places in order; bytes that were never written are 0xFF."""
        return self.pools["cache"][self.tables["table"][sequence]]


def run(rule: Rule, chunks: list[int]) -> tuple[Tensor, Pages]:
    pages, start, found, own = Pages(rule, max(chunks)), 0, [], drawn()
    for n in chunks:
        found.append(pages.step([(0, range(start, start + n), own)]))
        start += n
    assert start == N
    return torch.cat(found), pages


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("chunks", CHUNKS, ids=lambda chunks: f"{len(chunks)}-{chunks[0]}")
def test_each_row_sees_what_the_rule_of_positions_says(rule: Rule, chunks: list[int]) -> None:
    found, _ = run(rule, chunks)
    torch.testing.assert_close(found, plain(*drawn(), rule), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.window is None], ids=str)
def test_codes_do_not_depend_on_chunks(rule: Rule) -> None:
    """Bit for bit. Coded are the pages that lie behind the recent ones of the row to come, and no page of the first."""
    expected = run(rule, CHUNKS[0])[1].codes()
    for chunks in CHUNKS[1:]:
        # The order in a pool is the same, since a layer without a window has the same table for any chunk.
        assert torch.equal(run(rule, chunks)[1].codes(), expected)
    is_coded = (expected != 0xFF).flatten(1).any(1)
    due = range(-(-rule.first // PAGE), (N - rule.recent + 1) // PAGE)
    assert is_coded.nonzero()[:, 0].tolist() == list(due)


def test_sequences_of_a_step_do_not_touch_each_other() -> None:
    rule, both = Rule(), Pages(Rule(), 20, n_sequences=2)
    draws, at, found = (drawn(1), drawn(2)), [0, 0], ([], [])
    for counts in ((20, 0), (13, 7), (1, 20), (20, 1), (7, 33 - 14), (0, 14)):
        rows = [(i, range(at[i], at[i] + n), draws[i]) for i, n in enumerate(counts) if n]
        out = both.step(rows).split([n for n in counts if n])
        for (i, own, _), part in zip(rows, out, strict=True):
            found[i].append(part)
            at[i] = own.stop
    assert at == [N, N]
    for i in range(2):
        torch.testing.assert_close(torch.cat(found[i]), plain(*draws[i], rule), rtol=1e-9, atol=1e-9)
        alone = Pages(rule, N)
        alone.step([(0, range(N), draws[i])])
        assert torch.equal(both.codes(i), alone.codes())


def test_what_is_not_finite_reaches_who_sees_it_and_nobody_else() -> None:
    """A value of infinity at position 20: rows before are as ever, rows behind are not finite, in codes or not."""
    q, k, v = drawn()
    v[20, 0, 3] = torch.inf
    pages, found = Pages(Rule(), 1), []
    for slot in range(N):
        found.append(pages.step([(0, range(slot, slot + 1), (q, k, v))])[0])
    expected = plain(*drawn(), Rule())
    for slot, row in enumerate(found):
        if slot < 20:
            torch.testing.assert_close(row, expected[slot], rtol=1e-9, atol=1e-9)
        else:
            assert not row[:2].isfinite().all(-1).any()
            torch.testing.assert_close(row[2:], expected[slot, 2:], rtol=1e-9, atol=1e-9)


def test_floats_in_place_of_codes_are_plain_attention() -> None:
    """What an executor without roundings has: the way of pages alone."""
    pages = Pages(Rule(window=27), 24)
    shape = pages.pools["recent"].shape[1:]
    pages.pools["cache"] = torch.full((len(pages.pools["cache"]), *shape), torch.nan, dtype=torch.float64)
    q, k, v = drawn()
    found = torch.cat([pages.step([(0, range(start, min(N, start + 24)), (q, k, v))]) for start in range(0, N, 24)])
    torch.testing.assert_close(found, plain(q, k, v, Rule(window=27, recent=N)), rtol=1e-9, atol=1e-9)
