"""inventory.example.yaml is the reference manual: complete, and right."""

import re
from pathlib import Path

import pytest
import yaml

from dynctl.inventory.examples.catalog import example_names, example_text
from dynctl.inventory.load import read_inventory
from dynctl.inventory.schema import PARTS, json_schema

EXAMPLE = Path(__file__).parents[2] / "inventory.example.yaml"


def test_the_example_loads():
    inventory = read_inventory(EXAMPLE, {}).inventory

    assert len(inventory.hosts) == 8
    assert [wish.name for wish in inventory.deployments] == ["chat", "adopted"]


@pytest.mark.parametrize("part", PARTS.values(), ids=lambda part: part.__name__)
def test_every_key_of_the_schema_stands_in_the_example(part):
    text = EXAMPLE.read_text()

    missing = [key for key in part.model_fields if not re.search(rf"\b{key}:", text)]
    assert missing == []


def test_every_key_is_explained_for_editors():
    schema = json_schema()
    parts = {"": schema, **schema["definitions"]}

    bare = [
        f"{name}.{key}"
        for name, part in parts.items()
        for key, value in part["properties"].items()
        if not value.get("description")
    ]
    assert bare == []


def test_the_schema_is_draft_07_and_knows_the_examples_keys():
    """Editors' YAML servers support draft-07 and below: definitions, no $defs, and no neighbours of $ref."""
    schema = json_schema()

    assert schema["$schema"] == "http://json-schema.org/draft-07/schema#"
    assert "$defs" not in repr(schema)
    assert schema["additionalProperties"] is False
    for ref in re.findall(r"'\$ref': '([^']+)'", repr(schema)):
        assert ref.removeprefix("#/definitions/") in schema["definitions"]
    assert _lonely_refs(schema)


def _lonely_refs(value):
    if isinstance(value, dict):
        return ("$ref" not in value or len(value) == 1) and all(map(_lonely_refs, value.values()))
    return all(map(_lonely_refs, value)) if isinstance(value, list) else True


def test_the_schema_allows_exactly_the_keys_the_reader_allows():
    schema = json_schema()

    for part in PARTS.values():
        shown = schema if part.__name__ == "InventoryFile" else schema["definitions"][part.__name__]
        assert set(shown["properties"]) == set(part.model_fields)


@pytest.mark.parametrize("name", example_names())
def test_each_first_inventory_is_valid_and_says_what_it_is_for(name, tmp_path):
    path = tmp_path / "inventory.yaml"
    path.write_text(example_text(name))

    loaded = read_inventory(path, {})

    assert loaded.inventory.deployments
    assert example_text(name).startswith("# ")
    assert yaml.safe_load(example_text(name))["cluster"] == loaded.inventory.cluster


def test_the_plainest_example_comes_first():
    assert example_names()[0] == "local"
    assert len(example_names()) == 5
