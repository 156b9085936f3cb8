"""Every screen at any size, with nothing known, with everything known, and with hostile texts from hosts."""

import re
from dataclasses import replace

import pytest

from dynctl.telemetry.answers import Answers, Asks
from dynctl.telemetry.ledger import Ledger
from dynctl.telemetry.traces import Told, TraceBook
from dynctl.telemetry.trends import Trends
from dynctl.tui.catalog import ENGINE, SCREENS, screen_of
from dynctl.tui.draw import plain, width_of
from dynctl.tui.frame import compose
from dynctl.tui.view import Choices, Place, View

HITS = {
    "requests": 297.0, "requests_reported": 297.0, "prompt_tokens": 1000.0, "predicted_tokens": 690.0,
    "reported_tokens": 680.0, "probe_tokens": 200.0, "probe_cached_tokens": 190.0, "hit_tokens": 680.0,
    "routing_tokens": 20.0, "eviction_tokens": 40.0, "cold_tokens": 250.0, "moved_rdma_tokens": 5000.0,
    "moved_rdma_bytes": 3.0 * 2**30,
}  # fmt: skip
COMMAND = "vllm serve /models/a-model " + " ".join(f"--option-{i} {i}" for i in range(12))
LOG = (
    "INFO one",
    "WARNING two",
    "INFO three",
    "ERROR four",
    *(f"INFO line {i}" for i in range(40)),
)


def decisions(number=3, **changed):
    """Requests that were handed over, the newest of which runs."""
    told = []
    for at in range(number):
        is_last = at == number - 1
        common = {
            "request_id": f"r{at}", "shown_id": f"7058c456{at:08d}", "route_key": "chat:128", "prompt_tokens": 800,
            "unix_s": 1.7e9 + at,
        }  # fmt: skip
        told.append(Told(leg="prefill", engine="chat-prefill-0", overlap_tokens=400, cached_tokens=384,
                         waited_ms=2.0, ttft_ms=36.0, outcome="done", **common))  # fmt: skip
        told.append(Told(leg="decode", engine=f"chat-decode-{at % 2}", waited_ms=40.0,
                         ttft_ms=None if is_last else 26.0, outcome="" if is_last else "done", path="copy",
                         link="rdma", move_tokens=144, move_bytes=18 << 20, output_tokens=0 if is_last else 128,
                         **common))  # fmt: skip
    return [replace(one, **changed) for one in told]


@pytest.fixture
def full_view(make_view):
    """A view of a screen with answers to all it may ask."""

    def make(screen="overview", place=None, told=None, log=LOG, choices=None, **options):
        choices = choices or Choices(screen=screen, place=place or Place())
        view = make_view(choices=choices, **options)
        book = TraceBook()
        book.add(decisions() if told is None else told)
        names = [(host.name, unit) for host in view.overview.hosts for unit, _ in host.units]
        answers = Answers(
            hits={"chat-router": HITS},
            logs=dict.fromkeys(names, log),
            commands=dict.fromkeys(names, COMMAND),
        )
        return replace(view, answers=answers, traces=book.newest())

    return make


def shown(view, width=80, height=24):
    return [plain(drawn).rstrip() for drawn in compose(view, width, height)]


ALL = [*(Choices(screen=screen.name) for screen in SCREENS), Choices(opened="chat-decode-0")]


@pytest.mark.parametrize("choices", ALL, ids=lambda one: one.opened or one.screen)
def test_a_screen_is_exactly_its_size_whatever_is_known(full_view, make_view, choices):
    views = [
        View(None, Trends(), choices=choices),
        make_view(ticks=1, choices=choices),
        make_view(num_decode=40, stale_s=9.0, choices=choices),
        full_view(choices=choices),
    ]

    for view in views:
        for width in (80, 81, 119, 120, 160, 300):
            for height in (24, 25, 39, 40, 48, 100):
                drawn = compose(view, width, height)
                assert len(drawn) == height
                assert {width_of(found) for found in drawn} == {width}


