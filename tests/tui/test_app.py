"""The Textual app driven by a pilot: what is on the screen after snapshots, keys and resizes."""

import asyncio
import itertools
from contextlib import asynccontextmanager

import pytest

from dynctl.core.workload import Slo
from dynctl.errors import ConnectError
from dynctl.tui.app import TopApp


def screen_of(app):
    """The text of what the canvas would draw, line by line."""
    height = app.canvas.size.height
    return ["".join(segment.text for segment in app.canvas.render_line(y)) for y in range(height)]


def source(*taken, then=None):
    """Snapshots that arrive at once; then an error, or silence."""

    @asynccontextmanager
    async def open_():
        async def stream():
            for one in taken:
                yield one
                await asyncio.sleep(0.01)
            if then is not None:
                raise then
            await asyncio.Event().wait()

        stream_ = stream()
        yield stream_
        await stream_.aclose()

    return open_


def pilot(scenario, *taken, size=(80, 24), then=None):
    async def main():
        clock = itertools.count(1.0)
        app = TopApp(source(*taken, then=then), Slo(500.0, 40.0), lambda: next(clock))
        async with app.run_test(size=size) as driver:
            await settle(app, driver, len(taken))
            return await scenario(app, driver)

    return asyncio.run(main())


async def settle(app, driver, num_snapshots):
    for _ in range(6000):
        await driver.pause(0.01)
        overview = app._latest.overview
        if (
            num_snapshots == 0
            or app.failure
            or (overview and overview.taken_unix_s == 1.7e9 + num_snapshots)
        ):
            break
    await driver.pause()


@pytest.mark.parametrize("size", [(80, 24), (160, 48)])
def test_the_overview_is_drawn_at_both_sizes(snapshots, size):
    async def scenario(app, driver):
        return screen_of(app)

    screen = pilot(scenario, *(snapshots(tick) for tick in range(1, 5)), size=size)
    everything = "\n".join(screen)

    assert len(screen) == size[1]
    assert {len(text) for text in screen} == {size[0]}
    for expected in (
        "dynctl top  prod  chat",
        "req/s 14",
        "POOL",
        "ENGINE",
        "chat-prefill-0",
        "q quit",
    ):
        assert expected in everything
    assert ("GPU use" in everything) == (size[0] == 160)


def test_before_the_first_snapshot_there_are_dashes_and_no_zeros(snapshots):
    async def scenario(app, driver):
        return "\n".join(screen_of(app))

    everything = pilot(scenario)

    assert "no data yet" in everything
    assert "req/s –" in everything


def test_keys_move_sort_filter_and_help(snapshots):
    async def scenario(app, driver):
        found = {}
        await driver.press("j")
        found["moved"] = next(text for text in screen_of(app) if text.startswith("▸"))
        await driver.press("greater_than_sign")
        found["sorted"] = "\n".join(screen_of(app))
        await driver.press("slash", *"prefill", "enter")
        found["filtered"] = "\n".join(screen_of(app))
        await driver.press("escape", "question_mark")
        found["help"] = "\n".join(screen_of(app))
        return found

    found = pilot(scenario, snapshots(1), snapshots(2), size=(100, 24))

    assert "chat-decode-0" in found["moved"]
    assert "sort: RUN ▼" in found["sorted"]
    assert "filter: prefill" in found["filtered"]
    assert "chat-decode-0" not in found["filtered"]
    assert "move the cursor" in found["help"]


def test_a_held_picture_stands_still_while_collecting_goes_on(snapshots):
    async def scenario(app, driver):
        await driver.press("space")
        before = screen_of(app)
        for tick in range(3, 30):
            app._ledger.take(snapshots(tick), float(tick))
        from dynctl.tui.messages import SnapshotTaken

        app.post_message(SnapshotTaken(snapshots(30, num_decode=6), 30.0))
        await driver.pause()
        held = screen_of(app)
        await driver.press("space")
        return before, held, "\n".join(screen_of(app))

    before, held, after = pilot(scenario, snapshots(1), snapshots(2))

    assert "‖ paused" in before[0]
    assert held == before
    assert "6/6" in after


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
def test_q_and_ctrl_c_quit(snapshots, key):
    async def scenario(app, driver):
        await driver.press(key)
        await driver.pause()
        return app._exit

    assert pilot(scenario, snapshots(1))


def test_q_can_be_typed_into_the_filter(snapshots):
    async def scenario(app, driver):
        await driver.press("slash", "q")
        return not app._exit, "\n".join(screen_of(app))

    is_running, everything = pilot(scenario, snapshots(1))

    assert is_running
    assert "filter: q▏" in everything


def test_any_size_is_survived_and_the_layout_comes_back(snapshots):
    async def scenario(app, driver):
        before = screen_of(app)
        for width, height in (
            (20, 5),
            (1, 1),
            (39, 9),
            (60, 20),
            (80, 24),
            (120, 40),
            (160, 48),
            (300, 100),
            (500, 200),
        ):
            await driver.resize_terminal(width, height)
            await driver.pause()
            screen = screen_of(app)
            assert (len(screen), {len(text) for text in screen}) == (height, {width})
        await driver.resize_terminal(80, 24)
        await driver.pause()
        return before, screen_of(app)

    before, after = pilot(scenario, snapshots(1), snapshots(2))

    assert before == after


def test_an_error_of_the_watch_ends_the_app_and_is_kept_for_the_caller(snapshots):
    async def scenario(app, driver):
        return app.failure

    failure = pilot(scenario, snapshots(1), then=ConnectError("every host is gone"))

    assert failure.message == "every host is gone"


def test_only_lines_that_changed_are_drawn_again(snapshots):
    async def scenario(app, driver):
        drawn = []
        app.canvas.refresh = lambda *regions, **_: drawn.append(len(regions))
        app._draw()
        app.canvas.show([*app.canvas._lines[:-1], ()])
        return drawn

    assert pilot(scenario, snapshots(1)) == [1]


def test_no_color_is_followed(snapshots, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")

    async def scenario(app, driver):
        return app.no_color, "\n".join(screen_of(app))

    no_color, everything = pilot(scenario, snapshots(1))

    assert no_color
    assert "ENGINE" in everything
