"""`dynctl --help`: every command with one whole line."""

from dynctl.cli.main import COMMANDS, run


def test_no_command_is_cut_short_in_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")

    assert run(["--help"]) == 0

    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    for name, text in COMMANDS.items():
        assert lines[name].split(maxsplit=1)[1].rstrip() == text