@pytest.mark.parametrize("choices", ALL, ids=lambda one: one.opened or one.screen)
def test_a_screen_shows_no_zero_before_anything_is_known(choices):
    everything = " ".join(shown(View(None, Trends(), choices=choices))[1:-1])

    assert not any(word in {"0", "0%", "0.0", "0.0%"} for word in everything.split())


@pytest.mark.parametrize(("num_decode", "num"), [(3, 60), (19, 30), (99, 10)])
def test_of_many_engines_fewer_decisions_are_asked_since_each_names_them_all(
    make_view, num_decode, num
):
    view = make_view(ticks=1, num_decode=num_decode, choices=Choices(screen="requests"))

    assert screen_of(view.choices).asks(view).num_decisions == num


@pytest.mark.parametrize("screen", [*SCREENS, ENGINE], ids=lambda one: one.name)
def test_a_screen_says_what_it_asks_and_stays_within_its_room(full_view, screen):
    view = full_view(choices=Choices(screen=screen.name))

    assert isinstance(screen.asks(view), Asks)
    for height in (0, 1, 5, 40):
        assert len(screen.rows(view, 80, height)) <= height
    assert screen.num_rows(view) >= 0
    assert screen.num_orders(view) >= 1


def test_the_shown_screen_is_marked_below(full_view):
    for screen in SCREENS:
        bottom = compose(full_view(screen.name), 80, 24)[-1]
        (marked,) = [span.text for span in bottom if span.style == "title"]
        assert marked.endswith(screen.name)


def test_hostile_texts_are_shown_as_text_on_every_screen(snapshots, renamed):
    hostile = "[red]x[/red]\x1b]52;c;ZXZpbA==\x07\x1b[31m\u202egpu\x00\n"
    ledger = Ledger()
    overview = ledger.take(renamed(snapshots(1), hostile), 1.0)
    ledger.requests.add(decisions(engine=hostile, shown_id=hostile, route_key=hostile, path=hostile, link=hostile,
                                  outcome=hostile))  # fmt: skip
    log = {(hostile, unit): (hostile, f"ERROR {hostile}") for unit in (hostile, "agent")}
    commands = {("gpu-02", "chat-decode-0"): hostile}
    answers = Answers(logs=log, commands=commands, failures={("gpu-02", "chat-decode-0"): hostile})
    places = (Place(), Place(sort=1), Place(cursor=1))
    choices = [
        *(Choices(screen=screen.name, place=place) for screen in SCREENS for place in places),
        Choices(opened=hostile),
        Choices(opened="chat-decode-0"),
    ]
    for one in choices:
        view = View(
            overview, ledger.trends, ledger.events.newest(5), one, answers, ledger.requests.newest()
        )
        for width, height in ((80, 24), (160, 48)):
            everything = "".join(plain(found) for found in compose(view, width, height))
            assert everything.isprintable(), (screen_of(one).name, everything)


def test_an_engine_shows_its_course_load_transfers_and_log(full_view):
    drawn = "\n".join(shown(full_view(choices=Choices(opened="chat-decode-0"))))

    assert "chat-decode-0 UP · chat decode · gpu-02:0" in drawn
    assert "ITL ms  p50 30" in drawn
    assert "50 ┤" in drawn
    assert "running 3   waiting 1   preempt/s 0.0   KV 44% ████▍░░░░░   hits 71%" in drawn
    assert "tokens/s 312" in drawn
    assert "KV in 50 MiB/s   transfer p50 5.0 p99 9.9 ms   failed 2" in drawn
    assert "GPU 0  0% util   66 °C   600 W   70.0/80.0 GiB   H100" in drawn
    assert "2 errors and warnings in the last 44 lines" in drawn
    assert "! ERROR four" in drawn.replace("!ERROR", "! ERROR")
    assert drawn.count("INFO line 39") == 1
    assert re.search(r"^ cmd  vllm serve /models/a-model .*…$", drawn, re.MULTILINE)


def test_a_command_is_whole_where_there_is_room(full_view):
    view = replace(full_view(choices=Choices(opened="chat-decode-0")), width=120, room=45)
    drawn = "".join(text.removeprefix("      ") for text in shown(view, 120, 48))

    assert COMMAND in drawn


