"""Habits that keep the code readable, checked instead of remembered."""

import ast
import re
from pathlib import Path

import pytest

import dynctl

ROOT = Path(dynctl.__file__).parent
MODULES = sorted(path for path in ROOT.rglob("*.py"))
MAX_MODULE_LINES = 450
MAX_FUNCTION_LINES = 60
MAX_COMMAND_LINES = 100
"""A command's signature is its options, each with its help."""
BANNED = re.compile(r"(Manager|Handler|Helper|Util|Base|Impl)$")


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_module_says_what_lives_there_and_whether_it_waits_on_the_world(path):
    text = ast.get_docstring(ast.parse(path.read_text())) or ""

    assert text, "no docstring"
    if path.name not in {"__init__.py", "__main__.py"}:
        assert re.search(r"(^|\s)(Pure\.|Pure:|IO: )", text), "says neither `Pure.` nor `IO: …`"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_modules_and_functions_stay_small_and_are_named_by_what_they_are(path):
    source = path.read_text()
    assert len(source.splitlines()) <= MAX_MODULE_LINES
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            is_command = path.parent.name == "cli" and node.name in {"command", "run"}
            limit = MAX_COMMAND_LINES if is_command else MAX_FUNCTION_LINES
            assert node.end_lineno - node.lineno < limit, f"{node.name} is too long"
        if isinstance(node, ast.ClassDef):
            assert not BANNED.search(node.name), f"{node.name} needs a better noun"


def test_no_unsafe_deserialisation_and_no_shell_anywhere():
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", "") or ""]
                assert not {"pickle", "marshal", "shelve", "dill"} & set(names), path
            if isinstance(node, ast.keyword) and node.arg == "shell":
                assert getattr(node.value, "value", True) is False, path
            if isinstance(node, ast.Attribute) and node.attr in {
                "recv_pyobj",
                "send_pyobj",
                "unsafe_load",
                "full_load",
            }:
                raise AssertionError(f"{path}: {node.attr}")


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_why_a_call_failed_is_said_by_the_one_function_for_it(path):
    """`strerror` is None, or asyncio's text that repeats the address, in some errors; what runs alone on hosts has only that."""
    if path == ROOT / "files.py" or path.parent.name == "onhost":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr == "strerror":
            assert isinstance(node.value, ast.Name), node.lineno
            assert node.value.id == "os", f"line {node.lineno}: use dynctl.files.reason"
