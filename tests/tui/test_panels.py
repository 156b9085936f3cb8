"""What each panel says, from synthetic figures; no terminal is involved."""

import re
from dataclasses import replace

import pytest

from dynctl import registry
from dynctl.core.snapshot import HostSnapshot, Snapshot
from dynctl.core.workload import Slo
from dynctl.telemetry.figures import CacheFigures, MovedFigures
from dynctl.telemetry.ledger import Ledger
from dynctl.telemetry.recording import Playing
from dynctl.telemetry.trends import Trends
from dynctl.tui.dashboard import _ACTIONS
from dynctl.tui.draw import plain, width_of
from dynctl.tui.frame import compose
from dynctl.tui.keys import ACTIONS, BINDINGS, PLAYS
from dynctl.tui.panels import engines, events, gpus, hits, itl, pools, title, traffic, ttft
from dynctl.tui.panels.help import MARKS, QUIT
from dynctl.tui.view import SORTS, Choices, Place, View


def texts(panel, view, width=80, height=20):
    return [plain(drawn).rstrip() for drawn in panel.rows(view, width, height)]


def at(**place):
    return Choices(place=Place(**place))


def words(text):
    return text.replace("▸", " ").split()


def test_every_panel_fits_the_seam(make_view):
    panels = registry.load_all("dynctl.tui.panels", "rows")
    empty = View(None, Trends())

    assert set(panels) >= {
        "engines",
        "events",
        "gpus",
        "help",
        "hits",
        "itl",
        "pools",
        "title",
        "traffic",
        "ttft",
    }
    for rows in panels.values():
        for view in (empty, make_view()):
            for height in (0, 1, 5, 40):
                assert len(rows(view, 80, height)) <= height


def test_the_title_says_cluster_deployment_freshness_and_goals(make_view):
    (text,) = texts(title, make_view())

    assert text.startswith("dynctl top  prod  chat  ● live 0s  SLO ttft<500 itl<40")
    assert re.search(r"\d\d:\d\d:\d\d    \? help$", text)


def test_the_title_says_when_hosts_are_lost(make_view):
    (text,) = texts(title, make_view(stale_s=9.0))

    assert "◐ 1 of 2 hosts lost" in text


def test_the_title_says_when_no_host_answers():
    ledger = Ledger()
    overview = ledger.take(
        Snapshot("c", 1.7e9, (HostSnapshot("h", age_s=12.0, error="down"),)), 1.0
    )
    (text,) = texts(title, View(overview, ledger.trends))

    assert "○ no host answers, data 12s old" in text


def test_traffic_shows_what_clients_meet(make_view):
    first, second, third = texts(traffic, make_view())

    assert max(len(first), len(second), len(third)) <= 79
    assert "req/s 14 " in first
    assert "out 2.41k tok/s" in first
    assert "err 0%" in first
    assert "queue 3" in first
    assert re.search(r"TTFT p50 \d+ p99 !?\d+/500ms 100% in", second)
    assert third == " KV hit 63/71% of 74%  lost cold 19% evict 5% route 3%  rdma 50 MiB/s"


def test_traffic_before_the_second_sample_shows_dashes_not_zeros(make_view):
    first, second, third = texts(traffic, make_view(ticks=1))

    assert "req/s – " in first
    assert "out – tok/s" in first
    assert re.search(r"TTFT p50 – p99 –(?!ms)", second)
    assert third == " KV hit –/– of –"


def changed(view, **figures):
    """The view with other figures of its deployment."""
    (deployment,) = view.overview.deployments
    deployments = (replace(deployment, **figures),)
    return replace(view, overview=replace(view.overview, deployments=deployments))


def test_caches_that_are_still_read_are_told_before_what_was_lost(make_view):
    view = changed(make_view(), caches=CacheFigures(2, 0, 1, 1, 412_000))
    assert texts(traffic, view)[2] == (
        " KV hit 63/71% of 74%  caches 2/4, 412k blocks  lost cold 19% evict 5% route 3%"
    )
    wide = texts(traffic, view, width=120)[2]
    assert "rdma 50 MiB/s" in wide


def test_a_hit_rate_that_is_missing_beside_a_predicted_one_is_red(make_view):
    for reported, style in ((None, "bad"), (0.0, "")):
        view = changed(make_view(), reported_hit_ratio=reported)
        third = traffic.rows(view, 80, 3)[2]
        (span,) = [span for span in third if span.text == ("–" if reported is None else "0%")]
        assert span.style == style