def test_figures_an_engine_does_not_tell_are_dashes(make_view):
    view = make_view(choices=Choices(opened="chat-prefill-0"))
    bare = replace(
        view.overview.engines[0],
        kv_usage_ratio=None,
        running=None,
        gpu_indices=(),
        pid=None,
        started_unix_s=None,
    )
    view = replace(view, overview=replace(view.overview, engines=(bare,)))
    drawn = "\n".join(shown(view))

    assert "pid – · up –" in drawn
    assert "running –   waiting 1" in drawn
    assert "KV –  " in drawn
    assert "KV in –   transfer p50 – p99 – ms   failed –" in drawn
    assert "GPU –" in drawn
    assert " cmd  –" in drawn
    assert "reading…" in drawn


def test_m_draws_another_figure_of_an_engine(full_view):
    for metric, expected in enumerate(
        ("ITL ms", "ITL ms", "tokens/s", "KV in use", "running", "waiting")
    ):
        drawn = shown(full_view(choices=Choices(opened="chat-decode-0", metric=metric)))
        assert drawn[3].startswith(f" {expected}")


def test_an_engine_that_is_gone_is_said_to_be(full_view):
    assert shown(full_view(choices=Choices(opened="chat-decode-9")))[2] == (
        " chat-decode-9 is not there any more"
    )


def test_pools_say_which_side_is_full_and_why(full_view):
    drawn = "\n".join(shown(full_view("pools")))

    assert "P:D 1:3 engines ready   0.415 : 1 tokens of prompts to answers" in drawn
    assert " verdict  both are full" in drawn
    assert "! prefill        1.0 requests wait per engine, full from 1" in drawn
    assert "  decode         44% of KV memory in use, full from 90%" in drawn


def test_gpus_are_a_map_and_a_row_each_with_their_engine(full_view):
    drawn = shown(full_view("gpus"), height=40)

    assert "gpu-01 ▁▁▂▂▃▄▅▆" in "\n".join(drawn)
    row = next(text for text in drawn if text.split()[:2] == ["gpu-02", "1"])
    assert row.split() == [
        "gpu-02",
        "1",
        "H100",
        "10%",
        "70.0/80",
        "600",
        "66",
        "chat-decode-1",
        "44",
        "0s",
    ]


def test_the_map_shows_memory_and_kv_as_well(full_view):
    for metric, blocks in ((1, "▇▇▇▇▇▇▇▇"), (2, "▄▄······")):
        view = full_view(choices=Choices(screen="gpus", metric=metric))
        assert f"gpu-01 {blocks}" in "\n".join(shown(view))


def test_kv_compares_sources_bounds_and_losses(full_view):
    drawn = shown(full_view("kv"))
    rows = {text[:26].strip(): text[26:54].split() for text in drawn}

    assert rows["expected by the router"] == ["63%", "69%"]
    assert rows["reported by engines"] == ["71%", "68%"]
    assert rows["own questions asked twice"] == ["–", "95%"]
    assert rows["possible: held by any"] == ["–", "70%"]
    assert rows["possible: seen before"] == ["74%", "74%"]
    assert rows["cold: never seen"] == ["19%", "25%"]
    assert rows["eviction: held by none"] == ["5%", "4%"]
    assert rows["routing: held elsewhere"] == ["3%", "2%"]


def test_kv_says_how_many_engines_of_its_routes_there_is_no_room_for(full_view):
    told = [
        replace(one, engine=f"chat-prefill-{one.request_id}") if one.leg == "prefill" else one
        for one in decisions(9)
    ]
    drawn = shown(full_view("kv", told=told))

    (more,) = [text for text in drawn if re.search(r"… \d+ more", text)]
    seen = sum(text.startswith(" chat-prefill-r") for text in drawn)
    assert more.strip() == f"… {9 - seen} more"
    assert 0 < seen < 9


def test_kv_tells_the_index_what_was_moved_and_the_routes(full_view):
    drawn = "\n".join(shown(full_view("kv")))

    assert "INDEX  9k blocks   caches known 4/4" in drawn
    assert "events leave hosts p50 15 p99 20 ms old (worst: gpu-01)" in drawn
    assert "rdma           50 MiB/s   3 GiB since start" in drawn
    assert "decode-0 decode-1" in drawn
    assert "chat-prefill-0         2        1" in drawn


