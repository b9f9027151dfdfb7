"""Tokenizers in the formats that transformers reads: each encodes as transformers does, or is
refused by one line that names what it needs."""

from __future__ import annotations

import base64
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from draftwell.serving.artifacts.pair_files import PairFiles, tokenizer_digest
from draftwell.serving.runtime.model_files import load_tokenizer
from draftwell.serving.runtime.pair import LoadedPair, LoadSettings, load_pair
from tests.support.errors import raises_code
from tests.support.models.checkpoints import (
    BYTES,
    SPECIAL,
    Change,
    both,
    byte_tokenizer,
    checkpoint,
    edit,
)

SETTINGS = "tokenizer_config.json"
TEXT = "ab, cab <s> Ünder\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the configuration of a model, and no tokenizer."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return tmp_path


def settings(folder: Path, **values: Any) -> None:
    edit(folder / SETTINGS, **values)


def saved(folder: Path, **values: Any) -> None:
    """The fast tokenizer of single bytes, with settings."""
    byte_tokenizer().save_pretrained(folder)
    settings(folder, **values)


def merges(folder: Path) -> None:
    vocab = {token: number for number, token in enumerate([*SPECIAL, *BYTES, "ab"])}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")


def gpt2(folder: Path) -> None:
    merges(folder)
    settings(folder, tokenizer_class="GPT2Tokenizer", eos_token="</s>", unk_token="<pad>")


def qwen2(folder: Path) -> None:
    merges(folder)
    settings(folder, tokenizer_class="Qwen2Tokenizer", eos_token="</s>")


def ranks(name: str) -> Change:
    """A vocabulary as tiktoken has it, with an end token behind."""
    words = [*(bytes([byte]) for byte in range(256)), b"ab"]
    lines = [f"{base64.b64encode(word).decode()} {rank}\n" for rank, word in enumerate(words)]

    def write(folder: Path) -> None:
        (folder / name).write_text("".join(lines))
        settings(
            folder,
            tokenizer_class="PreTrainedTokenizerFast",
            eos_token="<|end|>",
            added_tokens_decoder={"258": {"content": "<|end|>", "special": True}},
        )

    return write


def tekken(folder: Path) -> None:
    words = [*(bytes([byte]) for byte in range(256)), b"ab"]
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": None}
        for rank, word in enumerate(words)
    ]
    special = [
        {"rank": rank, "token_str": name, "is_control": True}
        for rank, name in enumerate(["<unk>", "<s>", "</s>", "[INST]", "[/INST]"])
    ]
    config = {
        "pattern": r"[^\s]+|\s+",
        "num_vocab_tokens": len(vocab),
        "default_vocab_size": len(vocab) + len(special),
        "default_num_special_tokens": len(special),
        "version": "v3",
    }
    whole = {"config": config, "vocab": vocab, "special_tokens": special}
    (folder / "tekken.json").write_text(json.dumps(whole))


def word_pieces(folder: Path) -> None:
    letters = [chr(ord("a") + number) for number in range(26)]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    lines = [*special, *letters, *(f"##{letter}" for letter in letters)]
    (folder / "vocab.txt").write_text("\n".join(lines) + "\n")
    settings(folder, tokenizer_class="BertTokenizer")


def sentences(name: str = "tokenizer.model", **values: Any) -> Change:
    """A model of SentencePiece, with bytes for what it does not know."""

    def write(folder: Path) -> None:
        from transformers.convert_slow_tokenizer import import_protobuf

        model: Any = import_protobuf().ModelProto()
        unknown, plain, control, byte = 2, 1, 3, 6
        pieces = [("<unk>", unknown), ("<s>", control), ("</s>", control)]
        pieces += [(f"<0x{number:02X}>", byte) for number in range(256)]
        letters = [chr(ord("a") + number) for number in range(26)]
        pieces += [(word, plain) for word in ["▁a", "ab", "▁", *letters]]
        for rank, (word, kind) in enumerate(pieces):
            model.pieces.add(piece=word, score=-float(rank), type=kind)
        model.trainer_spec.model_type = 2
        model.trainer_spec.byte_fallback = True
        model.normalizer_spec.add_dummy_prefix = True
        (folder / name).write_bytes(model.SerializeToString())
        known = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        settings(folder, **{"tokenizer_class": "LlamaTokenizer", **known, **values})

    return write


