"""The Textual app driven by a pilot: what is on the screen after snapshots, keys and resizes."""

import asyncio
import itertools
from contextlib import asynccontextmanager

import pytest

from dynctl.core.workload import Slo
from dynctl.errors import ConnectError
from dynctl.telemetry.answers import Answers
from dynctl.telemetry.traces import Told
from dynctl.tui.app import TopApp
from dynctl.tui.messages import SnapshotTaken


@pytest.fixture(autouse=True)
def _asking_only_when_told(monkeypatch):
    """A screen asks when it is shown, and again only when a test says so."""
    monkeypatch.setattr("dynctl.tui.app.ASK_PERIOD_S", 3600.0)


def screen_of(app):
    """The text of what the canvas would draw, line by line."""
    height = app.canvas.size.height
    return ["".join(segment.text for segment in app.canvas.render_line(y)) for y in range(height)]


class Watched:
    """Snapshots that arrive at once; then an error, or silence. Answers with what `answers` makes of an ask."""

    def __init__(self, taken, then, answers):
        self.taken, self.then, self.answers = taken, then, answers
        self.asked = []

    async def __aiter__(self):
        for one in self.taken:
            yield one
            await asyncio.sleep(0.01)
        if self.then is not None:
            raise self.then
        await asyncio.Event().wait()

    async def answer(self, asks):
        self.asked.append(asks)
        return self.answers(asks)


def source(*taken, then=None, answers=lambda _: Answers()):
    @asynccontextmanager
    async def open_():
        yield Watched(taken, then, answers)

    return open_


def pilot(scenario, *taken, size=(80, 24), then=None, answers=lambda _: Answers()):
    async def main():
        clock = itertools.count(1.0)
        app = TopApp(
            source(*taken, then=then, answers=answers),
            {"chat": Slo(500.0, 40.0)},
            lambda: next(clock),
        )
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
    assert "move; first, last row" in found["help"]


def test_a_held_picture_stands_still_while_collecting_goes_on(snapshots):
    async def scenario(app, driver):
        await driver.press("space")
        before = screen_of(app)
        for tick in range(3, 30):
            app._ledger.take(snapshots(tick), float(tick))
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
        app.canvas.show([*app.canvas.lines[:-1], ()])
        return drawn

    assert pilot(scenario, snapshots(1)) == [1]


