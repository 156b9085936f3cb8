"""`watch` with hosts that answer, hang, fail, recover, and sources that break."""

import asyncio

import pytest

from dynctl.core.snapshot import GpuSample, HostSnapshot
from dynctl.errors import ConnectError
from dynctl.telemetry import watch as watch_module
from dynctl.telemetry.watch import watch


class Scripted:
    """Answers from a list; an exception is raised, None hangs for ever; the last entry repeats."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.num_asked = 0
        self.is_cancelled = False

    async def sample(self):
        answer = self.answers[min(self.num_asked, len(self.answers) - 1)]
        self.num_asked += 1
        if answer is None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.is_cancelled = True
                raise
        if isinstance(answer, Exception):
            raise answer
        return answer


def host(name="as-the-agent-says", **fields):
    return HostSnapshot(name, **fields)


def collect(sources, count, period_s=0.05):
    async def main():
        async with watch("prod", sources, period_s) as snapshots:
            found = []
            async for snapshot in snapshots:
                found.append(snapshot)
                if len(found) == count:
                    break
            return found

    return asyncio.run(main())


def named(snapshot):
    return {h.host_name: h for h in snapshot.hosts}


def test_a_hanging_host_delays_no_other():
    hanging, fine = Scripted(None), Scripted(host(gpus=(GpuSample(0, "u", "g"),)))
    snapshots = collect({"slow": hanging, "ok": fine}, 4)

    assert all(named(s)["ok"].gpus for s in snapshots)
    assert all(named(s)["slow"].error == "no answer yet" for s in snapshots)
    assert fine.num_asked >= 3
    assert hanging.num_asked == 1
    assert hanging.is_cancelled


def test_a_host_that_never_answers_is_named_after_the_time_limit(monkeypatch):
    monkeypatch.setattr(watch_module, "ANSWER_TIMEOUT_S", 0.05)
    snapshots = collect({"slow": Scripted(None)}, 5)

    assert "no answer within" in named(snapshots[-1])["slow"].error


def test_a_lost_host_keeps_its_last_data_with_growing_age_and_the_reason():
    gpus = (GpuSample(0, "u", "g", util_ratio=0.5),)
    source = Scripted(host(gpus=gpus), ConnectError("gpu-01: connection reset"))
    snapshots = collect({"gpu-01": source}, 6)
    first, last = named(snapshots[0])["gpu-01"], named(snapshots[-1])["gpu-01"]

    assert first.error == ""
    assert last.gpus == gpus
    assert last.error == "connection reset", "whoever shows it names the host"
    assert last.age_s > first.age_s


def test_a_host_that_answers_again_is_live_again():
    source = Scripted(ConnectError("down"), ConnectError("down"), host(age_s=0.25))
    last = named(collect({"gpu-01": source}, 8)[-1])["gpu-01"]

    assert last.error == ""
    assert 0.25 <= last.age_s < 5.0


def test_a_host_nobody_could_reach_is_shown_with_its_error():
    snapshots = collect(
        {"gpu-02": ConnectError("gpu-02: no route to host"), "ok": Scripted(host())}, 1
    )

    assert named(snapshots[0])["gpu-02"].error == "no route to host"
    assert named(snapshots[0])["ok"].error == ""


def test_a_host_goes_by_the_name_of_the_inventory():
    assert set(named(collect({"gpu-01": Scripted(host("impostor"))}, 1)[0])) == {"gpu-01"}


def test_a_bug_in_a_source_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        collect({"a": Scripted(ZeroDivisionError())}, 5)


def test_leaving_ends_all_polls():
    async def main():
        before = asyncio.all_tasks()
        async with watch("c", {"a": Scripted(None), "b": Scripted(host())}, 0.05) as snapshots:
            await anext(snapshots)
        return asyncio.all_tasks() - before

    assert asyncio.run(main()) == set()