READ: dict[str, Change] = {
    "tokenizer.json": saved,
    "tokenizer.json alone": both(saved, lambda folder: (folder / SETTINGS).unlink()),
    "a class that nobody knows": lambda folder: saved(folder, tokenizer_class="NewTokenizer"),
    "add_bos_token": lambda folder: saved(folder, add_bos_token=True),
    "legacy": lambda folder: saved(folder, legacy=False, clean_up_tokenization_spaces=True),
    "vocab.json and merges.txt of GPT-2": gpt2,
    "vocab.json and merges.txt of Qwen": qwen2,
    "tekken.json": tekken,
    "vocab.txt": word_pieces,
}
BY_TIKTOKEN = {name: ranks(name) for name in ("tiktoken.model", "tokenizer.model")}
BY_SENTENCEPIECE: dict[str, Change] = {
    "tokenizer.model": sentences(),
    "spiece.model": sentences("spiece.model", tokenizer_class="T5Tokenizer"),
    "add_bos_token and add_eos_token": sentences(add_bos_token=True, add_eos_token=True),
    "legacy": sentences(legacy=False),
}


def check_reads(folder: Path) -> None:
    """The pair encodes as transformers' tokenizer does, and the vocabulary has a digest."""
    known: Any = AutoTokenizer.from_pretrained(folder)
    pair = LoadedPair("tiny", "float32", "cpu", {}, {}, load_tokenizer(folder), "f" * 64)
    ids = pair.encode(TEXT)
    assert ids == known(TEXT)["input_ids"]
    assert len(ids) > 6
    assert pair.decode(ids) == known.decode(ids, skip_special_tokens=True)
    assert len(tokenizer_digest(folder)) == 64


@pytest.mark.parametrize("name", READ)
def test_it_encodes_as_transformers_does(folder: Path, name: str) -> None:
    READ[name](folder)
    check_reads(folder)


