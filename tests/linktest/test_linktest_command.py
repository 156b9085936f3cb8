"""`dynctl linktest` from the command line, with hosts that are all this machine."""

import json
import sys

import pytest

from dynctl import store
from dynctl.cli.main import run
from dynctl.core.links import LinkBook

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def inventory(tmp_path, ports):
    def write(**addresses):
        lines = [
            "cluster: lab",
            "ports:",
            f"  base: {ports.first}",
            f"  count: {ports.last - ports.first + 1}",
            "hosts:",
        ]
        for name, address in addresses.items():
            lines += [f"  - name: {name}", "    address: local", f"    data_address: {address}"]
            lines += [f"    root: {tmp_path}/{name}", f"    python: {sys.executable}"]
        path = tmp_path / "inventory.yaml"
        path.write_text("\n".join(lines) + "\n")
        return path

    return write


def book(path):
    return store.load(path.parent / ".dynctl/lab/links.json", LinkBook)


def test_json_and_the_book_hold_what_was_measured(inventory, capsys):
    path = inventory(a="127.0.0.1", b="127.0.0.2")

    code = run(["linktest", "-i", str(path), "--quick", "-o", "json"])

    out, err = capsys.readouterr()
    said = json.loads(out)
    assert code == 0, err
    assert said["schema"] == "dynctl.linktest/1"
    assert [(link["source"], link["target"]) for link in said["links"]] == [("a", "b"), ("b", "a")]
    assert {link["kind"] for link in said["links"]} == {"tcp"}
    assert all(link["bytes_s"] > 0 and link["points"] for link in said["links"])
    assert said["failures"] == []
    assert [w["code"] for w in said["warnings"]] == ["link-on-one-machine"]
    assert said["unmeasured_pairs"] == [{"hosts": ["a", "b"], "kind": "nixl-dram"}]
    assert "no deployment names" in said["unmeasured"][0]["reason"]
    kept = book(path)
    assert [h.name for h in kept.hosts] == ["a", "b"]
    assert {m.measured_unix_s for m in kept.links} == {m["measured_unix_s"] for m in said["links"]}
    assert "round 1/1" in err


def test_some_failed_pairs_are_exit_3_and_the_table_shows_the_rest(inventory, capsys):
    path = inventory(a="127.0.0.1", b="127.0.0.2", c="192.0.2.9")

    code = run(["linktest", "-i", str(path), "--quick"])

    out, err = capsys.readouterr()
    assert code == 3
    rows = {line.split("  ")[0]: line for line in out.splitlines()}
    assert "b/s" in rows["a ↔ b"]
    assert rows["a ↔ c"].rstrip().endswith("failed")
    assert "error: 2 pairs failed" in err
    assert "c: cannot listen on 192.0.2.9" in err
    assert {(m.source_name, m.target_name) for m in book(path).links if not m.error} == {
        ("a", "b"),
        ("b", "a"),
    }


def test_no_pair_that_could_be_measured_is_exit_4(inventory, capsys):
    path = inventory(a="192.0.2.8", b="192.0.2.9")

    assert run(["linktest", "-i", str(path), "--quick"]) == 4

    err = capsys.readouterr().err
    assert "no pair could be measured" in err
    assert "cannot listen on 192.0.2.9" in err


def test_a_limited_run_keeps_the_other_links(inventory, capsys):
    path = inventory(a="127.0.0.1", b="127.0.0.2", c="127.0.0.3")
    assert run(["linktest", "-i", str(path), "--quick"]) == 0
    before = {(m.source_name, m.target_name): m.measured_unix_s for m in book(path).links}

    assert run(["linktest", "-i", str(path), "--quick", "--limit", "a,c"]) == 0

    after = {(m.source_name, m.target_name): m.measured_unix_s for m in book(path).links}
    assert len(before) == len(after) == 6
    assert {pair for pair in after if after[pair] > before[pair]} == {("a", "c"), ("c", "a")}
    capsys.readouterr()


@pytest.mark.parametrize("limit", ["a", "!b"])
def test_one_host_alone_is_exit_4(inventory, capsys, limit):
    path = inventory(a="127.0.0.1", b="127.0.0.2")

    assert run(["linktest", "-i", str(path), "--limit", limit]) == 4

    assert "a link has two ends" in capsys.readouterr().err
    assert not (path.parent / ".dynctl").exists()


def test_a_damaged_book_is_told_before_anything_is_measured(inventory, capsys):
    path = inventory(a="127.0.0.1", b="127.0.0.2")
    kept = path.parent / ".dynctl/lab/links.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("{")

    assert run(["linktest", "-i", str(path)]) == 1

    err = capsys.readouterr().err
    assert "links.json is damaged" in err
    assert "round" not in err
