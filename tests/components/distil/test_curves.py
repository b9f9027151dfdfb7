"""Curves of a training: what resuming keeps, and what beginning again forgets."""

from pathlib import Path

from draftwell.components.distil.checkpoint import CHECKPOINT
from draftwell.components.distil.curves import Curves


def test_a_run_that_resumes_has_the_steps_of_before_and_repeats_none(tmp_path: Path) -> None:
    first = Curves(tmp_path)
    for step, value in ((10, 3.0), (20, 2.0), (30, 1.5)):
        first.add("loss", value, step)
    (tmp_path / CHECKPOINT).touch()
    with first.file.open("a") as lines:
        lines.write('["loss", 4')  # killed while it wrote
    again = Curves(tmp_path)
    assert again.read() == {"loss": [(10, 3.0), (20, 2.0), (30, 1.5)]}
    again.file.write_text(again.file.read_text().removesuffix('["loss", 4'))
    again.add("loss", 1.4, 30)
    again.add("acceptance", 0.5, 30)
    assert again.read() == {"loss": [(10, 3.0), (20, 2.0), (30, 1.4)], "acceptance": [(30, 0.5)]}


def test_without_a_checkpoint_they_begin_again(tmp_path: Path) -> None:
    Curves(tmp_path).add("loss", 3.0, 10)
    assert Curves(tmp_path).read() == {}
