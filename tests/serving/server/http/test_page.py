"""The page in a real browser: what a person reads, hears, presses, and what it never does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.cards import CARD, PLAIN, UNSURE, crowded
from tests.support.server.browser import CONTRASTS, Page, browsing, find_browser
from tests.support.server.fake_answers import MARKUP, OFFER, TEXT, TOKENS, Fake, fake_server
from tests.support.server.server_process import wait_until

BROWSER = find_browser()
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium on PATH or in DRAFTWELL_CHROMIUM"
)

DONE = "document.querySelector('#status').textContent.startsWith('Done')"
READY = "!document.querySelector('#strategy').disabled"


@pytest.fixture(scope="module")
def fake() -> Iterator[Fake]:
    with fake_server() as server:
        yield server


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    assert BROWSER
    with browsing(BROWSER, tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(tab: Page, fake: Fake) -> Page:
    """The page, freshly loaded and ready."""
    fake.reset()
    tab.resize(1200)
    tab.scheme("light")
    tab.open("about:blank")
    tab.complaints.clear()
    tab.requests.clear()
    tab.open(f"{fake.url}/")
    tab.run("sessionStorage.clear()")
    tab.wait(READY)
    return tab


def ask(page: Page, prompt: str = "Why?", *, compare: bool = True) -> None:
    page.fill("#prompt", prompt)
    page.run(f"document.querySelector('#compare').checked = {'true' if compare else 'false'}")
    page.click("#run")


def tokens(page: Page, pane: str) -> list[list[str]]:
    """Text, class and tooltip of every token shown."""
    return page.run(
        f"[...document.querySelectorAll('#{pane} .output span')].map((s) => "
        "[s.textContent, s.className, s.title])"
    )


def figure(page: Page, pane: str, name: str) -> str:
    return page.text(f"#{pane} [data-figure={name}]")


def test_tokens_are_shown_by_origin_with_figures_beside_plain_decoding(
    page: Page, fake: Fake
) -> None:
    ask(page)
    page.wait(DONE)
    shown = tokens(page, "speculative")
    assert [(text, cls) for text, cls, _ in shown] == [
        (text, f"token {origin}") for text, origin in TOKENS if text
    ]
    assert len({title for _, _, title in shown}) == 4
    assert page.text("#speculative .output") == page.text("#plain .output") == TEXT
    legend = page.run(
        "[...document.querySelectorAll('.legend li')].map((l) => [l.dataset.origin, "
        "l.querySelector('b').textContent])"
    )
    assert legend == [
        ["accepted", "5 (56 %)"],
        ["rescued", "1 (11 %)"],
        ["recovered", "1 (11 %)"],
        ["target", "2 (22 %)"],
    ]
    assert figure(page, "speculative", "acceptance") == "86 %"
    assert figure(page, "speculative", "length") == "2.60"
    assert (figure(page, "speculative", "speed"), figure(page, "plain", "speed")) == (
        "60.0",
        "40.0",
    )
    assert (figure(page, "speculative", "calls"), figure(page, "plain", "calls")) == ("3", "8")
    assert figure(page, "speculative", "drafters") == "head 4, text 2"
    assert page.text("#ratio") == "1.50 ×"
    assert "Both texts are the same." in page.text("#verdict")
    assert page.text("#status") == (
        "Done: 9 tokens, 6 of them from the draft, 60.0 tokens per second, 1.50 × plain decoding."
    )
    told = {"stats": True, "trace": True}
    assert [body["speculation"] for body in fake.bodies] == [told, told | {"enabled": False}]
    assert not page.complaints


def test_markup_of_a_model_stays_text(page: Page) -> None:
    ask(page)
    page.wait(DONE)
    assert MARKUP in page.text("#speculative .output")
    assert page.run("document.querySelectorAll('.output *:not(span)').length") == 0
    assert page.run("window.hit") is None
    assert not [url for url in page.requests if url.endswith("/x")]


def test_origins_differ_in_form_as_well_as_in_colour(page: Page) -> None:
    forms = page.run("""['accepted', 'rescued', 'recovered', 'target'].map((o) => {
        const s = getComputedStyle(document.querySelector(`.legend .${o}`));
        return [s.textDecorationLine, s.textDecorationStyle].join(' '); })""")
    assert len(set(forms)) == 4
    assert forms[3].startswith("none")


def test_an_answer_in_pieces_is_the_same_answer(page: Page) -> None:
    ask(page, "in pieces", compare=False)
    page.wait(DONE)
    assert page.text("#speculative .output") == TEXT
    assert page.run("document.querySelector('#plain').checkVisibility()") is False
    assert page.run("document.querySelector('#verdict').hidden") is True


def test_live_figures_come_before_the_end(page: Page) -> None:
    ask(page, "for ever")
    page.wait("document.querySelectorAll('#speculative .output span').length > 5")
    assert figure(page, "speculative", "acceptance") == "100 %"
    page.wait("document.querySelector('[data-figure=force]').textContent == '3, 8 at once'")
    assert float(figure(page, "speculative", "speed")) > 0
    assert int(figure(page, "speculative", "tokens")) > 5
    page.click("#stop")
    page.wait("!document.querySelector('#run').disabled")


@pytest.mark.parametrize("how", ["click", "Escape"])
def test_stopping_ends_the_request_at_the_server_too(page: Page, fake: Fake, how: str) -> None:
    ask(page, "for ever")
    page.wait("document.querySelectorAll('#speculative .output span').length > 2")
    page.click("#stop") if how == "click" else page.press(how)
    page.wait("document.querySelector('#status').textContent === 'Stopped.'")
    assert page.run(
        "[document.querySelector('#run').disabled, document.querySelector('#stop').disabled]"
    ) == [False, True]
    wait_until(lambda: fake.cancelled, "the request is cancelled")
    assert fake.cancelled == ["for ever"]
    assert len(fake.bodies) == 1, "the comparison must not start once the run was stopped"


def test_a_connection_that_breaks_is_not_called_done(page: Page) -> None:
    ask(page, "broken")
    page.wait("document.querySelector('#status').classList.contains('wrong')")
    assert "ended before" in page.text("#status")
    assert page.run("document.querySelector('#run').disabled") is False


def test_a_full_queue_is_told_with_the_time_to_wait(page: Page, fake: Fake) -> None:
    fake.busy = True
    ask(page)
    page.wait("document.querySelector('#status').classList.contains('wrong')")
    assert page.text("#status") == "Not answered: the queue is full (try again in 7 s)"


def test_a_key_is_asked_for_and_kept_in_this_tab_only(tab: Page, fake: Fake) -> None:
    fake.reset()
    fake.key = "s3cret"
    tab.open("about:blank")
    tab.open(f"{fake.url}/")
    tab.run("sessionStorage.clear()")
    tab.wait("document.activeElement.id === 'key'")
    assert tab.run("document.querySelector('#key-box').open") is True
    tab.fill("#key", "s3cret")
    ask(tab, compare=False)
    tab.wait(DONE)
    assert tab.run("Object.values(sessionStorage)") == ["s3cret"]
    assert tab.run("localStorage.length") == 0
    assert tab.run("document.cookie") == ""
    assert "s3cret" not in tab.run("location.href")
    tab.run("sessionStorage.clear()")


def test_what_is_chosen_is_what_is_asked(page: Page, fake: Fake) -> None:
    page.fill("#parameter-threshold", "0.7")
    page.fill("#temperature", "0.5")
    page.fill("#max-tokens", "33")
    ask(page, "Hello", compare=False)
    page.wait(DONE)
    assert fake.paths == ["chat/completions"]
    assert fake.bodies[0] == {
        "model": "fake",
        "max_tokens": 33,
        "temperature": 0.5,
        "stream": True,
        "messages": [{"role": "user", "content": "Hello"}],
        "speculation": {"parameters": {"threshold": 0.7}, "stats": True, "trace": True},
    }


def test_another_strategy_brings_its_own_thresholds(page: Page, fake: Fake) -> None:
    assert page.run("[...document.querySelector('#strategy').options].map((o) => o.value)") == [
        s["name"] for s in OFFER["strategies"]
    ]
    page.fill("#strategy", "csd")
    assert "Lossy" in page.text("#strategy-note")
    page.click("#parameter-use_gate")
    page.fill("#parameter-mode", "hard")
    page.click("[value=completion]")
    ask(page, "Hello", compare=False)
    page.wait(DONE)
    assert fake.paths == ["completions"]
    assert fake.bodies[0]["prompt"] == "Hello"
    assert fake.bodies[0]["speculation"] == {
        "strategy": "csd",
        "parameters": {"use_gate": False, "mode": "hard"},
        "stats": True,
        "trace": True,
    }
    page.fill("#strategy", "autoregressive")
    assert page.run("document.querySelector('#parameters').checkVisibility()") is False


def test_thresholds_are_shown_only_where_the_server_takes_none(tab: Page, fake: Fake) -> None:
    fake.reset()
    fake.allow_parameters = False
    tab.open("about:blank")
    tab.open(f"{fake.url}/")
    tab.wait(READY)
    assert tab.run(
        "[...document.querySelectorAll('#fields input')].map((i) => [i.disabled, i.value])"
    ) == [[True, "0.4"], [True, "8"]]
    assert "--allow-parameters" in tab.text("#parameters-note")
    ask(tab, compare=False)
    tab.wait(DONE)
    assert "parameters" not in fake.bodies[0]["speculation"]


def test_bounds_of_the_form_keep_a_request_back(page: Page, fake: Fake) -> None:
    page.fill("#parameter-threshold", "1.5")
    ask(page)
    assert page.run("document.querySelector('#parameter-threshold').validity.rangeOverflow") is True
    page.fill("#parameter-threshold", "0.4")
    page.fill("#max-tokens", "257")
    ask(page)
    assert not fake.bodies


def test_everything_works_from_the_keyboard_in_reading_order(page: Page) -> None:
    page.run("document.querySelector('#key-box').open = true")
    page.run("document.activeElement.blur()")
    order = []
    for _ in range(40):
        page.press("Tab")
        name = page.run(
            "(({activeElement: e}) => e.id || e.getAttribute('aria-label') || "
            "e.textContent)(document)"
        )
        if page.run("document.activeElement === document.body") or name in order:
            break  # around once
        order.append(name)
        assert page.run("getComputedStyle(document.activeElement).outlineStyle") != "none", (
            f"{name}: the focus is not to be seen"
        )
    wanted = [
        "prompt",
        "run",
        "strategy",
        "temperature",
        "max-tokens",
        "compare",
        "parameter-threshold",
        "parameter-max_draft",
        "key",
        "Text with speculation",
        "Text of plain decoding",
    ]
    assert [name for name in order if name in wanted] == wanted
    assert page.run("document.querySelectorAll('[tabindex]:not([tabindex=\"0\"])').length") == 0
    page.run("document.querySelector('#prompt').focus()")
    page.press("Enter", modifiers=2)
    page.wait(DONE)


def test_the_focus_is_not_lost_when_a_button_goes(page: Page) -> None:
    page.fill("#prompt", "for ever")
    page.run("document.querySelector('#run').focus()")
    page.press(" ")
    page.wait("document.activeElement.id === 'stop'")
    page.press(" ")
    page.wait("document.activeElement.id === 'run'")


def test_a_screen_reader_finds_a_name_for_every_control(page: Page) -> None:
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    roles = {
        "textbox",
        "combobox",
        "spinbutton",
        "checkbox",
        "radio",
        "button",
        "region",
        "link",
        "form",
        "searchbox",
    }
    found = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in nodes
        if not node["ignored"] and node["role"]["value"] in roles
    ]
    assert len(found) >= 14
    assert all(name.strip() for _, name in found), found
    assert page.run("document.querySelector('#status').getAttribute('aria-live')") == "polite"
    assert (
        page.run("[...document.querySelectorAll('.output')].some((o) => o.closest('[aria-live]'))")
        is False
    ), "token by token is noise"
    assert page.run("document.documentElement.lang") == "en"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_is_enough(page: Page, scheme: str) -> None:
    page.scheme(scheme)
    dark = page.run("getComputedStyle(document.body).backgroundColor") == "rgb(15, 18, 22)"
    assert dark == (scheme == "dark")
    assert page.run(CONTRASTS) == []
    ask(page)
    page.wait(DONE)
    assert page.run(CONTRASTS) == []
    ask(page, "broken")
    page.wait("document.querySelector('#status').classList.contains('wrong')")
    assert page.run(CONTRASTS) == []


def test_a_narrow_screen_needs_no_sideways_scrolling(page: Page) -> None:
    page.resize(360, 740)
    ask(page, "LONG")
    page.wait(DONE)
    assert page.run("document.documentElement.scrollWidth") <= 360
    assert (
        page.run(
            "[...document.querySelectorAll('.output, form, .pane')].filter((e) => "
            "e.scrollWidth > e.clientWidth + 1).length"
        )
        == 0
    )
    small = page.run(
        "[...document.querySelectorAll('button')].filter((b) => "
        "b.getBoundingClientRect().height < 44).length"
    )
    assert small == 0


def test_the_page_asks_its_own_server_only(page: Page, fake: Fake) -> None:
    ask(page)
    page.wait(DONE)
    assert page.requests
    assert [url for url in page.requests if not url.startswith(fake.url)] == []


def test_the_policy_holds_in_the_browser(page: Page) -> None:
    refused = """(() => { const out = [];
        try { document.body.insertAdjacentHTML('beforeend', '<i>x</i>'); out.push('html'); } catch (e) {}
        try { eval('1'); out.push('eval'); } catch (e) {}
        return out; })()"""  # noqa: E501
    assert page.run(refused) == []
    assert (
        page.run("fetch('http://127.0.0.1:9/').then(() => 'fetched', (e) => 'refused')")
        == "refused"
    )
    assert any("Content Security Policy" in text for text in page.complaints)


def test_the_bundles_card_is_told_on_top_and_led_to(page: Page, fake: Fake) -> None:
    assert page.run("document.querySelector('#card').checkVisibility()") is False
    fake.card = CARD
    page.open("about:blank")
    page.open(f"{fake.url}/")
    page.wait("document.querySelector('#card').checkVisibility()")
    assert page.text("#card") == (
        "1.84 × the speed of plain decoding with eagle3 [1.71, 1.97] on 24 prompts; exact. Its card"
    )
    page.click("#card-link")
    page.wait("location.pathname === '/card' && document.readyState === 'complete'")
    assert page.text("h1") == "smollm2-135m: eagle3"
    assert page.complaints == []
    fake.card = UNSURE
    page.open(f"{fake.url}/")
    page.wait("document.querySelector('#card').checkVisibility()")
    assert page.text("#card").startswith(
        "1.31 × the speed of plain decoding with eagle3 [0.98, 1.70] on 9 prompts; it loses 2.1 % "
        "of ROUGE-L. Not yet sure: about 24 more prompts would do."
    )
    fake.card = PLAIN
    page.open("about:blank")
    page.open(f"{fake.url}/")
    page.wait("document.querySelector('#card').checkVisibility()")
    assert page.text("#card").startswith("Plain decoding was chosen when this model was tuned.")


def test_a_key_is_no_part_of_a_link(page: Page, fake: Fake) -> None:
    fake.key, fake.card = "s3cret", CARD
    page.run("sessionStorage.setItem('draftwell-key', 's3cret')")
    page.open("about:blank")
    page.open(f"{fake.url}/")
    page.wait("document.querySelector('#card').checkVisibility()")
    assert page.run("document.querySelector('#card-link').checkVisibility()") is False


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1200])
def test_the_card_is_readable(page: Page, fake: Fake, width: int, scheme: str) -> None:
    fake.card = crowded()
    page.resize(width)
    page.scheme(scheme)
    page.requests.clear()
    page.open(f"{fake.url}/card")
    ground = page.run("getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 25, 30)"}[scheme], (
        "its own policy refuses its style"
    )
    assert page.run("document.documentElement.scrollWidth") <= width
    wide = (
        "[...document.querySelectorAll('.wide')].filter((e) => e.scrollWidth > e.clientWidth + 1)"
    )
    assert page.run(f"{wide}.length") == 0, "a table is cut"
    assert (
        page.run("Math.min(...[...document.querySelectorAll('svg')].map((e) => e.clientWidth))")
        > 60
    )
    assert page.run(CONTRASTS) == []
    assert [url for url in page.requests if not url.startswith(f"{fake.url}/card")] == []
    assert page.complaints == []