@pytest.mark.parametrize("name", BY_TIKTOKEN)
def test_tiktoken_is_named_where_it_is_missing(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    BY_TIKTOKEN[name](folder)
    if find_spec("tiktoken") is not None:
        check_reads(folder)
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    monkeypatch.setitem(sys.modules, "tiktoken.load", None)
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda package: None if package == "tiktoken" else find_spec(package),
    )
    with raises_code("missing_package", "pip install", "tiktoken") as caught:
        load_tokenizer(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", BY_SENTENCEPIECE)
def test_sentencepiece_is_named_where_it_is_missing(folder: Path, name: str) -> None:
    BY_SENTENCEPIECE[name](folder)
    if find_spec("sentencepiece") is not None:
        return check_reads(folder)
    with raises_code("missing_package", "pip install sentencepiece") as caught:
        load_tokenizer(folder)
    assert "\n" not in str(caught.value)


def own_code(folder: Path) -> None:
    merges(folder)
    (folder / "own.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    settings(folder, tokenizer_class="Own", auto_map={"AutoTokenizer": ["own.Own", None]})


def changed_json(**model: Any) -> Change:
    def write(folder: Path) -> None:
        saved(folder)
        found = json.loads((folder / "tokenizer.json").read_text())
        edit(folder / "tokenizer.json", model=found["model"] | model)

    return write


def settings_alone(kind: str) -> Change:
    return lambda folder: settings(folder, tokenizer_class=kind)


def cut(folder: Path) -> None:
    saved(folder)
    file = folder / "tokenizer.json"
    file.write_text(file.read_text()[:500])


REFUSED: dict[str, tuple[Change, str, tuple[str, ...]]] = {
    "nothing": (lambda folder: None, "no_tokenizer", ("tokenizer.json", "tekken.json")),
    # transformers makes up a tokenizer of some kinds from nothing
    **{
        f"settings of {kind} alone": (
            settings_alone(kind),
            "no_tokenizer",
            (),
        )
        for kind in ("LlamaTokenizer", "Qwen2Tokenizer", "BertTokenizer", "GemmaTokenizer")
    },
    "vocab.json without merges.txt": (
        both(gpt2, lambda folder: (folder / "merges.txt").unlink()),
        "no_tokenizer",
        ("vocab.json+merges.txt",),
    ),
    "vocab.json and merges.txt of no kind": (merges, "unreadable_tokenizer", (SETTINGS,)),
    "code of its own": (own_code, "remote_code", ("auto_map",)),
    "cut off": (cut, "unreadable_tokenizer", ("JSONDecodeError",)),
    "a model that tokenizers does not know": (changed_json(type="New"), "unreadable_tokenizer", ()),
    "a merge that is no token": (
        changed_json(merges=[["a", "b"]]),
        "unreadable_tokenizer",
        ("ab",),
    ),
    "settings that are a list": (
        both(saved, lambda folder: (folder / SETTINGS).write_text("[]")),
        "unreadable_model",
        (SETTINGS,),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_by_one_line(folder: Path, name: str) -> None:
    write, code, names = REFUSED[name]
    write(folder)
    with raises_code(code, *names) as caught:
        load_tokenizer(folder)
    assert "\n" not in str(caught.value)
    assert not (folder / "ran").exists()


def test_a_model_without_a_tokenizer_is_refused_before_its_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    monkeypatch.setattr(
        "draftwell.serving.runtime.pair.load_module", lambda *_: pytest.fail("weights were read")
    )
    with raises_code("no_tokenizer", str(folder)):
        load_pair(PairFiles("tiny", folder), LoadSettings(dtype="float32"))


def test_a_draft_may_have_a_tekken_file_alone(tmp_path: Path) -> None:
    folders = [tmp_path / "target", tmp_path / "draft"]
    for folder in folders:
        checkpoint(folder, vocab_size=262)
        for file in folder.glob("tokenizer*"):
            file.unlink()
        tekken(folder)
    pair = load_pair(PairFiles("tiny", *folders), LoadSettings(dtype="float32"))
    assert set(pair.models) == {"target", "draft"}
    assert not pair.models["draft"].stand_ins


TURN = [{"role": "user", "content": "ab"}]
NAMED = [
    {"name": "default", "template": "D{{ messages[0].content }}"},
    {"name": "tool_use", "template": "T{{ messages[0].content }}{{ tools[0].function.name }}"},
]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def file_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("F{{ messages[0].content }}")


@pytest.mark.parametrize(
    ("change", "text", "with_tools"),
    [
        (lambda folder: None, "ab", None),
        (file_template, "Fab", None),
        (lambda folder: settings(folder, chat_template="S{{ messages[0].content }}"), "Sab", None),
        (lambda folder: settings(folder, chat_template=NAMED), "Dab", "Tabf"),
    ],
    ids=["none", "chat_template.jinja", "in the settings", "several by name"],
)
def test_chat_templates_wherever_they_are(
    folder: Path, change: Change, text: str, with_tools: str | None
) -> None:
    saved(folder)
    change(folder)
    pair = LoadedPair("tiny", "float32", "cpu", {}, {}, load_tokenizer(folder), "f" * 64)
    assert pair.decode(pair.encode_chat(TURN)) == text
    if with_tools is not None:
        assert pair.decode(pair.encode_chat(TURN, tools=[TOOL])) == with_tools


def test_several_templates_without_a_default_are_refused_by_one_line(folder: Path) -> None:
    saved(folder, chat_template=[{**NAMED[0], "name": "rag"}, NAMED[1]])
    pair = LoadedPair("tiny", "float32", "cpu", {}, {}, load_tokenizer(folder), "f" * 64)
    with raises_code("messages_refused", "default", "rag") as caught:
        pair.encode_chat(TURN)
    assert "\n" not in str(caught.value)


def test_a_vocabulary_keeps_its_digest(folder: Path) -> None:
    """What was bound to tokenizer.json stays bound to it, whatever lies besides."""
    saved(folder)
    before = tokenizer_digest(folder)
    tekken(folder)
    word_pieces(folder)
    assert tokenizer_digest(folder) == before