def test_requests_list_those_under_way_first_with_the_parts_of_their_first_token(full_view):
    drawn = shown(full_view("requests"), width=160, height=40)
    first, second = (text.replace("▸", " ").split() for text in drawn[4:6])

    assert "in flight 162   queued 3" in drawn[2]
    assert first[1:] == [
        "00000002",
        "800",
        "–",
        "48",
        "prefill-0→decode-0",
        "2.0",
        "36",
        "–",
        "–",
        "runs",
    ]
    assert second[1:-1] == [
        "00000001",
        "800",
        "128",
        "48",
        "prefill-0→decode-1",
        "2.0",
        "36",
        "28",
        "66",
        "done",
    ]
    assert second[-1].startswith("▒███")
    assert second[-1].endswith("░")


def test_the_chosen_request_has_its_waterfall_and_no_prompt(full_view):
    drawn = shown(full_view("requests", place=Place(cursor=1)))
    below = drawn[-7:-2]

    assert below[0].startswith(
        " 7058c45600000001   chat-prefill-0 → chat-decode-1   384 cached of 800"
    )
    assert below[1] == " copy: 144 tokens, 18 MiB over rdma   key chat:128"
    assert [text.split()[:2] for text in below[2:]] == [
        ["queue", "2.0"],
        ["prefill", "36"],
        ["hand-over", "28"],
    ]
    assert below[4].index("░") == below[3].rindex("█") + 1


def test_requests_of_ranks_are_listed_and_lead_to_their_engine(full_view):
    view = full_view("requests", told=decisions(engine="chat-decode-1_dp3"))

    assert "decode-1_dp3" in "\n".join(shown(view, width=120))
    assert SCREENS[4].engine(view) == "chat-decode-1"


def test_requests_of_other_deployments_are_not_listed(full_view):
    assert "none seen" in shown(full_view("requests", told=decisions(engine="other-engine")))[2]


def test_a_log_shows_its_newest_lines_and_marks_trouble(full_view):
    name = Place(sort=1)
    drawn = shown(full_view("logs", place=name))

    assert drawn[2].startswith(" chat-decode-0  on gpu-02   2 of 7, < > another")
    assert drawn[20].strip() == "INFO line 39"
    assert ("44 lines" in drawn[21], "newest" in drawn[21]) == (True, True)
    assert "5 below" in shown(full_view("logs", place=replace(name, cursor=5)))[21]
    oldest = shown(full_view("logs", place=replace(name, cursor=99)))
    assert oldest[3:7] == [" INFO one", "!WARNING two", " INFO three", "!ERROR four"]


def test_long_lines_of_a_log_go_on_in_the_next_one(full_view):
    view = full_view("logs", log=("INFO short", "ERROR " + "x" * 100))
    drawn = shown(view)

    assert drawn[3:6] == [" INFO short", "!ERROR " + "x" * 73, " " + "x" * 27]
    assert "2 lines" in drawn[-3]
    assert SCREENS[5].num_rows(full_view("logs", log=("y" * 158,) * 20)) == 2 * 20 - 18 + 1


def test_a_log_is_filtered(full_view):
    drawn = shown(full_view("logs", place=Place(filter="!info")))

    assert drawn[3:6] == ["!WARNING two", "!ERROR four", ""]


def test_a_log_that_cannot_be_read_says_why(full_view):
    view = full_view("logs")
    answers = Answers(failures={("gpu-01", "chat-router"): "gpu-01: no agent answers"})

    assert shown(replace(view, answers=answers))[3] == " gpu-01: no agent answers"


def test_events_are_listed_and_filtered(full_view):
    drawn = shown(full_view("events", stale_s=9.0))

    assert drawn[2].endswith("gpu-02  no answer within 5 s")
    assert "no events" in "\n".join(
        shown(full_view("events", place=Place(filter="nothing"), stale_s=9.0))
    )
