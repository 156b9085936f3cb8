"""`top --once`: the table and the document."""

import json

from dynctl.store import to_json
from dynctl.tui.once import document, text


def test_the_table_has_every_engine_and_no_screen_furniture(make_view):
    drawn = text(make_view(num_decode=30), 120)

    assert sum("chat-decode-" in line for line in drawn.splitlines()) == 30
    assert "POOL" in drawn
    assert "▸" not in drawn
    assert "? help" not in drawn
    assert "sort:" not in drawn
    assert all(line == line.rstrip() for line in drawn.splitlines())


def test_the_document_has_a_schema_and_null_for_unknown(make_view):
    view = make_view(ticks=1)
    found = json.loads(to_json(document(view.overview, view.events)))

    assert found["schema"] == "dynctl.top/1"
    assert set(found) >= {
        "cluster",
        "taken_unix_s",
        "deployments",
        "pools",
        "engines",
        "hosts",
        "events",
        "slo",
    }
    assert found["engines"][0]["output_tokens_s"] is None
    assert found["engines"][0]["running"] == 3.0
    assert found["deployments"][0]["ttft"] is None


def test_the_document_has_figures_in_si_units_after_two_samples(make_view):
    view = make_view(ticks=5)
    found = json.loads(to_json(document(view.overview, view.events)))
    (chat,) = found["deployments"]

    assert chat["requests_s"] == 14.0
    assert 0.1 < chat["ttft"]["p50_s"] < 0.2
    assert chat["predicted_hit_ratio"] == 0.63
    assert [pool["role"] for pool in found["pools"]] == ["prefill", "decode"]
