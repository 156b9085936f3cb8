"""Every command with files and numbers that are wrong: exit 2, what and where in one line, the next step in another."""

import pytest
import typer

from dynctl.cli.main import COMMANDS, build_app, run
from dynctl.errors import ExitCode

GOOD = "cluster: c\nhosts: [local]\ndeployments:\n  - {name: chat, model: m, engine: sim}\n"
ESTIMATE = ("estimate", "--gpu", "h100-sxm", "--rate", "1")
ROUTE = ("route", "--engine", "http://127.0.0.1:1", "--listen", "127.0.0.1:0")
INVENTORIES = (
    *(("config", "validate"), ("config", "show"), ("discover",), ("discover", "--script")),
    *(("linktest",), ("doctor",), ("doctor", "skew"), ("plan",), ("up", "--yes"), ("status",)),
    *(("top", "--once"), ("bench", "run"), ("explain",), ("explain", "hits"), ("policy",)),
    *(("logs",), ("drain", "x", "--yes"), ("down", "--yes")),
)
FILES = (
    *((*words, "-i") for words in INVENTORIES),
    ("discover", "--from"),
    ("doctor", "--from"),
    ("plan", "--from"),
    ("plan", "--python-topology"),
    ("plan", "--trace"),
    ("up",),
    (*ESTIMATE, "--model"),
    ("calibrate", "--model", "llama-3.1-8b", "--gpu", "h100-sxm"),
    ("bench", "replay"),
    ("bench", "show"),
    ("explain", "--from"),
    (*ROUTE, "--api-keys"),
    (*ROUTE, "--tokenizer"),
    (*ROUTE, "--tls-key", "key.pem", "--tls-cert"),
    ("sim", "engine", "--listen", "127.0.0.1:0", "--tokenizer"),
)


READ_AND_EMPTY = {("explain", "--from"): {"directory", "empty"}}
"""Where such a file is read and holds nothing of the kind, which is another matter than a mistake."""


def missing(path):
    pass


def directory(path):
    path.mkdir()


def binary(path):
    path.write_bytes(bytes(range(256)) * 8)


def empty(path):
    path.write_bytes(b"")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DYNCTL_INVENTORY", raising=False)
    (tmp_path / "inventory.yaml").write_text(GOOD)
    (tmp_path / "key.pem").write_text("")


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("words", "make"),
    [
        pytest.param(words, make, id=f"{' '.join(words)}-{make.__name__}")
        for words in FILES
        for make in (missing, directory, binary, empty)
        if make.__name__ not in READ_AND_EMPTY.get(words, ())
    ],
)
def test_a_file_that_cannot_be_used_is_a_mistake_of_usage(tmp_path, capfd, words, make):
    make(tmp_path / "given")

    code = run([*words, "given"])

    said = capfd.readouterr()
    assert "Traceback" not in said.err + said.out
    lines = said.err.splitlines()
    assert code == ExitCode.USAGE, said.err
    assert any("given" in line for line in lines), said.err
    assert lines[-1].startswith("hint: "), said.err


def all_commands():
    """Every command by its words, with typer's own object of it."""
    for name in COMMANDS:
        group = typer.main.get_command(build_app(name)).commands[name]
        inner = getattr(group, "commands", None)
        if inner is None:
            yield (name,), group
        for sub, command in (inner or {}).items():
            yield (name, sub), command


def number_options():
    for words, command in all_commands():
        for option in command.params:
            kind = option.type.name
            if kind.startswith(("float", "int")) and option.opts[0].startswith("--"):
                yield pytest.param(
                    (*words, option.opts[0]), kind, id=" ".join((*words, option.opts[0]))
                )


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("words", "kind"), list(number_options()))
def test_an_option_takes_no_number_that_nothing_can_be_reckoned_with(capfd, words, kind):
    wrong = ["nan", "inf", "x"] if kind.startswith("float") else ["²", "1.5", "9" * 30]
    needed = {"sim": ["--listen", "127.0.0.1:0"]}.get(words[0], [])
    for text in wrong:
        code = run([*words[:-1], *needed, words[-1], text])

        said = capfd.readouterr()
        assert code == ExitCode.USAGE, (text, said.err)
        assert "Traceback" not in said.err
        assert words[-1] in said.err


def test_a_fault_of_our_own_is_said_without_a_traceback_unless_that_is_asked_for(
    monkeypatch, capfd
):
    def broken(*_, **__):
        raise KeyError("what nobody\x1b[2J thought of")

    monkeypatch.setattr("dynctl.cli.session.load", broken)
    monkeypatch.delenv("DYNCTL_TRACEBACK", raising=False)
    assert run(["policy"]) == ExitCode.ERROR
    said = capfd.readouterr().err
    assert said.startswith("error: a fault of dynctl itself: KeyError: 'what nobody")
    assert "test_bad_input.py:" in said
    assert "DYNCTL_TRACEBACK=1" in said
    assert "Traceback" not in said
    assert "\x1b" not in said

    monkeypatch.setenv("DYNCTL_TRACEBACK", "1")
    run(["policy"])
    assert "in broken" in capfd.readouterr().err


def test_a_limit_that_names_nothing_is_not_taken_for_all_hosts(capfd):
    """As `--limit "$HOST"` is where the variable is not set."""
    for limit in ("", " ", ","):
        assert run(["down", "--yes", "--limit", limit]) == ExitCode.USAGE
        assert "names no host" in capfd.readouterr().err


def test_an_inventory_that_was_named_has_to_be_there_even_where_none_is_needed(
    tmp_path, monkeypatch
):
    (tmp_path / "inventory.yaml").unlink()

    assert run(["discover", "--script"]) == ExitCode.OK
    assert run(["discover", "--script", "-i", "inventory.yaml"]) == ExitCode.USAGE
    monkeypatch.setenv("DYNCTL_INVENTORY", "other.yaml")
    assert run(["discover", "--script"]) == ExitCode.USAGE


def test_a_plan_is_not_written_over_the_inventory(tmp_path, capfd):
    assert run(["plan", "--out", "inventory.yaml"]) == ExitCode.USAGE
    assert "is the inventory itself" in capfd.readouterr().err
    assert (tmp_path / "inventory.yaml").read_text() == GOOD
