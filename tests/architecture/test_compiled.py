"""What `setup.py` compiles keeps the rules that make it the same as its sources."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def value_of(name: str):
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise AssertionError(f"setup.py has no {name}")


def compiled_files() -> list[Path]:
    places = value_of("COMPILED")
    return [ROOT / place / f"{name}.py" for place in places for name in places[place].split()]


@pytest.mark.parametrize("path", compiled_files(), ids=lambda path: path.stem)
def test_a_compiled_module_is_there_and_makes_no_class_by_keywords(path):
    """mypyc drops the keywords of a class (`frozen=`, `tag=`), and msgspec does not see its defaults."""
    classes = [
        one for one in ast.walk(ast.parse(path.read_text())) if isinstance(one, ast.ClassDef)
    ]

    odd = [
        one.name
        for one in classes
        if one.keywords or any("Struct" in ast.unparse(base) for base in one.bases)
    ]
    assert odd == []


def test_what_is_written_in_c_stands_beside_its_source_which_mypyc_leaves_alone():
    files = [ROOT / name for name in value_of("IN_C")]

    assert all(file.is_file() and file.with_suffix(".py").is_file() for file in files)
    assert not {file.with_suffix(".py") for file in files} & set(compiled_files())
