"""The chat page in a real browser."""

from __future__ import annotations

import fnmatch
import socket
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.keys import Keys

from bytefloor.engine.loading import EngineOptions, Opened, open_engine
from bytefloor.engine.stream_limit import StreamLimit
from bytefloor.server.page import FILES
from server.browser import MISSING, ChatPage, chromium
from server.live import SHORT, Live, Scripted, chatty, eventually, live, scripted
from server.test_answers import THINKING

Stage = tuple[Live, Scripted]
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    if MISSING is not None:
        pytest.skip(MISSING)
    with chromium(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def page(stage: Stage, driver: webdriver.Chrome) -> ChatPage:
    found = ChatPage(driver, stage[0].url)
    found.shows("tiny", "#model")
    return found


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    return open_engine(chatty(tmp_path_factory.mktemp("thinker"), "qwen3", THINKING), EngineOptions(context=64))


def script(stage: Stage, answer: str, question: str = "hello") -> None:
    """What the next answer to a single question is."""
    stage[1].say(answer, stage[0].n_prompt(question))


@contextmanager
def slow(stage: Stage, pause_s: float = 0.05) -> Iterator[None]:
    stage[1].pause_s = pause_s
    yield
    stage[1].pause_s = 0.0


# Without a browser ------------------------------------------------------------------------------------------


def test_the_files_need_no_key_and_allow_nothing_but_this_server(opened: Opened) -> None:
    with live(scripted(opened)[0], replace(SHORT, api_key="s3cret")) as running:
        for path, (_, kind) in FILES.items():
            found = running.http.get(path)
            assert found.status_code == 200
            assert found.headers["content-type"] == f"{kind}; charset=utf-8"
            rules = dict(rule.strip().split(" ", 1) for rule in found.headers["content-security-policy"].split(";"))
            assert rules["default-src"] == "'none'"
            assert {rule for values in rules.values() for rule in values.split()} == {"'none'", "'self'", "data:"}
            assert rules["img-src"] == "data:"
            assert found.headers["x-content-type-options"] == "nosniff"
        assert running.http.get("/props").status_code == 401


def test_the_files_name_no_address_elsewhere_and_are_shipped() -> None:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["bytefloor.server"]
    for name, _ in FILES.values():
        assert any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
        text = (REPOSITORY / "src/bytefloor/server" / name).read_text().replace("http://www.w3.org/2000/svg", "")
        assert "//" not in text.replace("// ", "")
        assert not [word for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "eval(") if word in text]
        lines = text.splitlines()
        assert len(lines) <= 450
        assert max(map(len, lines)) <= 120


# Asking -----------------------------------------------------------------------------------------------------


def test_an_answer_is_shown_as_it_comes(stage: Stage, page: ChatPage) -> None:
    whole = "one two three four five six seven eight nine ten"
    script(stage, whole)
    seen: set[str] = set()
    with slow(stage):
        page.send("hello")
        eventually(lambda: seen.add(page.answer) or page.answer == whole, "whole")
    assert len({part for part in seen if part and whole.startswith(part)}) >= 3
    page.settle()
    assert page.text("article.user .body") == "hello"
    assert page["prompt"].get_attribute("value") == ""
    assert page.driver.switch_to.active_element.get_attribute("id") == "prompt"


@pytest.mark.parametrize("way", ["Stop", "Escape"])
def test_stopping_keeps_what_was_said_and_frees_the_place(stage: Stage, page: ChatPage, way: str) -> None:
    running, executor = stage
    script(stage, "x" * 300)
    with slow(stage):
        page.send("hello")
        page.shows("xx", "article.assistant .body")
        if way == "Stop":
            page.click("Stop")
        else:
            page["prompt"].send_keys(Keys.ESCAPE)
        page.settle()
        eventually(lambda: running.service.worker.n_open == 0, "freed")
    assert 2 <= len(page.answer) < 300
    assert page.text(".note") == "Stopped."
    assert not page["problem"].is_displayed()
    assert len(executor.batches) < 250


def test_a_reload_keeps_the_chat_and_a_new_one_can_be_taken_back(stage: Stage, page: ChatPage) -> None:
    script(stage, "**kept**")
    page.send("hello")
    page.shows("kept", "article.assistant strong")
    page.settle()
    page.driver.refresh()
    page.shows("kept", "article.assistant strong")
    page.shows("of 512 tokens", "#context-text")
    assert not page["context-text"].text.startswith("0 ")
    page.click("New chat")
    assert page.text("article") == ""
    assert page["context-text"].text.startswith("0 ")
    page.driver.refresh()
    page.shows("Bring the last chat back")
    page.click("Bring the last chat back")
    assert page.answer == "kept"


