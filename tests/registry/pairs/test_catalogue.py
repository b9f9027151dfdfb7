"""The catalogue: what it holds, how a pair is found, and a pair of one's own."""

from pathlib import Path

import pytest
from pydantic import ValidationError

import draftwell.registry.pairs
from draftwell.registry.pairs import ModelSource, find_pair, list_pairs
from draftwell.registry.pairs.catalogue import write_pair
from draftwell.serving.errors import DraftwellError
from tests.support.errors import raises_code

CATALOGUE = sorted(Path(draftwell.registry.pairs.__file__).parent.glob("*.yaml"))
MINE = """name: mine
description: my own pair
licence: mine
target: {path: models/big}
draft: {path: models/small}
"""


@pytest.mark.parametrize("path", CATALOGUE, ids=lambda path: path.stem)
def test_every_pair_of_the_catalogue_is_valid(path: Path) -> None:
    spec = find_pair(str(path))
    assert spec.name == path.stem
    assert spec.draft is not None
    for source in spec.sources().values():
        if source.hub:
            assert source.revision
            assert source.hub.count("/") == 1
    assert find_pair(spec.name) == spec


def test_the_default_comes_first_and_the_papers_pairs_are_there() -> None:
    names = [spec.name for spec in list_pairs()]
    assert names[0] == "smollm2-135m"
    assert find_pair("default").name == "smollm2-135m"
    assert len(names) == len(set(names)) >= 15
    papers = " ".join(spec.paper or "" for spec in list_pairs())
    assert all(
        paper in papers for paper in ("SPIDE", "SPRINTER", "CSD", "PyramidSD", "DuoDecoding")
    )
    assert [spec.name for spec in list_pairs() if spec.qualifier] == [
        "smollm2-135m",
        "llama3-1b-3b-8b",
        "smollm2-135m-1.7b",
        "smollm2-135m-near-copy-pyramid",
    ]


def test_an_unknown_pair_offers_close_names() -> None:
    with raises_code("unknown_pair", "defalt", "did you mean default?", "`draftwell list pairs`"):
        find_pair("defalt")
    with raises_code("unknown_pair", "pair §§§: see", "`draftwell list pairs`"):
        find_pair("§§§")


def test_a_pair_of_ones_own_by_path_and_in_the_users_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "home" / "pairs" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(MINE)
    assert find_pair(str(file)).folder == file.parent
    assert find_pair("mine").draft == ModelSource(path="models/small")
    assert "mine" in [spec.name for spec in list_pairs()]
    monkeypatch.setenv("DRAFTWELL_HOME", str(tmp_path / "elsewhere"))
    with raises_code("unknown_pair", "mine"):
        find_pair("mine")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("draft:", "drafts:"), "unknown key drafts"),
        (
            ("models/small}", "models/small, hub: a/b}"),
            r"draft: give exactly one of hub, path, package, artifact, near_copy \(found hub",
        ),
        (("{path: models/small}", "{}"), r"draft: give exactly one of .* \(found none\)"),
        (("models/small}", "models/small, revision: main}"), "draft: revision belongs to hub only"),
        (("name: mine", "name: My Pair"), "name: String should match"),
        (("licence: mine", "licence: ''"), "licence: String should have at least 1 character"),
        (("licence: mine", "licence: mine\ndtype: int4"), "dtype: Input should be"),
        (("licence: mine", "licence: [mine"), "line 4 is not valid YAML"),
    ],
)
def test_a_wrong_pair_file_is_one_line(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(MINE.replace(*change))
    with pytest.raises(DraftwellError, match=message) as caught:
        find_pair(str(file))
    assert str(caught.value).startswith(str(file))
    assert "\n" not in str(caught.value)


def test_what_a_pair_is_and_its_licence_may_be_left_out(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\ntarget: {path: models/big}\n")
    assert find_pair(str(file)).licence == "not stated"


def test_two_pairs_cannot_have_one_name(tmp_path: Path) -> None:
    file = tmp_path / "home" / "pairs" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(MINE.replace("licence:", "aliases: [default]\nlicence:"))
    with raises_code("pair_name_taken", "name default", "smollm2-135m.yaml"):
        list_pairs()


def test_a_spec_does_not_change() -> None:
    with pytest.raises(ValidationError):
        find_pair("default").name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ("", "bfloat16"),
        ("weights: int8\n", "bfloat16-int8"),
        ("dtype: float32\nweights: int4\n", "float32-int4"),
    ],
)
def test_weights_of_fewer_bytes_are_the_pairs_and_written_again(
    tmp_path: Path, more: str, name: str
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(MINE + more)
    spec = find_pair(str(file))
    assert spec.number_format == name
    write_pair(spec, tmp_path / "again.yaml")
    assert find_pair(str(tmp_path / "again.yaml")) == spec


@pytest.mark.parametrize("more", ["weights: int3\n", "dtype: float16\nweights: int8\n"])
def test_weights_that_nothing_reads_are_refused(tmp_path: Path, more: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(MINE + more)
    with pytest.raises(DraftwellError, match="weights"):
        find_pair(str(file))
