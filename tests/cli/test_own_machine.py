"""What the operator's own machine refuses ends in one line and a next step, never in a traceback."""

import errno

import pytest

from dynctl.cli import main


@pytest.mark.parametrize(
    ("number", "said", "hint"),
    [
        (errno.ENOSPC, "No space left on device", "free some space"),
        (errno.EACCES, "Permission denied", "where you may write"),
    ],
)
def test_a_file_that_cannot_be_written_is_named(monkeypatch, capsys, number, said, hint):
    def fails(_):
        raise OSError(number, said, "plan.yaml")

    monkeypatch.setattr(main, "build_app", fails)

    assert main.run(["plan"]) == 1

    first, second = capsys.readouterr().err.splitlines()
    assert first == f"error: plan.yaml: {said}"
    assert hint in second
