"""A card as text, page, picture and files."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from draftwell.components.card.card import Card, Speed, Tried
from draftwell.components.card.files import read_card, write_card
from draftwell.components.card.page import card_html
from draftwell.components.card.picture import card_png
from draftwell.components.card.text import card_text
from draftwell.serving.bundle.card import MOST_BYTES
from draftwell.serving.errors import DraftwellError
from tests.support.cards import CARD, PLAIN, UNSURE, changed, crowded


def printed(card: Card, width: int = 80) -> list[str]:
    """The lines that a terminal shows."""
    console = Console(width=width, file=io.StringIO())
    with console.capture() as captured:
        console.print(card_text(card))
    return captured.get().splitlines()


def test_the_text_says_what_was_chosen_with_units() -> None:
    text = "\n".join(printed(CARD))
    assert "1.84 times as fast as plain decoding [1.71, 1.97] on 24 prompts" in text
    assert re.search(r"code +2\.31 +\[2\.10, 2\.55\] +16 +75\.0", text)
    assert re.search(r"chat +1\.20 +– +1 +47\.1", text), "an interval where there is none"
    assert re.search(r"8 +1\.02 +\[0\.95, 1\.09\] +24 +181\.5", text)
    assert "1.4 GB at most" in text
    assert "9 min 41 s" in text
    assert "yes, answers are the target's own" in text
    assert "csd (tau=0.4): 1.90 [1.70, 2.10] on 8 prompts: loses 12 % of ROUGE-L" in text
    assert text.endswith("next: draftwell serve --pair smollm2-135m")


def test_the_text_says_that_it_is_not_sure_and_what_it_would_take() -> None:
    text = "\n".join(printed(UNSURE))
    assert "not yet sure: 1.31 [0.98, 1.70] on 9 prompts; about 24 more prompts would do" in text
    assert "times as fast as plain" not in text
    assert "no, it loses 2.1 % of ROUGE-L" in text


def test_what_the_gate_left_open_is_not_sure_however_narrow_its_interval() -> None:
    text = "\n".join(printed(changed(verdict="undecided", needs="plain decoding serves meanwhile")))
    assert "not yet sure: 1.84 [1.71, 1.97] on 24 prompts; plain decoding serves" in text


def test_a_choice_without_a_figure_is_not_called_plain_decoding() -> None:
    card = changed(speed=None, strategy="draft_model(k=2)")
    assert not card.sure
    assert "not measured" in "\n".join(printed(card))
    assert "plain decoding" not in "\n".join(printed(card))
    assert changed(speed=None, strategy="off").sure


def test_predictions_and_passes_that_are_not_exact_are_called_that() -> None:
    guessed = Tried(speed=Speed(name="pearl", ratio=1.3, prompts=0), why_not="slower")
    card = changed(tried=(guessed,), exact=False)
    text, page = "\n".join(printed(card)), card_html(card)
    assert "pearl: 1.30 predicted: slower" in text
    assert "<td>predicted</td>" in page
    assert "but for near-ties" in text
    assert "but for near-ties" in page


def test_plain_decoding_has_no_ratio() -> None:
    assert "plain decoding: nothing that was tried was chosen" in "\n".join(printed(PLAIN))


def test_a_crowded_card_keeps_to_a_terminal_and_says_what_it_leaves_out() -> None:
    lines = printed(crowded())
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert "25 more in card.html" in lines, "7 + 8 + 10 rows"
    assert len(printed(crowded(), width=200)) <= 40
    # the command is whole: it is there to be copied
    assert "x" * 110 in "".join(line.strip() for line in lines)


def test_names_are_no_markup() -> None:
    card = changed(pair="[red]pair[/red]", next_command="draftwell serve --pair '[bold]'")
    text = "\n".join(printed(card))
    assert "[red]pair[/red]" in text
    assert "'[bold]'" in text


@pytest.mark.parametrize("card", [CARD, UNSURE, PLAIN], ids=["sure", "unsure", "plain"])
def test_the_page_needs_nothing_from_outside(card: Card) -> None:
    page = card_html(card)
    assert not re.search(r"(?:https?:)?//[\w.]+\.\w+", page)
    assert not re.search(r"<script|\son\w+=|\sstyle=|javascript:|<link|@import|url\(|<img", page)
    assert page.count("<style>") == 1
    assert 'name="viewport"' in page
    assert "prefers-color-scheme: dark" in page


def test_the_page_has_every_row_and_every_fact() -> None:
    page = card_html(crowded())
    assert page.count("<svg") == 36
    assert all(svg == "true" for svg in re.findall(r'<svg[^>]*aria-hidden="(\w+)"', page))
    assert "models" in page
    page = card_html(CARD)
    cells = re.findall(r"<td>([^<]*)</td>", page)
    assert cells[:4] == ["2.31", "[2.10, 2.55]", "16", "75.0"]
    assert "tau=0.4: loses 12 % of ROUGE-L, where 10 % are allowed" in page
    assert "<code>draftwell serve --pair smollm2-135m</code>" in page


def test_the_page_escapes_what_comes_from_outside() -> None:
    markup = "<script>alert(1)</script>"
    speed = Speed(name=markup, ratio=1.0, prompts=1)
    card = changed(
        by_kind=(speed,),
        tried=(Tried(speed=speed, parameters={markup: markup}, why_not=markup),),
        **dict.fromkeys(("pair", "machine", "fits", "engine", "next_command"), markup),
    )
    page = card_html(card)
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 9


def test_bars_have_one_scale_and_stay_inside() -> None:
    page = card_html(CARD)
    widths = [float(one) for one in re.findall(r'class="bar" x="0" y="2" width="([\d.]+)"', page)]
    code, chat = widths[:2]
    assert code / chat == pytest.approx(2.31 / 1.2, rel=1e-3)
    ends = [float(one) for one in re.findall(r'class="range" x1="[\d.]+" x2="([\d.]+)"', page)]
    assert len(ends) == 4, "chat has no interval"
    assert max(ends) == 100.0


@pytest.mark.parametrize("card", [CARD, UNSURE, PLAIN, crowded()])
def test_the_picture_is_a_picture(card: Card) -> None:
    with Image.open(io.BytesIO(card_png(card))) as picture:
        picture.load()
        assert picture.format == "PNG"
        assert picture.width == 1080
        assert 250 < picture.height < 900
        colours = picture.convert("RGB").getcolors(1 << 24) or []
    assert len(colours) > 20, "an empty picture"


def test_a_card_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    files = write_card(CARD, tmp_path)
    assert {file.name for file in files} == {
        *("card.json", "card.html", "card.png", "speed_by_kind.png")
    }
    assert {file.name for file in tmp_path.iterdir()} == {file.name for file in files}
    assert read_card(tmp_path / "card.json") == CARD
    assert (tmp_path / "card.html").read_text() == card_html(CARD)
    # another tuning's plot does not stay beside a card that has none
    write_card(PLAIN, tmp_path)
    assert not (tmp_path / "speed_by_kind.png").exists()


def test_what_is_no_card_is_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "card.json"
    written = CARD.model_dump(mode="json")
    cases = {
        "bad_card": [
            b"{",
            json.dumps({**written, "unknown": 1}).encode(),
            json.dumps({**written, "speed": {**written["speed"], "ratio": "fast"}}).encode(),
        ],
        "newer_card": [json.dumps({**written, "format": 2}).encode()],
        "no_card": [json.dumps({**written, "fits": "x" * MOST_BYTES}).encode()],
    }
    for code, contents in cases.items():
        for content in contents:
            file.write_bytes(content)
            with pytest.raises(DraftwellError) as refused:
                read_card(file)
            assert refused.value.code == code
            assert str(file) in str(refused.value)
    with pytest.raises(DraftwellError, match="there is no card") as refused:
        read_card(tmp_path / "missing.json")
    assert refused.value.code == "no_card"