def test_a_conversation_goes_along_and_its_last_turns_can_be_changed(stage: Stage, page: ChatPage) -> None:
    script(stage, "first")
    page.send("hello")
    page.shows("first", "article.assistant .body")
    page.settle()
    script(stage, "second")
    page.click("Answer anew")
    page.shows("second", "article.assistant .body")
    page.settle()
    assert [body["messages"] for body in page.chats()] == [[{"role": "user", "content": "hello"}]] * 2

    page.click("Edit")
    field = page.all(".editor textarea")[0]
    assert field.get_attribute("value") == "second"
    field.clear()
    field.send_keys("third")
    page.click("Save")
    assert page.answer == "third"
    page.send("more")
    eventually(lambda: len(page.all("article.assistant")) == 2, "answered")
    page.settle()
    sent = page.chats()[-1]["messages"]
    assert [(each["role"], each["content"]) for each in sent] == [
        ("user", "hello"), ("assistant", "third"), ("user", "more"),
    ]  # fmt: skip

    page.all("article.user:nth-last-child(2) .actions button")[0].click()
    page.all(".editor textarea")[0].send_keys("!")
    page.click("Ask")
    page.settle()
    assert page.chats()[-1]["messages"][-1]["content"] == "more!"
    assert len(page.all("article")) == 4


def test_shift_and_enter_break_the_line(page: ChatPage) -> None:
    page["prompt"].send_keys("a", Keys.SHIFT, Keys.ENTER, Keys.NULL, "b")
    assert page["prompt"].get_attribute("value") == "a\nb"
    assert page.text("article") == ""


def test_thoughts_are_folded_apart_and_can_be_turned_on(thinking: Opened, driver: webdriver.Chrome) -> None:
    engine, executor = scripted(thinking)
    with live(engine) as running:
        page = ChatPage(driver, running.url)
        script((running, executor), "<think>because of *this*</think>therefore")
        page.send("hello")
        page.shows("therefore", "article.assistant .body")
        page.settle()
        assert page.answer == "therefore"
        thought = page.all("details.thought")[0]
        assert thought.get_attribute("open") is None
        assert page.all("details.thought div")[0].get_attribute("textContent") == "because of *this*"
        page.click("Settings")
        page["thinking"].send_keys("o", "n")
        page.click("Close")
        page.click("New chat")
        page.send("hello")
        eventually(lambda: page.all("article.assistant .thought"), "thought")
        page.settle()
        first, second = page.chats()
        assert "chat_template_kwargs" not in first
        assert second["chat_template_kwargs"] == {"enable_thinking": True}


def test_settings_are_kept_and_sent(stage: Stage, page: ChatPage) -> None:
    page.click("Settings")
    defaults = stage[0].http.get("/props").json()["defaults"]
    for name in ("temperature", "top_p", "top_k"):
        assert float(page[name].get_attribute("placeholder")) == defaults[name]
    given = {"system": "Be brief.", "temperature": "0.5", "top_p": "0.9", "top_k": "7", "max_tokens": "4", "seed": "11"}
    for name, value in given.items():
        page[name].send_keys(value)
    assert not page["thinking"].is_displayed()
    page.driver.refresh()
    page.send("hello")
    page.shows("The answer was ended", ".note")
    (body,) = page.chats()
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert {name: body[name] for name in ("temperature", "top_p", "top_k", "max_tokens", "seed")} == {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "max_tokens": 4, "seed": 11,
    }  # fmt: skip
    page.click("Settings")
    page.click("Back to the defaults")
    assert page["seed"].get_attribute("value") == ""
    page["temperature"].send_keys("-1")
    page.click("Close")
    page.click("Answer anew")
    page.shows("temperature", "#problem")


# Trust ------------------------------------------------------------------------------------------------------

ATTACK = "<script>window.hit=1</script><img src=x onerror='window.hit=1'>"
PLACES = (
    f"{ATTACK}\n\n# {ATTACK}\n\n- {ATTACK}\n\n> {ATTACK}\n\n|a {ATTACK}|b|\n|-|-|\n|c|{ATTACK}|\n\n"
    f"**{ATTACK}**\n\n`{ATTACK}`\n\n```{ATTACK}\n{ATTACK}\n```\n[a](javascript:window.hit=1)"
)


