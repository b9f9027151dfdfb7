"""Progress lines: the last step always, the others not too often."""

from __future__ import annotations

from flows.progress import counting


def test_lines_come_at_most_every_five_seconds_and_at_the_end(capsys):
    now = iter([0.0, 1.0, 6.0, 6.0, 7.0, 8.0, 8.0])
    show = counting("bench", lambda: next(now))
    for done, words in ((1, "a"), (2, "b"), (3, "c")):
        show(done, 4, words)
    show(4, 4)
    assert capsys.readouterr().err.splitlines() == ["    bench: 2/4 b", "    bench: 4/4"]