def test_what_is_moved_is_told_in_tokens_where_nobody_knows_their_size(make_view):
    moved = (MovedFigures("nvlink", 1200.0, None), MovedFigures("tcp", 10.0, 2.5e9))
    third = texts(traffic, changed(make_view(), moved=moved), width=120)[2]
    assert "nvlink 1.2k tok/s  tcp 2.33 GiB/s" in third


def test_pools_stand_in_the_order_of_a_request(make_view):
    head, prefill, decode = texts(pools, make_view())

    assert words(head)[:5] == ["POOL", "UP", "RUN", "WAIT", "KV%"]
    assert words(prefill)[:6] == ["prefill", "1/1", "3", "1", "44", "71"]
    assert words(decode)[:5] == ["decode", "3/3", "9", "3", "44"]
    assert "9.8k" in prefill
    assert "936" in decode


def test_a_decode_pool_shows_no_ttft(make_view):
    head, _, decode = texts(pools, make_view(), width=100)
    at = words(head).index("TTFT99")

    assert words(decode)[at] == "–"


def test_a_pool_with_missing_engines_is_marked(make_view):
    _, _, decode = pools.rows(make_view(stale_s=9.0), 80, 10)

    assert ("  0/3", "bad") in [(span.text, span.style) for span in decode]


def test_engines_have_a_row_each_with_figures(make_view):
    drawn = texts(engines, make_view(), width=100)

    assert words(drawn[0])[:4] == ["ENGINE", "HOST", "GPU", "STATE"]
    assert words(drawn[1])[:8] == ["chat-prefill-0", "gpu-01", "0-1", "UP", "3", "1", "44", "71"]
    assert drawn[1].startswith("▸")
    assert words(drawn[2])[:4] == ["chat-decode-0", "gpu-02", "0", "UP"]


def test_values_near_their_goal_are_marked(make_view):
    rows = engines.rows(make_view(slo=Slo(420.0, 30.0)), 80, 20)
    spans = [(span.text.strip(), span.style) for span in rows[2]]

    assert any(text.startswith("!") and style == "bad" for text, style in spans)


def test_a_stale_engine_shows_dashes_and_how_old_it_is(make_view):
    drawn = texts(engines, make_view(stale_s=9.0), width=100)
    stale = next(text for text in drawn if "chat-decode-0" in text)

    assert words(stale)[3:5] == ["9s", "old"]
    assert "312" not in stale


@pytest.mark.parametrize(
    ("width", "present", "absent"),
    [
        (
            80,
            {"ENGINE", "HOST", "STATE", "RUN", "WAIT", "KV%", "HIT%", "TTFT99", "ITL99", "TOK/S"},
            {"W", "°C", "MEM"},
        ),
        (100, {"GPU", "UTIL", "TREND"}, {"W", "MEM"}),
        (
            160,
            {"GPU", "UTIL", "TREND", "AGE", "MEM", "W", "°C", "PREEMPT", "TTFT50", "ITL50"},
            set(),
        ),
        (
            60,
            {"ENGINE", "STATE", "RUN", "WAIT", "KV%", "TTFT99", "ITL99", "TOK/S"},
            {"GPU", "TREND", "UTIL", "HIT%"},
        ),
    ],
)
def test_columns_go_by_priority(make_view, width, present, absent):
    head = words(texts(engines, make_view(), width=width)[0])

    assert present <= set(head)
    assert not absent & set(head)


def test_the_engine_list_scrolls_with_the_cursor(make_view):
    view = make_view(num_decode=20, choices=at(cursor=15))
    drawn = texts(engines, view, height=8)

    assert len(drawn) == 8
    assert any(text.startswith("▸") for text in drawn)
    assert "chat-prefill-0" not in " ".join(drawn)
    assert "15 more (j/k)" in drawn[-1]


def test_the_cursor_stays_on_the_list_when_engines_go(make_view):
    drawn = texts(engines, make_view(choices=at(cursor=99)))

    assert sum(text.startswith("▸") for text in drawn) == 1


def test_sorting_puts_unknown_figures_last_either_way(make_view):
    by_ttft = [name for name, _ in SORTS].index("TTFT99")

    for is_reversed in (False, True):
        view = make_view(stale_s=9.0, choices=at(sort=by_ttft, is_reversed=is_reversed))
        assert view.engines()[0].id == "chat-prefill-0"


