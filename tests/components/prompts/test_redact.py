"""What is masked, what is not, and that a prompt counts as the same with and without."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from draftwell.components.prompts.messages import NoPrompt
from draftwell.components.prompts.overlap import hash_of
from draftwell.components.prompts.prompt import Prompt, demo_prompts
from draftwell.components.prompts.redact import masked, redacted
from draftwell.components.prompts.sources import LeftOut, load_prompts

WEB_TOKEN = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9P"
PRIVATE = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nIBAAKC\n-----END RSA PRIVATE KEY-----"

MASKED = {
    "[email]": [
        "ann@example.org",
        "first.last+tag@mail.example.co.uk",
        "neil_99@sub-domain.example.com",
        "grüße@bücher.example",
    ],
    "[phone]": [
        "+49 30 901820",
        "+1 (212) 555-0142",
        "+14155550123",
        "0044 20 7946 0958",
        "(212) 555-0142",
        "212-555-0142",
        "1-800-555-0199",
        "020 7946 0958",
        "06 12 34 56 78",
        "030/1234567",
        "0151-23456789",
    ],
    "[key]": [
        "sk-abcdefghij0123456789xyz",
        "sk-proj-Abc_def-0123456789abcdefgh",
        "sk-ant-api03-abcdefghijklmnop",
        "sk_live_4eC39HqLyjWDarjtT1zdp7dc",
        "AKIAIOSFODNN7EXAMPLE",
        "ghp_16C7e42F292c6912E7710c838347Ae178B4a",
        "github_pat_11ABCDEFG0123456789_abcdefghijklmnop",
        "xoxb-123456789012-abcdefghij",
        "AIzaSyD-abcdefghijklmnopqrstuvwxyz01234",
        "hf_abcdefghijklmnopqrstuvwxyzABCDEFGH",
        "glpat-abcdefghij0123456789",
        WEB_TOKEN,
        PRIVATE,
    ],
    "[card]": [
        "4111 1111 1111 1111",
        "5500-0000-0000-0004",
        "378282246310005",
        "3782 822463 10005",
    ],
    "[ip]": ["10.0.0.7", "192.168.178.20", "2001:db8:0:0:1:0:0:7"],
}
KEPT = [
    "on 2024-01-15 at 12:30:45, or 01.02.2024",
    "pi is 3.14159265358979 and 0.1234567890",
    "1234567890123456 is no card, nor is 4111 1111 1111 1112",
    "version 1.2.3 of 10.4.1-beta at 127.0.0.1, mask 255.255.255.0",
    "std::vector<int> a::b and 12:30:45:10",
    "ISBN 978-3-16-148410-0, order 1047, 555-1234",
    "100-200-3000 = -3100; 5 + 49 30 901820; 12 34 56 78 90 12 34",
    "@decorator def f(x) -> x@y, see user@localhost",
    "risk-averse-and-long-words-stay, task-list-of-many-parts",
    "password = input('x'); token: abc; the key is under the mat",
    "basic understanding of bearers",
    "eyJust a word. AKIA alone. sk-short",
    "def f(): return 0x1234567890ABCDEF",
]


@pytest.mark.parametrize(
    ("mask", "text"), [(mask, text) for mask, found in MASKED.items() for text in found]
)
def test_what_is_private_by_its_form_is_masked(mask: str, text: str) -> None:
    for frame in ("{}", "Is it {}?", "({}), then", "a\n{}\nb", '{{"x": "{}"}}'):
        assert masked(frame.format(text)) == frame.format(mask)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("Authorization: Bearer abcdef0123456789abcdef", "Authorization: Bearer [key]"),
        ("api_key='abcd1234efgh5678'", "api_key='[key]'"),
        ('{"client_secret": "0a1b2c3d4e5f6a7b"}', '{"client_secret": "[key]"}'),
        ("postgres://bob:s3cret@db.example/x", "postgres://[key]@db.example/x"),
    ],
)
def test_secrets_that_their_names_give_away(text: str, left: str) -> None:
    assert masked(text) == left
    assert masked(left) == left


@pytest.mark.parametrize("text", KEPT)
def test_what_only_looks_like_it_is_kept(text: str) -> None:
    assert masked(text) == text


def test_long_texts_take_no_longer_than_they_should() -> None:
    """A text without an end to its `token=` took half an hour a megabyte."""
    for part in ("aa", "1 ", "a.", "0-", "x@", "token=", "secret:", "eyJ-", "://a:", "-----BEGIN "):
        start = time.thread_time()
        masked(part * (200_000 // len(part)))
        assert time.thread_time() - start < 5, part


PROMPT = {
    "id": "ann@example.org",
    "system": "The admin is ann@example.org.",
    "messages": [
        {"role": "user", "content": "Call +49 30 901820."},
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": "c",
                    "function": {
                        "name": "pay",
                        "arguments": '{"to": "bob@example.org", "card": 4111111111111111}',
                    },
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "key sk-abcdefghij0123456789xyz"},
        {"role": "assistant", "content": "Sent to bob@example.org."},
    ],
    "tools": [
        {"type": "function", "function": {"name": "pay", "description": "as ann@example.org"}}
    ],
    "answer": "bob@example.org",
}
PRIVATE_PARTS = ("ann@", "bob@", "901820", "4111111111111111", "sk-abc")


def test_every_part_of_a_prompt_is_masked_and_its_hash_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps(PROMPT) + "\n" + '{"prompt": [1, 2]}\n')
    (open_, _), left = load_prompts(tmp_path / "p.jsonl"), LeftOut()
    assert all(part in repr(open_) for part in PRIVATE_PARTS)
    (closed,) = load_prompts(tmp_path / "p.jsonl", redact=True, left_out=left)
    assert not [part for part in PRIVATE_PARTS if part in repr(closed)]
    assert hash_of(open_) == hash_of(closed)
    assert redacted(closed) == closed
    assert "token ids" in str(left)


def test_an_id_keeps_the_tenant_that_it_names(tmp_path: Path) -> None:
    """Digits that begin with 00 look like a phone number; `draftwell forget` finds prompts by
    them, in tables too."""
    whose = "spool/00123456789a/"
    asked = Prompt(f"{whose}ann@example.org", None, ["hi"])
    assert redacted(asked).id == f"{whose}[email]"
    (tmp_path / "p.csv").write_text(f"id,prompt\n{whose}0001,hi\n7,ho\n")
    found = load_prompts(tmp_path / "p.csv", redact=True)
    assert [prompt.id for prompt in found] == [f"{whose}0001", "p/1"]


def test_token_ids_are_not_passed_off_as_masked() -> None:
    with pytest.raises(NoPrompt):
        redacted(Prompt("a", None, [""], tokens=((1, 2),)))


def test_shipped_prompts_hold_nothing_to_mask() -> None:
    assert [redacted(prompt) for prompt in demo_prompts()] == demo_prompts()