def test_no_color_is_followed(snapshots, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")

    async def scenario(app, driver):
        return app.no_color, "\n".join(screen_of(app))

    no_color, everything = pilot(scenario, snapshots(1))

    assert no_color
    assert "ENGINE" in everything


def pressing(*keys):
    """The screen after each key, and the app's choices at the end."""

    async def scenario(app, driver):
        screens = []
        for key in keys:
            await driver.press(key)
            screens.append("\n".join(screen_of(app)))
        return screens, app._latest.choices

    return scenario


def test_digits_lead_from_screen_to_screen(snapshots):
    screens, _ = pilot(pressing(*"1234567"), snapshots(1), snapshots(2), snapshots(3))

    for screen, expected in zip(
        screens,
        (
            "ENGINE",
            "verdict",
            "GPU use",
            "HIT RATE",
            "in flight",
            "chat-router  on gpu-01",
            "events",
        ),
        strict=True,
    ):
        assert expected in screen


def test_enter_opens_an_engine_and_esc_comes_back_to_its_row(snapshots):
    (_, opened, closed), choices = pilot(
        pressing("j", "enter", "escape"), snapshots(1), snapshots(2)
    )

    assert "chat-decode-0 UP" in opened
    assert "▸chat-decode-0" in closed
    assert choices.place.cursor == 1


async def until_shown(app, driver, wanted):
    """Wait for a text on the screen."""
    for _ in range(3000):
        found = "\n".join(screen_of(app))
        if wanted in found:
            return found
        await driver.pause(0.01)
    raise AssertionError(f"{wanted!r} is not shown in\n{found}")


def test_a_screen_is_asked_for_what_it_needs_and_the_overview_for_nothing(snapshots):
    def answers(asks):
        return Answers(logs={name: (f"INFO line of {name[1]}",) for name in asks.logs})

    async def scenario(app, driver):
        await driver.pause(0.05)
        before = list(app._watched.asked)
        await driver.press("j", "enter")
        shown = await until_shown(app, driver, "INFO line of chat-decode-0")
        return before, app._watched.asked[0], shown

    before, asked, _ = pilot(scenario, snapshots(1), snapshots(2), answers=answers)

    assert before == []
    assert asked.logs == (("gpu-02", "chat-decode-0"),)


def test_a_screen_that_was_shown_before_anything_was_known_is_asked_for_at_the_first_look(
    snapshots,
):
    def answers(asks):
        return Answers(logs={name: (f"INFO line of {name[1]}",) for name in asks.logs})

    async def scenario(app, driver):
        await driver.press("6")
        await driver.pause(0.05)
        before = list(app._watched.asked)
        app.post_message(SnapshotTaken(snapshots(1), 1.0))
        return before, await until_shown(app, driver, "INFO line of chat-router")

    assert pilot(scenario, answers=answers)[0] == []


def test_requests_appear_as_routers_tell_of_them(snapshots):
    told = Told("r", "whole", "chat-decode-0", 1.7e9, shown_id="abcdef12", prompt_tokens=77)

    async def scenario(app, driver):
        await driver.press("5")
        return await until_shown(app, driver, "abcdef12")

    shown = pilot(
        scenario, snapshots(1), snapshots(2), answers=lambda _: Answers(decisions=(told,))
    )

    assert " 77 " in shown


def test_a_held_picture_keeps_answers_but_those_a_new_screen_needs_come(snapshots):
    numbers = itertools.count()

    def answers(asks):
        number = next(numbers)
        return Answers(logs={name: (f"answer {number} of {name[1]}",) for name in asks.logs})

    async def scenario(app, driver):
        await driver.press("6")
        await until_shown(app, driver, "answer 0 of chat-router")
        await driver.press("space")
        app._has_asks.set()
        while app._latest.answers.logs == app._shown.answers.logs:
            await driver.pause(0.01)
        held = "\n".join(screen_of(app))
        await driver.press("greater_than_sign")
        other = await until_shown(app, driver, "of chat-decode-0")
        return held, other

    held, other = pilot(scenario, snapshots(1), snapshots(2), answers=answers)

    assert "answer 0 of chat-router" in held
    assert "‖ paused" in other


def test_while_nobody_looks_it_is_drawn_less_often_and_at_once_when_somebody_does(snapshots):
    async def scenario(app, driver):
        drawn = []
        app.on_app_blur()
        show = app.canvas.show
        app.canvas.show = lambda lines: (drawn.append(1), show(lines))
        for tick in range(3, 13):
            app.post_message(SnapshotTaken(snapshots(tick), float(tick)))
        while app._num_taken < 12:
            await driver.pause(0.01)
        blurred = len(drawn)
        app.on_app_focus()
        return blurred, len(drawn)

    assert pilot(scenario, snapshots(1), snapshots(2)) == (2, 3)


class Recording:
    """What a recorder tells the dashboard."""

    failure = ""


def test_the_title_says_that_it_is_recorded_and_an_event_when_that_ended(snapshots):
    recorder = Recording()

    async def main():
        app = TopApp(source(snapshots(1), snapshots(2)), recorder=recorder)
        async with app.run_test(size=(80, 24)) as driver:
            before = (await until_shown(app, driver, "◉ rec")).splitlines()[0]
            recorder.failure = "No space left on device"
            for tick in (3, 4):
                app.post_message(SnapshotTaken(snapshots(tick), float(tick)))
            return before, await until_shown(app, driver, "✕ rec")

    before, after = asyncio.run(main())

    assert before.startswith("dynctl top  prod  chat  ● live 0s  ◉ rec")
    assert after.count("recording  ended: No space left on device") == 1


def test_a_screen_is_saved_while_watching_and_a_filter_takes_the_letter(
    snapshots, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)

    async def scenario(app, driver):
        await driver.press("slash", "e", "enter")
        typed = list(tmp_path.iterdir())
        await driver.press("e")
        return typed, screen_of(app)[-1].strip()

    typed, note = pilot(scenario, snapshots(1), snapshots(2))

    assert typed == []
    (path,) = tmp_path.iterdir()
    assert note == f"written: {path.name}"
    assert "filter: e" in path.read_text()
