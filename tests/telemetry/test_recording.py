"""What goes into a recording and what never does, and which lines are refused."""

import json
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynctl.core.deployment import EngineState, UnitStatus
from dynctl.core.snapshot import HostSnapshot, Snapshot
from dynctl.telemetry.answers import Answers
from dynctl.telemetry.recording import (
    DamagedError,
    Entry,
    Header,
    decode_entry,
    decode_header,
    decode_stamp,
    encode,
    recordable,
    recordable_answers,
    unquoted,
)
from dynctl.telemetry.traces import Told

SECRET = "sk-live-4242 tell me about my illness"


def test_what_is_written_is_read_back(snapshot):
    entry = Entry(3.5, snapshot=snapshot(7))

    assert decode_entry(encode(entry)) == entry
    assert decode_stamp(encode(entry)).is_snapshot
    assert decode_stamp(encode(entry)).at_s == 3.5


@given(quoted=st.text(min_size=1, max_size=40).map(lambda text: f"«{text}» {SECRET}"))
def test_prompts_and_keys_are_in_no_line(quoted):
    texts = {
        f.name: quoted for f in fields(UnitStatus)
        if f.name in {"command", "url", "spec_digest", "bundle", "beside", "incarnation"}
    }  # fmt: skip
    cause = f"exited with 1 (oom): {quoted}"
    unit = UnitStatus("d-0", "engine", EngineState.FAILED, last_error=cause, seen=cause, **texts)
    taken = Snapshot("c", 1.0, (HostSnapshot("h", units=(unit,), error=cause),))
    told = Told("r", "whole", "d-0", 1.0, route_key=quoted)
    answers = Answers(
        (told,), {"r": {"requests": 1.0}}, logs={("h", "d-0"): (quoted,)}, commands={("h", "d-0"): quoted},
        failures={("h", "d-0"): quoted, "r": cause},
    )  # fmt: skip
    lines = encode(Entry(1.0, snapshot=recordable(taken)))
    lines += encode(Entry(1.0, asked=recordable_answers(answers, b"salt")))

    written = lines.decode()
    assert SECRET not in written
    assert json.dumps(quoted, ensure_ascii=False)[1:-1] not in written
    assert "exited with 1 (oom)" in written


def test_a_field_that_a_unit_gets_later_is_in_no_recording_by_itself():
    kept = {
        "id", "kind", "state", "pid", "started_unix_s", "num_restarts", "last_error", "role", "deployment",
        "gpu_uuids", "is_held", "seen",
    }  # fmt: skip
    full = {f.name: "x" for f in fields(UnitStatus) if f.type == "str" or f.type is str}
    unit = UnitStatus(**{**full, "id": "d", "kind": "engine", "state": EngineState.READY})
    (found,) = recordable(Snapshot("c", 1.0, (HostSnapshot("h", units=(unit,)),))).hosts[0].units

    left_out = {f.name for f in fields(UnitStatus)} - kept
    empty = UnitStatus("d", "engine", EngineState.READY)
    assert all(getattr(found, name) == getattr(empty, name) for name in left_out)


def test_route_keys_become_names_that_group_and_say_nothing():
    told = [Told("r", "whole", "d", 1.0, route_key=key) for key in ("ana", "ana", "ben", "")]
    names = [one.route_key for one in recordable_answers(Answers(tuple(told)), b"salt").decisions]
    others = [one.route_key for one in recordable_answers(Answers(tuple(told)), b"else").decisions]

    assert names[0] == names[1] != names[2]
    assert names[0].startswith("key-")
    assert names[3] == ""
    assert names[0] != others[0]


def test_what_causes_quote_is_left_out():
    assert unquoted("no answer within 5 s") == "no answer within 5 s"
    assert unquoted("exited with 1: x") == "exited with 1 (what it wrote is not recorded)"
    assert unquoted("") == ""


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"", "truncated"),
        (b"[]\n", "object"),
        (b'{"schema":"dynctl.recording/2"}\n', "dynctl.recording/1"),
        (b'{"schema":"\\u001b[31mx"}\n', "this dynctl reads"),
        (b'{"schema":"dynctl.recording/1"}\n', "missing"),
        (b"\xff\xfe", "malformed|invalid|character"),
    ],
)
def test_headers_that_are_none_are_refused(line, why):
    with pytest.raises(DamagedError, match=why) as found:
        decode_header(line)
    assert "\x1b" not in str(found.value)


def test_a_header_is_read_back():
    header = Header("dynctl.recording/1", "ab", 1, "prod", 1.7e9, "0.1")

    assert decode_header(encode(header)) == header


@pytest.mark.parametrize(
    "line",
    [
        b'{"at_s":1}',
        b'{"at_s":-1,"asked":{}}',
        b'{"at_s":1e400,"asked":{}}',
        b'{"at_s":"1","asked":{}}',
        b'{"at_s":1,"asked":{},"snapshot":{"cluster":"c","taken_unix_s":1,"hosts":[]}}',
        b"{" * 5000,
        b'{"at_s":1,"asked":' + b"[" * 100_000,
        b"null",
    ],
)
def test_lines_of_no_recording_are_refused_at_once(line):
    with pytest.raises(DamagedError):
        decode_stamp(line)


def damaged(taken, **changes):
    host = taken.hosts[0]
    return replace(taken, hosts=(replace(host, **changes),))


@pytest.mark.parametrize(
    "change",
    [
        lambda r: replace(r, requests_total=1e300),
        lambda r: replace(r, ttft_s=replace(r.ttft_s, counts=(1.0,))),
        lambda r: replace(r, ttft_s=replace(r.ttft_s, bounds=(1.0, 1.0, 1.0, 1.0))),
        lambda r: replace(r, ttft_s=replace(r.ttft_s, counts=(5.0, 4.0, 3.0, 2.0, 1.0))),
        lambda r: replace(r, ttft_s=replace(r.ttft_s, counts=(-5.0, 4.0, 4.0, 4.0, 4.0))),
        lambda r: replace(r, ttft_s=replace(r.ttft_s, total=-1e300)),
    ],
)
def test_figures_nothing_can_be_drawn_of_are_refused(snapshot, change):
    taken = snapshot(1)
    router = taken.hosts[0].routers[0]
    line = encode(Entry(1.0, snapshot=damaged(taken, routers=(change(router),))))

    decode_stamp(line)
    with pytest.raises(DamagedError):
        decode_entry(line)


def test_times_no_calendar_has_and_crowds_are_refused(snapshot):
    crowded = damaged(snapshot(1), units=snapshot(1).hosts[0].units * 1500)
    for taken in (
        replace(snapshot(1), taken_unix_s=1e15),
        replace(snapshot(1), taken_unix_s=-1.0),
        replace(snapshot(1), hosts=snapshot(1).hosts * 5000),
        replace(snapshot(1), hosts=crowded.hosts * 6),
    ):
        with pytest.raises(DamagedError):
            decode_entry(encode(Entry(1.0, snapshot=taken)))


@given(st.binary(max_size=200))
def test_no_bytes_end_otherwise_than_by_being_refused(line):
    for read in (decode_header, decode_stamp, decode_entry):
        with pytest.raises(DamagedError):
            read(line)


def test_decisions_with_figures_of_no_request_are_refused():
    line = encode(Entry(1.0, asked=recordable_answers(Answers((Told("r", "l", "e", 1.0),)), b"s")))

    with pytest.raises(DamagedError):
        decode_entry(line.replace(b'"unix_s":1.0', b'"unix_s":-1.0'))
    with pytest.raises(DamagedError):
        decode_entry(b'{"at_s":1,"asked":{"hits":{"r":{"requests":1e200}}}}')
