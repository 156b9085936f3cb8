"""A module that says `Pure.` neither waits on the world nor reads clocks or files, itself or through a friend."""

import ast
import re
from pathlib import Path

import pytest

import dynctl

ROOT = Path(dynctl.__file__).parent
WORLD = {
    "asyncio", "os", "socket", "ssl", "subprocess", "threading", "time", "shutil", "tempfile", "secrets",
    "aiohttp", "asyncssh", "httpx", "pynvml", "rich", "textual", "typer", "zmq", "uvloop",
}  # fmt: skip

LOOKS = {
    "open", "read_text", "read_bytes", "write_text", "write_bytes", "exists", "is_file", "is_dir", "stat", "iterdir", "glob",
    "rglob", "mkdir", "unlink", "cwd", "home", "resolve",
}  # fmt: skip


def module_name(path):
    parts = ("dynctl", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TREES = {module_name(path): ast.parse(path.read_text()) for path in ROOT.rglob("*.py")}
PURE = {
    name
    for name, tree in TREES.items()
    if re.search(r"(^|\s)Pure[.:]", ast.get_docstring(tree) or "")
}
PACKAGES = {module_name(path) for path in ROOT.rglob("__init__.py")}


def imports(tree):
    """Absolute names of what a module imports at run time; blocks under TYPE_CHECKING do not count."""
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in TREES else node.module


@pytest.mark.parametrize("name", sorted(PURE))
def test_a_pure_module_imports_only_pure_modules(name):
    found = set(imports(TREES[name]))

    drawing = (
        {"textual", "rich", "typer"} if name.startswith(("dynctl.tui.", "dynctl.cli.")) else set()
    )
    assert not ({module.split(".")[0] for module in found} & WORLD) - drawing
    ours = {module for module in found if module.startswith("dynctl")}
    assert ours <= PURE | PACKAGES


def opens_a_file(call):
    """Whether a call looks at the file system; data that come with the package are part of the program."""
    func = call.func
    if isinstance(func, ast.Name):
        return func.id == "open"
    return (
        isinstance(func, ast.Attribute)
        and func.attr in LOOKS
        and "resources.files(" not in ast.unparse(func)
    )


@pytest.mark.parametrize("name", sorted(PURE))
def test_a_pure_module_opens_no_files(name):
    calls = [node for node in ast.walk(TREES[name]) if isinstance(node, ast.Call)]

    assert [ast.unparse(call) for call in calls if opens_a_file(call)] == []


def test_most_of_the_program_is_pure():
    lines = {name: len(ast.unparse(tree).splitlines()) for name, tree in TREES.items()}

    assert sum(lines[name] for name in PURE) > 0.4 * sum(lines.values())
