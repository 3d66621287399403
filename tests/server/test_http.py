"""Around the text: keys, origins, limits, ids, health, figures."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from dataclasses import replace

import openai
import pytest

from bytefloor.engine.loading import Opened
from bytefloor.errors import RequestError
from bytefloor.server.log import JsonFormatter
from bytefloor.server.process import bind
from bytefloor.server.service import ServerOptions
from server.live import SHORT, Live, live, scripted


@pytest.fixture(scope="module")
def strict(opened: Opened) -> Iterator[Live]:
    options = replace(SHORT, api_key="s3cret", cors=("http://page.example",), max_body_bytes=2000, max_open=3)
    with live(scripted(opened)[0], options) as running:
        yield running


def test_only_health_needs_no_key(strict: Live) -> None:
    assert strict.http.get("/health").json() == {"status": "ok"}
    for path in ("/v1/models", "/metrics", "/props", "/nowhere"):
        refused = strict.http.get(path)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        assert refused.json()["error"]["code"] == "invalid_api_key"
    with pytest.raises(openai.AuthenticationError):
        strict.openai.models.list()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": "Bearer s3cret"}, 200),
        ({"authorization": "bearer  s3cret"}, 200),
        ({"x-api-key": "s3cret"}, 200),
        ({"authorization": "Bearer s3cre"}, 401),
        ({"authorization": "Basic s3cret"}, 401),
        ({"authorization": "s3cret"}, 401),
        ({"x-api-key": ""}, 401),
        ({"x-api-key": "\u00e9"}, 401),
    ],
)
def test_keys(strict: Live, headers: dict[str, str], status: int) -> None:
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    assert strict.http.get("/v1/models", headers=encoded).status_code == status


def test_a_page_of_an_allowed_origin_may_ask_even_about_errors(strict: Live, server: Live) -> None:
    origin = {"origin": "http://page.example"}
    asked = {**origin, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    preflight = strict.http.options("/v1/chat/completions", headers=asked)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "http://page.example"
    assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
    refused = strict.http.get("/v1/models", headers=origin)
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "http://page.example"
    other = strict.http.get("/health", headers={"origin": "http://elsewhere.example"})
    assert "access-control-allow-origin" not in other.headers
    assert "access-control-allow-origin" not in server.http.get("/health", headers=origin).headers


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_that_is_too_long_is_refused(strict: Live, is_chunked: bool) -> None:
    data = json.dumps({"content": "x" * 4000}).encode()
    headers = {"x-api-key": "s3cret", "content-type": "application/json"}
    content = iter([data[:1000], data[1000:]]) if is_chunked else data
    refused = strict.http.post("/tokenize", content=content, headers=headers)
    assert refused.status_code == 413
    assert "2000 bytes" in refused.json()["error"]["message"]


def test_more_requests_than_may_be_open(strict: Live) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "n": 4}
    refused = strict.http.post("/v1/chat/completions", json=body, headers={"x-api-key": "s3cret"})
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"


def test_a_body_that_a_page_may_send_unasked_is_refused(server: Live) -> None:
    """A browser sends text/plain across sites without asking first."""
    body = json.dumps({"content": "hello"})
    refused = server.http.post("/tokenize", content=body, headers={"content-type": "text/plain"})
    assert refused.status_code == 415
    assert "expected 'application/json'" in refused.json()["error"]["message"]
    kind = {"content-type": "application/json; charset=utf-8"}
    assert server.http.post("/tokenize", content=body, headers=kind).status_code == 200


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v2", 404), ("GET", "/tokenize", 405)])
def test_wrong_paths_have_the_shape_of_errors(server: Live, method: str, path: str, status: int) -> None:
    refused = server.http.request(method, path)
    assert refused.status_code == status
    assert set(refused.json()["error"]) == {"message", "type", "param", "code"}
    assert (status == 405) == ("allow" in refused.headers)


def test_requests_have_ids(server: Live) -> None:
    assert server.http.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    ids = {server.http.get("/health", headers={"x-request-id": "no \t id"}).headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3
    assert all(id.startswith("req-") for id in ids)


def request_lines(caplog: pytest.LogCaptureFixture) -> list[dict]:
    lines = [json.loads(JsonFormatter().format(record)) for record in list(caplog.records)]
    return [line for line in lines if line["event"] == "request"]


def test_log_lines_are_json_without_prompts(server: Live, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "bytefloor.server"):
        server.chat("a secret", max_tokens=3)
        give_up = time.monotonic() + 5
        # The line is written once the answer has gone, which is when the client goes on.
        while not (lines := request_lines(caplog)) and time.monotonic() < give_up:
            time.sleep(0.01)
    line = lines[0]
    assert line["status"] == 200
    assert line["path"] == "/v1/chat/completions"
    assert line["generated"] == 3
    assert line["finish"] == "length"
    assert line["id"].startswith("req-")
    assert line["prompt"] > 3
    assert "secret" not in json.dumps(lines)


def figures(server: Live) -> dict[str, float]:
    lines = [line for line in server.http.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_metrics_count_what_happens(server: Live) -> None:
    before = figures(server)
    usage = server.chat("count this", max_tokens=5).json()["usage"]
    server.chat("count this", max_tokens=0)
    after = figures(server)

    def grown(name: str) -> float:
        return after[f"bytefloor_{name}"] - before.get(f"bytefloor_{name}", 0)

    assert grown("prompt_tokens_total") == usage["prompt_tokens"]
    assert grown("generated_tokens_total") == 5
    assert grown("cached_tokens_total") == usage["prompt_tokens_details"]["cached_tokens"]
    assert grown("time_to_first_token_seconds_count") == 1
    assert grown("time_per_token_seconds_count") == 1
    assert grown('http_responses_total{path="/v1/chat/completions",status="200"}') == 1
    assert grown('errors_total{status="400"}') == 1
    assert after["bytefloor_requests_running"] == after["bytefloor_requests_waiting"] == 0
    pages = {name: value for name, value in after.items() if name.startswith("bytefloor_pages_")}
    kinds = set(server.service.worker.load.pages)
    assert len(pages) == 2 * len(kinds)
    for kind in kinds:
        n_pages = server.service.worker.load.pages[kind].n_pages
        assert (
            pages[f'bytefloor_pages_used{{kind="{kind}"}}'] + pages[f'bytefloor_pages_free{{kind="{kind}"}}'] == n_pages
        )


def test_props_tell_what_is_served(server: Live) -> None:
    """V04: the context that is used."""
    props = server.http.get("/props").json()
    assert props["model"] == "tiny"
    assert props["context"] == 128
    assert props["n_sequences"] == 6
    assert "[assistant]" in props["chat_template"]
    assert props["defaults"]["temperature"] == 0.8


def test_tokenize_and_back(server: Live) -> None:
    text = "the naïve 🙂"
    ids = server.post("/tokenize", content=text, add_special=True).json()["tokens"]
    assert ids[0] == 2
    assert server.post("/detokenize", tokens=ids[1:]).json() == {"content": text}
    assert server.post("/detokenize", tokens=ids).json() == {"content": f"<bos>{text}"}
    pieces = server.post("/tokenize", content="the", with_pieces=True).json()["tokens"]
    assert "".join(piece["piece"] for piece in pieces) == "the"


def test_an_address_that_is_taken_is_an_error_of_one_line() -> None:
    first = bind("127.0.0.1", 0)
    first.listen()
    try:
        with pytest.raises(RequestError, match=r"cannot listen on 127.0.0.1 port .*in use"):
            bind("127.0.0.1", first.getsockname()[1])
        with pytest.raises(RequestError, match=r"cannot listen on no.such.host.invalid"):
            bind("no.such.host.invalid", 1)
    finally:
        first.close()
    if socket.has_ipv6:
        bind("::1", 0).close()


@pytest.mark.parametrize(
    "wrong", [{"timeout_s": 0}, {"timeout_s": float("nan")}, {"max_body_bytes": -1}, {"api_key": ""}, {"api_key": "é"}]
)
def test_options_out_of_range(wrong: dict[str, object]) -> None:
    with pytest.raises(RequestError, match="expected"):
        ServerOptions(**wrong)  # type: ignore[arg-type]
