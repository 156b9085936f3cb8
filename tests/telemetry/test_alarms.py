"""Which troubles of running engines become a line, when, and when they are over."""

from dataclasses import replace

from dynctl.telemetry.ledger import Ledger


def told(taken, at_s=None):
    """Watch snapshots, one a second; the seconds and texts of all events."""
    ledger, found = Ledger(), {}
    for tick, one in enumerate(taken, 1):
        ledger.take(one, float(at_s(tick) if at_s else tick))
        for event in ledger.events.newest(50)[::-1]:
            found.setdefault(f"{event.mark} {event.subject} {event.text}", tick)
    return found


def course(snapshot, num, **fields):
    """The engine's figures as functions of the second."""
    taken = []
    for tick in range(1, num + 1):
        one = snapshot(tick)
        host = one.hosts[0]
        sample = replace(host.engines[0], **{name: of(tick) for name, of in fields.items()})
        taken.append(replace(one, hosts=(replace(host, engines=(sample,)),)))
    return taken


def test_full_kv_memory_is_told_after_ten_seconds_and_over_after_thirty(snapshot):
    taken = course(snapshot, 100, kv_usage_ratio=lambda t: 0.97 if 20 <= t < 50 else 0.5)

    assert told(taken) == {
        "! chat-0 97% of its KV memory in use for 10 s": 30,
        "· chat-0 50% of its KV memory in use, after 30.0 s of more": 80,
    }


def test_a_moment_of_it_is_no_news(snapshot):
    assert told(course(snapshot, 60, kv_usage_ratio=lambda t: 0.99 if t % 10 else 0.9)) == {}


def test_preemptions_are_told_and_that_they_stopped(snapshot):
    taken = course(snapshot, 100, preemptions_total=lambda t: 2.0 * max(0, min(t, 40) - 10))

    (begun, began_at), (over, _) = told(taken).items()
    assert begun.startswith("! chat-0 preempts ")
    assert began_at == 21
    assert over.startswith("· chat-0 preempts no more, after ")


def test_failed_transfers_are_counted_once_a_minute(snapshot):
    taken = course(snapshot, 150, transfers_failed_total=lambda t: 5.0 + max(0, min(t, 40) - 10))

    assert told(taken) == {
        "! chat-0 1 KV transfers failed, 6 since it started": 11,
        "! chat-0 29 KV transfers failed, 35 since it started": 71,
    }


def test_a_restart_fails_no_transfers(snapshot):
    taken = course(snapshot, 20, transfers_failed_total=lambda t: 7.0 if t < 10 else 0.0)

    assert told(taken) == {}


def test_an_engine_whose_figures_stop_is_told_and_when_they_come_back(snapshot):
    taken = course(snapshot, 50, age_s=lambda t: float(max(0, t - 10)) if t < 30 else 0.0)

    assert told(taken) == {
        "! chat-0 no figures for 6 s, though gpu-01 answers": 16,
        "· chat-0 figures again, after 14.0 s": 40,
    }


def test_figures_that_come_late_again_and_again_are_told_once(snapshot):
    assert list(told(course(snapshot, 100, age_s=lambda t: float(t % 8)))) == [
        "! chat-0 no figures for 6 s, though gpu-01 answers"
    ]


def test_of_a_lost_host_only_the_host_is_told(snapshot):
    taken = [snapshot(tick) for tick in range(1, 5)]
    taken += [
        replace(one, hosts=(replace(one.hosts[0], age_s=9.0 + tick, error="no answer"),))
        for tick, one in enumerate(snapshot(tick) for tick in range(5, 40))
    ]

    assert list(told(taken)) == ["! gpu-01 no answer"]


def test_engines_that_are_gone_are_forgotten(snapshot):
    ledger = Ledger()
    ledger.take(snapshot(1), 1.0)
    empty = replace(snapshot(2), hosts=(replace(snapshot(2).hosts[0], units=(), engines=()),))
    ledger.take(empty, 2.0)

    assert ledger._engine_watch._engines == {}