@pytest.mark.parametrize(
    ("wanted", "found"),
    [("decode", 3), ("!decode", 1), ("role=prefill", 1), ("host=gpu-02 !decode-1", 2), ("state=ready", 4),
     ("nothing", 0), ("", 4), ("HOST=GPU-01", 1)],
)  # fmt: skip
def test_filters(make_view, wanted, found):
    assert len(make_view(choices=at(filter=wanted)).engines()) == found


def test_events_are_told_newest_first(make_view):
    (text,) = texts(events, make_view(stale_s=9.0))

    assert re.fullmatch(r" ! \d\d:\d\d:\d\d gpu-02  no answer within 5 s", text)
    assert texts(events, make_view()) == [" no events"]


def test_hits_compare_router_and_engines(make_view):
    drawn = texts(hits, make_view(), width=70, height=5)

    assert (
        "router expected 63%   engines found 71%   off by +8.0 points   of 74% possible" in drawn[1]
    )
    assert any("prefill" in text and "█" in text for text in drawn)


def test_gpus_are_a_heat_map_per_host(make_view):
    drawn = texts(gpus, make_view(), width=70, height=6)

    assert "gpu-01 ▁▁▂▂▃▄▅▆" in drawn[1]
    assert drawn[-1].startswith(" busiest gpu-01:7  70%  66 °C")


@pytest.mark.parametrize(("share", "block"), [(-1e308, "▁"), (1e308, "█")])
def test_a_share_that_no_gpu_has_is_drawn_as_the_nearest(make_view, share, block):
    view = make_view()
    first = view.overview.hosts[0]
    wild = replace(first, gpus=(replace(first.gpus[0], util_ratio=share),))
    drawn = texts(gpus, replace(view, overview=replace(view.overview, hosts=(wild,))), width=70)

    assert drawn[1].split() == ["gpu-01", block]


def test_gpus_of_a_lost_host_are_crossed_out(make_view):
    drawn = texts(gpus, make_view(stale_s=9.0), width=70, height=6)

    assert "✕✕✕✕✕✕✕✕  9s old" in drawn[2]


def test_hosts_without_gpus_are_said_so(make_view):
    view = make_view()
    bare = tuple(replace(host, gpus=()) for host in view.overview.hosts)
    drawn = texts(gpus, replace(view, overview=replace(view.overview, hosts=bare)))

    assert drawn[1] == " no GPUs on these hosts"


def test_courses_are_drawn_against_the_goal(make_view):
    drawn = texts(ttft, make_view(), width=60, height=7)

    assert "TTFT ms" in drawn[0]
    assert "SLO 500" in drawn[0]
    assert drawn[1].startswith("  625 ┤")
    assert any(text.startswith("  500 ┤╌") for text in drawn)
    assert "⠀" < max(drawn[2]) <= "⣿"
    assert drawn[-1].startswith("      └-5m")
    assert drawn[-1].endswith("now")
    assert "SLO 40" in texts(itl, make_view(), width=60, height=7)[0]


def test_hostile_names_are_shown_as_text(snapshots, renamed):
    ledger = Ledger()
    hostile = "[red]x[/red]\x1b]52;c;ZXZpbA==\x07\x1b[31m\u202egpu\x00\n"
    overview = ledger.take(renamed(snapshots(1), hostile), 1.0)
    view = View(overview, ledger.trends, ledger.events.newest(5))

    for width, height in ((80, 24), (160, 48)):
        drawn = compose(view, width, height)
        everything = "".join(plain(found) for found in drawn)
        assert everything.isprintable()
        assert "[red]x" in everything
        assert {width_of(found) for found in drawn} == {width}


@pytest.mark.parametrize("engines_", [0, 3, 40])
def test_the_screen_is_exactly_its_size_at_any_size(make_view, engines_):
    views = [
        View(None, Trends()),
        make_view(num_decode=engines_),
        make_view(choices=Choices(is_helping=True)),
    ]

    for view in views:
        for width in (1, 20, 39, 40, 79, 80, 81, 119, 120, 160, 300, 500):
            for height in (1, 5, 9, 10, 23, 24, 30, 39, 40, 48, 100, 200):
                drawn = compose(view, width, height)
                assert len(drawn) == height
                assert {width_of(found) for found in drawn} == {width}


def test_small_terminals_say_so_and_still_say_how_things_are(make_view):
    assert plain(compose(make_view(), 39, 24)[0]).startswith("terminal too small")
    first, second = (plain(found).rstrip() for found in compose(make_view(), 60, 20)[:2])

    assert first.startswith("up 4/4 TTFT99 ")
    assert second == "enlarge to 80x24 (now 60x20)"


