"""Masks e-mails, phone numbers, keys, card numbers and addresses of machines in prompts.

What is found by its form is masked, nothing else: no names, no postal addresses, no numbers of
accounts or passports (docs/traffic.md lists both). Masking twice changes nothing.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from draftwell.components.prompts.messages import NoPrompt
from draftwell.components.prompts.prompt import Prompt
from draftwell.serving.recording.tenants import PROMPT_ID

Check = Callable[[str], bool]

KEYS = (
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    r"\beyJ[\w-]{8,2000}\.[\w-]{8,8000}\.[\w-]*",  # a JSON web token
    r"\b(?:sk|pk|rk)[-_](?:live|test|proj|ant|or|svcacct)[-_][\w-]{16,}",
    r"\bsk-[\w-]{20,}",
    r"\b(?:AKIA|ASIA|ABIA|ACCA)[0-9A-Z]{16}\b",
    r"\bgh[pousr]_\w{30,}|\bgithub_pat_\w{30,}|\bglpat-[\w-]{20,}",
    r"\bxox[abposr]-[\w-]{10,}|\bAIza[\w-]{35}|\bhf_[A-Za-z]{30,}|\bnpm_\w{36}",
    r"\bpypi-[\w-]{30,}|\bSG\.[\w-]{16,}\.[\w-]{16,}|\bya29\.[\w-]{20,}",
)
VALUED = (
    r"(?i:\b(?:bearer|basic)\s+)(?P<secret>[\w.~+/-]{16,}=*)",
    r"(?i:(?:api[_-]?key|secret|token|passwd|password)[\"']?\s*[:=]\s*[\"']?)"
    r"(?P<secret>(?=[^\s\"':=]*\d)[\w.~+/-]{12,}=*)",
    r"(?<=://)(?P<secret>[^\s/:@]+:[^\s/@]+)(?=@)",  # user and password of an address
)
"""Secrets that what stands before them gives away."""
EMAIL = r"(?<![\w.%+-])[\w.%+-]{1,64}@(?:[\w-]{1,63}\.){1,8}[^\W\d_]{2,24}\b"
NUMBER = (
    r"(?<![\w.,+-])(?:\d{13,19}|\d{4}([ -])\d{4}\1\d{4}\1\d{4}(?:\1\d{1,3})?"
    r"|\d{4}[ -]\d{6}[ -]\d{4,5})(?![\w-]|[.,]\d)"
)
PHONE = (
    r"(?<![\w+])(?:\+|00)[1-9]\d{0,2}[ ./-]?(?:\(\d{1,4}\)[ ./-]?)?\d{1,4}"
    r"(?:[ ./-]?\d{2,5}){1,5}(?!\d)",
    r"(?<![\w.+-])(?:1[ .-])?(?:\([2-9]\d{2}\) ?|[2-9]\d{2}[.-])\d{3}[.-]\d{4}(?![\w-]|\.\d)",
    r"(?<![\w.,+/-])(?:\(0[1-9]\d{0,4}\)|0[1-9]\d{0,4})(?:[ /-]\d{2,8}){1,5}(?![\w/]|[.,-]\d)",
)
"""International, North American, and national numbers that begin with 0."""
ADDRESS = (
    r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w]|\.\d)"
    r"|(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){3,7}[0-9A-Fa-f]{1,4}(?![\w:])"
)


def is_card(text: str) -> bool:
    """Whether digits are a card's number: of an issuer, with Luhn's check digit."""
    digits = [int(one) for one in text if one.isdigit()]
    doubled = [
        one if i % 2 == 0 else sum(divmod(2 * one, 10)) for i, one in enumerate(digits[::-1])
    ]
    return 13 <= len(digits) <= 19 and digits[0] in (3, 4, 5, 6) and sum(doubled) % 10 == 0


def is_phone(text: str) -> bool:
    """Whether it has as many digits as phone numbers have."""
    return 9 <= sum(one.isdigit() for one in text) <= 15


def is_address(text: str) -> bool:
    """Whether it is the address of another machine, and no mask of a net."""
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return False
    return not (found.is_loopback or found.is_unspecified or text.startswith("255."))


RULES: tuple[tuple[re.Pattern[str], str, Check | None], ...] = (
    *((re.compile(pattern, re.DOTALL), "[key]", None) for pattern in (*KEYS, *VALUED)),
    (re.compile(EMAIL), "[email]", None),
    (re.compile(ADDRESS), "[ip]", is_address),
    (re.compile(NUMBER), "[card]", is_card),
    *((re.compile(pattern), "[phone]", is_phone) for pattern in PHONE),
)


def masked(text: str) -> str:
    """A text with what is private masked.

    >>> masked("Write to ann@example.org or +49 30 901820, my key is sk-abcdefghij0123456789xyz")
    'Write to [email] or [phone], my key is [key]'
    """
    for pattern, mask, check in RULES:

        def covered(found: re.Match[str], mask: str = mask, check: Check | None = check) -> str:
            if check is not None and not check(found[0]):
                return found[0]
            secret = found.groupdict().get("secret")
            return mask if secret is None else found[0].replace(secret, mask)

        text = pattern.sub(covered, text)
    return text


def masked_within(value: Any) -> Any:
    """A value of JSON with all its texts masked, keys too; a number that would be masked as a text
    becomes that text."""
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, Mapping):
        return {masked_within(key): masked_within(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(masked_within(one) for one in value)
    if isinstance(value, int) and not isinstance(value, bool) and value > 10**8:
        text = masked(str(value))
        return value if text == str(value) else text
    return value


def redacted(prompt: Prompt) -> Prompt:
    """A prompt with what is private masked, in messages, calls, tools and recorded answers.

    Raises:
        NoPrompt: it is token ids, in which nothing can be found.
    """
    if prompt.tokens:
        raise NoPrompt("token ids, in which nothing can be masked")
    texts = {f.name: masked_within(getattr(prompt, f.name)) for f in fields(prompt)}
    if whose := PROMPT_ID.match(prompt.id):  # the digits by which `draftwell forget` finds it
        texts["id"] = whose[0] + masked(prompt.id[whose.end() :])
    return replace(prompt, **texts)
