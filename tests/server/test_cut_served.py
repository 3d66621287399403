"""Prompts that are cut, over HTTP: an answer is that of a fresh server, and what is said of the cache is true."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from bytefloor.engine.loading import Opened
from server.live import live
from server.test_cases_cache import numbers, said, with_plan

CUT = {"chunk": 48, "budget": 40, "capacity": 128}


def test_what_was_cut_is_computed_again_and_what_is_short_is_not(opened: Opened) -> None:
    """A second turn behind a long prompt, the same prompt once more, and a short one once more."""
    first, short = numbers(70, seed=1), numbers(30, seed=2)
    with live(with_plan(opened, **CUT)) as server:
        assert server.http.get("/props").json()["kv_budget"] == 40
        said(server, first)
        for prompt, n_cached in ((numbers(70, seed=1) + numbers(9, seed=3), 0), (first, 0), (short, 0), (short, 29)):
            found = said(server, prompt)
            assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == n_cached
            with live(with_plan(opened, **CUT)) as fresh:
                assert found["choices"] == said(fresh, prompt)["choices"]
        # A batch of requests, several of which are cut in company.
        prompts = [numbers(60 + 5 * i, seed=i) for i in range(4)]
    with live(with_plan(opened, **CUT)) as alone:
        wanted = [said(alone, prompt)["choices"] for prompt in prompts]
    with live(with_plan(opened, n_sequences=4, **CUT)) as server, ThreadPoolExecutor(4) as pool:
        assert [found["choices"] for found in pool.map(lambda prompt: said(server, prompt), prompts)] == wanted


def test_a_server_without_a_budget_says_so(opened: Opened) -> None:
    with live(with_plan(opened)) as server:
        assert server.http.get("/props").json()["kv_budget"] is None
