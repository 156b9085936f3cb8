"""Which changes become a line, and that hostile text stays text."""

from dynctl.core.deployment import EngineState, UnitStatus
from dynctl.core.snapshot import HostSnapshot, RouterSample, Snapshot
from dynctl.telemetry.events import EventLog


def snapshot(unix_s, *units, error=""):
    return Snapshot("c", unix_s, (HostSnapshot("gpu-01", units=units, error=error),))


def unit(state, num_restarts=0, last_error=""):
    return UnitStatus("d-0", "engine", state, num_restarts=num_restarts, last_error=last_error)


def lines(log):
    return [f"{e.mark} {e.subject} {e.text}" for e in log.newest(10)]


def test_a_healthy_first_look_is_no_news():
    log = EventLog()
    log.add(snapshot(1.0, unit(EngineState.READY)))
    log.add(snapshot(2.0, unit(EngineState.READY)))

    assert log.newest(10) == ()


def test_a_lost_host_is_told_once_and_so_is_its_return():
    log = EventLog()
    log.add(snapshot(1.0))
    log.add(snapshot(2.0, error="no answer within 5 s"))
    log.add(snapshot(3.0, error="no answer within 5 s"))
    log.add(snapshot(4.0))

    assert lines(log) == ["· gpu-01 answers again", "! gpu-01 no answer within 5 s"]


def test_deaths_restarts_and_recoveries():
    log = EventLog()
    log.add(snapshot(1.0, unit(EngineState.READY)))
    log.add(snapshot(2.0, unit(EngineState.BACKOFF, 0, "killed by signal 9")))
    log.add(snapshot(3.0, unit(EngineState.STARTING, 1, "killed by signal 9")))
    log.add(snapshot(4.0, unit(EngineState.READY, 1)))
    log.add(snapshot(5.0, unit(EngineState.FAILED, 1, "out of memory")))

    assert lines(log) == [
        "! d-0 gave up: out of memory",
        "· d-0 starting → ready",
        "! d-0 restarted (1 in all): killed by signal 9",
        "! d-0 waits before its next start: killed by signal 9",
    ]


def test_trouble_on_the_first_look_is_news():
    log = EventLog()
    log.add(snapshot(1.0, unit(EngineState.FAILED, 3, "no such model")))

    assert lines(log) == ["! d-0 gave up: no such model"]


def test_escape_sequences_in_errors_are_dropped():
    log = EventLog()
    log.add(
        snapshot(1.0, unit(EngineState.FAILED, 0, "\x1b]52;c;ZXZpbA==\x07[red]x\x1b[31m\u202ey"))
    )

    (line,) = lines(log)
    assert line.startswith("! d-0 gave up: ")
    assert "[red]x" in line
    assert line.isprintable()


def test_the_log_is_bounded():
    log = EventLog(length=5)
    for tick in range(40):
        log.add(snapshot(float(tick), error="down" if tick % 2 else ""))

    assert len(log.newest(100)) == 5


def test_what_a_router_finds_is_told_once_and_when_it_is_over():
    log = EventLog()
    for unix_s, found in enumerate(
        ((), (("d-0", "topic"), ("", "slow_decisions")), (("d-0", "topic"),))
    ):
        for again in (0.0, 0.5):
            router = RouterSample("r", "chat", findings=found)
            host = HostSnapshot("gpu-01", routers=(router,))
            log.add(Snapshot("c", unix_s + again, (host,)))

    assert lines(log) == [
        "· r slow_decisions is over",
        "! r slow_decisions found by its router: dynctl explain hits",
        "! d-0 topic found by its router: dynctl explain hits",
    ]