def test_what_a_model_says_stays_text(stage: Stage, page: ChatPage, opened: Opened) -> None:
    engine, executor = scripted(opened, capacity=2048)
    with live(engine, replace(SHORT, name=f"t{ATTACK}")) as running:
        page = ChatPage(page.driver, running.url)
        script((running, executor), PLACES, ATTACK)
        page.send(ATTACK)
        page.shows("javascript:window.hit=1", "article.assistant .body")
        page.settle()
        assert page.all("#log :is(script, img, a, iframe), header :is(script, img)") == []
        assert page.text("article.assistant .body").count("onerror='window.hit=1'") == 10
        assert page.text("article.user .body") == ATTACK
        assert page["model"].text == f"t{ATTACK}"
        assert page.script("return window.hit ?? null") is None


def test_no_request_leaves_the_server(stage: Stage, page: ChatPage) -> None:
    script(stage, "![a](http://127.0.0.1:9/x.png) <img src='//127.0.0.1:9/y'> [l](http://127.0.0.1:9/)")
    page.send("hello")
    page.shows("9/", "article.assistant .body")
    page.settle()
    urls = [each["url"] for each in page.requests()]
    assert len(urls) >= 6
    assert [url for url in urls if not url.startswith((f"{stage[0].url}/", "data:"))] == []


def test_the_policy_stops_what_would_leave(page: ChatPage) -> None:
    """As if a text had become markup after all."""
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        elsewhere.settimeout(1)
        url = f"http://127.0.0.1:{elsewhere.getsockname()[1]}/"
        page.script(
            "addEventListener('securitypolicyviolation', (e) => (window.stopped ??= []).push(e.violatedDirective))"
        )
        page.script("fetch(arguments[0]).catch(() => 0); new Image().src = arguments[0]", url)
        page.script("document.body.append(make('iframe', { src: arguments[0] }))", url)
        page.script("document.body.append(make('script', {}, 'window.hit = 1'))")
        page.script("document.body.append(make('form', { action: arguments[0] })); document.forms[2].submit()", url)
        kinds = ("connect-src", "img-src", "frame-src", "script-src-elem", "form-action")
        eventually(lambda: set(kinds) <= set(page.script("return window.stopped ?? []")), "stopped")
        assert page.script("return window.hit ?? null") is None
        # Before it asks the policy about a frame or a form, Chromium may connect, but it says nothing.
        with suppress(TimeoutError):
            while True:
                connection, _ = elsewhere.accept()
                connection.settimeout(0.3)
                with connection, suppress(TimeoutError):
                    assert connection.recv(1) == b""


def test_a_key_is_asked_for_and_forgotten_with_the_tab(opened: Opened, driver: webdriver.Chrome) -> None:
    engine, executor = scripted(opened)
    with live(engine, replace(SHORT, api_key="s3cret")) as running:
        running.http.headers["x-api-key"] = "s3cret"
        page = ChatPage(driver, running.url)
        page.shows("This server asks for a key")
        page["key"].send_keys("wrong", Keys.ENTER)
        page.shows("not the right one", "#key-dialog")
        page["key"].send_keys("s3cret", Keys.ENTER)
        page.shows("tiny", "#model")
        assert not page["key-dialog"].is_displayed()
        assert not page["problem"].is_displayed()
        script((running, executor), "let in")
        page.send("hello")
        page.shows("let in", "article.assistant .body")
        assert page.script("return JSON.stringify(localStorage)").count("s3cret") == 0
        assert page.script("return sessionStorage.getItem('bytefloor.key')") == "s3cret"
        page.settle()
        page.script("sessionStorage.setItem('bytefloor.key', 'old')")
        page.click("Answer anew")
        page.shows("not the right one", "#key-dialog")
        page["key"].send_keys("s3cret", Keys.ENTER)
        page.shows("let in", "article.assistant .body")


# What goes wrong --------------------------------------------------------------------------------------------


def test_errors_are_told_in_words(stage: Stage, page: ChatPage) -> None:
    running, executor = stage
    page["prompt"].send_keys("long " * 150, Keys.ENTER)
    page.shows("no longer fits in the context", "#problem")
    page.shows("the context holds 512", "#problem")
    page.click("New chat")
    running.service._is_draining = True
    page.send("hello")
    page.shows("takes no requests now: the server is stopping", "#problem")
    running.service._is_draining = False
    script(stage, "at last")
    page.click("Try again")
    page.shows("at last", "article.assistant .body")
    page.settle()
    assert not page["problem"].is_displayed()
    executor.failure = ValueError("planted")
    page.click("Answer anew")
    page.shows("planted", "#problem")
    assert page.text("article").startswith("You\nhello")