@pytest.mark.parametrize("size", [(80, 24), (160, 48)])
def test_help_shows_every_key_and_mark_on_the_smallest_screen(make_view, size):
    drawn = [plain(found) for found in compose(make_view(choices=Choices(is_helping=True)), *size)]

    assert len(drawn) == size[1]
    for name, told in (*((b.shown, b.text) for b in BINDINGS), *ACTIONS, QUIT, *MARKS):
        assert any(name in text and told in text for text in drawn), name


def test_goals_stand_beside_what_is_with_the_share_within(make_view):
    second = texts(traffic, make_view())[1]

    assert re.match(r" TTFT p50 \d+ p99 !\d+/500ms 100% in  ITL p50 \d+ p99 !\d+/40ms 100% in$", second)  # fmt: skip
    missed = texts(traffic, make_view(slo=Slo(200.0, None)))[1]
    assert re.search(r"p99 !\d{3}/200ms 9\d(\.\d)?% in ", missed)
    assert "/" not in texts(traffic, make_view(slo=Slo()))[1]


def test_a_share_that_is_not_all_is_never_shown_as_all():
    shown = [traffic._share(ratio) for ratio in (1.0, 0.99999, 0.995, 0.99, 0.9, 0.5)]

    assert shown == ["100%", "99.9%", "99.5%", "99%", "90%", "50%"]


def test_goals_are_those_of_the_deployment_that_is_shown(snapshots):
    ledger = Ledger({"chat": Slo(500.0, 40.0), "code": Slo(100.0, None)})
    for tick in (1, 2):
        taken = snapshots(tick)
        first = taken.hosts[0]
        unit = replace(first.units[0], id="code-0", deployment="code")
        sample = replace(first.engines[0], id="code-0")
        host = replace(first, units=(*first.units, unit), engines=(*first.engines, sample))
        overview = ledger.take(replace(taken, hosts=(host, *taken.hosts[1:])), float(tick))
    views = [View(overview, ledger.trends, choices=Choices(deployment=number)) for number in (0, 1)]

    assert [re.search(r"SLO .*<\d+", texts(title, view)[0])[0] for view in views] == [
        "SLO ttft<500 itl<40",
        "SLO ttft<100",
    ]
    # The same latency is within the one goal and beyond the other.
    styles = {
        words(plain(row))[0]: [span.style for span in row if span.style in ("warn", "bad")]
        for row in engines.rows(views[0], 120, 20)[1:-1]
        if row
    }
    assert "bad" not in styles["chat-prefill-0"]
    assert "bad" in styles["code-0"]


def test_the_title_of_a_replay_says_where_and_when(make_view):
    def told(**changes):
        playing = Playing(**{"at_s": 751.0, "until_s": 3730.0, **changes})
        return texts(title, replace(make_view(), playing=playing))[0]

    playing = told(speed=4.0)
    assert playing.startswith("dynctl top  prod  chat  ▶ ×4 0:12:31/1:02:10  ")
    assert re.search(r"[A-Z][a-z]{2} \d\d \d\d:\d\d:\d\d$", playing)
    assert "‖ held" in told(is_playing=False)
    assert "■ end" in told(is_playing=False, at_s=3730.0)
    assert "… going to" in told(is_seeking=True)
    lost = replace(make_view(stale_s=9.0), playing=Playing(1.0, 2.0))
    assert "◐ 1 lost" in texts(title, lost)[0]


def test_help_of_a_replay_has_its_keys_on_the_smallest_screen(make_view):
    view = replace(make_view(choices=Choices(is_helping=True)), playing=Playing(1.0, 2.0))
    drawn = [plain(found) for found in compose(view, 80, 24)]

    for name, told in (*PLAYS, *ACTIONS, QUIT, *MARKS):
        assert any(name in text and told in text for text in drawn), name
    assert not any("hold the picture" in text for text in drawn)


def test_every_action_is_in_the_help():
    assert sorted("".join(shown for shown, _ in ACTIONS).replace(" ", "")) == sorted(_ACTIONS)


def test_goals_are_left_out_of_the_title_where_they_do_not_fit(make_view):
    view = replace(make_view(), playing=Playing(751.0, 3730.0), recording="◉ rec")
    (narrow,), (wide,) = texts(title, view, width=80), texts(title, view, width=120)

    assert "SLO" not in narrow
    assert re.search(r"◉ rec +[A-Z][a-z]{2} \d\d \d\d:\d\d:\d\d$", narrow)
    assert "SLO ttft<500 itl<40" in wide
