"""What the end of a log and an exit code say together."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftwell.components.engines.failures import why_ended

WARNING = "WARNING No module named 'vllm._moe_C'\n"


@pytest.mark.parametrize(
    ("text", "exit_code", "code"),
    [
        (WARNING, -9, "engine_killed"),
        (WARNING + "torch.OutOfMemoryError: too much\n", -9, "engine_out_of_memory"),
        (WARNING + "RuntimeError: [Errno 12] Cannot allocate memory\n", 1, "engine_out_of_memory"),
        (
            "Traceback (most recent call last):\nValueError: Free memory on device cuda:0 "
            "(5.9/79.1 GiB) on startup is less than desired GPU "
            "memory utilization (0.92, 72.77 GiB). Decrease GPU memory utilization or "
            "reduce GPU memory used by other processes.\n",
            1,
            "engine_out_of_memory",
        ),
        (WARNING + "ValueError: K must be positive\n", 1, "engine_failed"),
        ("ValueError: K must be\npositive\n", 1, "engine_failed"),
        ("", -11, "engine_failed"),
        ("", None, "engine_failed"),
    ],
)
def test_memory_and_a_kill_are_told_from_other_ends(
    text: str, exit_code: int | None, code: str, tmp_path: Path
) -> None:
    log = tmp_path / "engine.log"
    log.write_text(text)
    error = why_ended("vllm/off", log, exit_code, "engine_failed")
    assert error.code == code
    assert str(log) in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("ModuleNotFoundError: No module named 'arctic_inference'", "install what is named"),
        ("OSError: [Errno 98] Address already in use", "end what listens there"),
    ],
)
def test_a_last_line_that_is_known_has_its_advice(text: str, advice: str, tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text(f"{WARNING}{text}\n")
    said = str(why_ended("vllm/off", log, 1, "engine_failed"))
    assert f"({text}): {advice}" in said