def test_a_lost_connection_is_told_and_the_part_is_kept(opened: Opened, driver: webdriver.Chrome) -> None:
    engine, executor = scripted(opened)
    with live(engine) as running:
        page = ChatPage(driver, running.url)
        executor.say("y" * 400, running.n_prompt("hello"))
        executor.pause_s = 0.03
        page.send("hello")
        page.shows("yy", "article.assistant .body")
        executor.pause_s = 0
        executor.gate.clear()
        for connection in list(running.server.server_state.connections):
            running.loop.call_soon_threadsafe(connection.transport.abort)
        page.shows("The connection to the server was lost", "#problem")
        executor.gate.set()
        page.settle()
        assert page.text(".note") == "The answer is not whole."
        assert page.answer.startswith("yy")
    page.click("Try again")
    page.shows("The connection to the server was lost", "#problem")


# What is seen beside ----------------------------------------------------------------------------------------


def test_facts_and_speed_are_shown_but_no_share_on_a_cpu(stage: Stage, page: ChatPage) -> None:
    props = stage[0].http.get("/props").json()
    for words in (props["family"], "32.00 bits", "F32 100%", "512 tokens", "cpu", "chatty"):
        page.shows(words, "#empty")
    script(stage, "a b c d e f g h i j k l m n o p")
    with slow(stage, 0.08):
        page.send("hello")
        page.shows("tok/s", "#speed")
        page.settle()
    page.shows("tok/s", ".stats")
    assert "floor" not in page.text("body").lower()


def test_the_share_of_the_floor_is_shown_where_the_limit_is_known(opened: Opened, driver: webdriver.Chrome) -> None:
    engine, executor = scripted(opened)
    with live(engine, limit=StreamLimit(0.5)) as running:
        page = ChatPage(driver, running.url)
        script((running, executor), "a b c d e f g h i j k l m n o p")
        executor.pause_s = 0.05
        page.send("hello")
        page.shows("% of the floor", "#speed")
        page.settle()
        page.shows("% of the floor", ".stats")
        page.click("Settings")
        page.shows("tokens a second, at", "#facts-again")


def test_the_queue_and_the_reading_of_the_prompt_are_shown(opened: Opened, driver: webdriver.Chrome) -> None:
    engine, executor = scripted(opened, n_sequences=1, chunk=16)
    with live(engine) as running, ThreadPoolExecutor(1) as pool:
        page = ChatPage(driver, running.url)
        executor.pause_s, long = 0.25, " ".join(["word"] * 20)
        other = pool.submit(running.chat, "first", max_tokens=6)
        assert executor.is_inside.wait(20)
        page.send(long)
        page.shows("In the queue", ".waiting")
        page.shows("Reading the prompt: ", ".waiting")
        assert other.result().status_code == 200
        total = running.n_prompt(long)
        page.shows(f"Reading the prompt: 48 of {total} tokens", ".waiting")
        executor.pause_s = 0
        page.settle()


def test_nothing_is_wider_than_a_phone(stage: Stage, page: ChatPage) -> None:
    script(stage, f"|a|b|\n|-|-|\n|{'w' * 60}|{'w' * 60}|\n\n```\n{'c' * 100}\n```\n{'l' * 100}")
    screen = {"width": 360, "height": 640, "deviceScaleFactor": 1, "mobile": True}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    try:
        page.send("hello")
        page.shows("lll", "article.assistant .body")
        page.settle()
        assert page.script("return document.documentElement.scrollWidth") <= 360
        page.click("Settings")
        assert page["settings"].rect["width"] <= 360
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_everything_has_a_name_for_those_who_hear_the_page(stage: Stage, page: ChatPage) -> None:
    script(stage, "hi")
    page.send("hello")
    page.shows("hi", "article.assistant .body")
    page.settle()
    page.shows("", "#status")
    assert page["status"].get_attribute("textContent").startswith("The answer is complete")
    assert page["log"].get_attribute("aria-live") == "polite"
    assert page["log"].get_attribute("aria-busy") == "false"
    page.click("Settings")
    tree = page.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    named = {"button", "textbox", "combobox", "meter", "dialog"}
    found = [
        (node["role"]["value"], node["name"]["value"]) for node in tree if node.get("role", {}).get("value") in named
    ]
    assert len(found) >= 9
    assert [role for role, name in found if not name] == []
    # A placeholder would be a name too, but not one that says what the field is.
    fields = "return [...document.querySelectorAll('input, select, textarea')]"
    assert page.script(f"{fields}.filter((field) => !field.labels.length)") == []
