"""`dynctl --help`: every command with one whole line."""

import pytest

from dynctl.cli.main import COMMANDS, run


@pytest.mark.parametrize("group", ["bench", "sim", "config"])
def test_no_command_of_a_group_is_cut_short_either(monkeypatch, capsys, group):
    monkeypatch.setenv("COLUMNS", "80")

    assert run([group, "--help"]) == 0

    assert not [line for line in capsys.readouterr().out.splitlines() if line.endswith("...")][1:]


def test_no_command_is_cut_short_in_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")

    assert run(["--help"]) == 0

    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    for name, text in COMMANDS.items():
        assert lines[name].split(maxsplit=1)[1].rstrip() == text
