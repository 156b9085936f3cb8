"""The dashboard of a recording, driven by a pilot: the same screens as live, and keys that go through time."""

import asyncio
import base64

import pytest

from dynctl.core.workload import Slo
from dynctl.errors import UsageError
from dynctl.telemetry.answers import Answers
from dynctl.telemetry.ledger import Ledger
from dynctl.telemetry.player import Player
from dynctl.telemetry.recorder import Recorder
from dynctl.telemetry.tape import Tape
from dynctl.telemetry.traces import Told
from dynctl.tui.catalog import SCREENS
from dynctl.tui.draw import plain
from dynctl.tui.frame import compose
from dynctl.tui.replay import ReplayApp
from dynctl.tui.view import Choices, View

GOALS = {"chat": Slo(500.0, 40.0)}
NUM = 40
ASKING = {"kv", "requests", "logs"}
"""Screens of what is asked beyond snapshots."""


@pytest.fixture
def path(tmp_path, snapshots):
    """A recording of forty seconds, with a request every second."""
    now = [0.0]
    with Recorder(tmp_path / "r.jsonl.gz", 2**30, "prod", GOALS, lambda: now[0]) as recorder:
        for tick in range(1, NUM + 1):
            recorder.take(snapshots(tick))
            told = Told(
                f"id{tick}",
                "whole",
                "chat-decode-0",
                1.7e9 + tick,
                shown_id=f"id{tick}",
                prompt_tokens=77,
            )
            hits = {
                "chat-router": {
                    "requests": float(tick),
                    "prompt_tokens": 100.0,
                    "predicted_tokens": 42.0,
                }
            }
            recorder.take_answers(Answers((told,), hits))
            now[0] += 1.0
    return tmp_path / "r.jsonl.gz"  # fmt: skip


def screen_of(app):
    height = app.canvas.size.height
    return ["".join(segment.text for segment in app.canvas.render_line(y)) for y in range(height)]


async def shown(app, driver, wanted):
    """Wait for a text on the screen."""
    for _ in range(3000):
        found = screen_of(app)
        if wanted in "\n".join(found):
            return found
        await driver.pause(0.01)
    raise AssertionError(f"{wanted!r} is not shown in\n" + "\n".join(found))


def pilot(path, scenario, at_s=None, size=(80, 24), hold=True, note=""):
    async def main():
        with Tape(path) as tape:
            player = Player(tape, at_s)
            if hold:
                player.toggle()
            app = ReplayApp(player, note)
            async with app.run_test(size=size) as driver:
                await shown(app, driver, "req/s")
                found = await scenario(app, driver)
            return found, app

    return asyncio.run(main())


@pytest.mark.parametrize(
    "screen", [s for s in SCREENS if s.name not in ASKING], ids=lambda s: s.name
)
@pytest.mark.parametrize("size", [(80, 24), (200, 60)])
def test_every_screen_is_the_same_as_live_but_for_the_title(path, snapshots, size, screen):
    async def scenario(app, driver):
        await shown(app, driver, "0:00:19/0:00:39")
        await driver.press(str(SCREENS.index(screen) + 1))
        return screen_of(app)

    found, _ = pilot(path, scenario, at_s=19.0, size=size)
    ledger = Ledger(GOALS)
    for tick in range(1, 21):
        overview = ledger.take(snapshots(tick), float(tick))
    view = View(
        overview, ledger.trends, ledger.events.newest(200), Choices(screen=screen.name), width=size[0],
        room=size[1] - 3,
    )  # fmt: skip
    assert found[1:] == [plain(line) for line in compose(view, *size)][1:]


def test_kv_and_requests_show_what_routers_answered_then(path):
    async def scenario(app, driver):
        await shown(app, driver, "0:00:19/0:00:39")
        await driver.press("4")
        kv = await shown(app, driver, "42%")
        await driver.press("5")
        return "\n".join(kv), "\n".join(await shown(app, driver, "id19"))

    (kv, requests), _ = pilot(path, scenario, at_s=19.0)

    assert "of 19 requests" in kv
    assert " id20 " not in requests
    assert " 77 " in requests


def test_logs_and_commands_are_said_to_be_missing(path):
    async def scenario(app, driver):
        await driver.press("6")
        return await shown(app, driver, "not in a recording: it may hold prompts or keys")

    pilot(path, scenario)


def test_keys_go_through_time_and_the_title_says_where(path):
    async def scenario(app, driver):
        tops = []
        for key, wanted in (
            ("full_stop", "0:00:21/0:00:39"),
            ("comma", "0:00:20/0:00:39"),
            ("left", "0:00:10/0:00:39"),
            ("right", "0:00:20/0:00:39"),
            ("right_curly_bracket", "0:00:39/0:00:39"),
            ("left_curly_bracket", "0:00:00/0:00:39"),
        ):
            await driver.press(key)
            tops.append((await shown(app, driver, wanted))[0])
        return tops

    tops, _ = pilot(path, scenario, at_s=20.0)

    assert "‖ held" in tops[0]
    assert "■ end" in tops[4]
    assert all(len(top) == 80 for top in tops)


def test_it_plays_by_itself_faster_when_told(path):
    async def scenario(app, driver):
        await driver.press(*["plus"] * 4)
        assert "▶ ×16" in screen_of(app)[0]
        await driver.press("minus")
        assert "▶ ×8" in screen_of(app)[0]
        await driver.press("space")
        held = screen_of(app)[0]
        await driver.press("space", *["plus"] * 9)
        return held, (await shown(app, driver, "■ end"))[0]

    (held, end), _ = pilot(path, scenario, hold=False)

    assert "‖ held" in held
    assert "0:00:39/0:00:39" in end


def test_choices_stay_while_time_moves(path):
    async def scenario(app, driver):
        await driver.press("slash", *"decode", "enter", "j")
        await driver.press("right")
        return "\n".join(await shown(app, driver, "0:00:30/0:00:39"))

    found, _ = pilot(path, scenario, at_s=20.0)

    assert "filter: decode" in found
    assert "▸chat-decode-1" in found
    assert "chat-prefill-0" not in found


def test_help_has_the_keys_of_a_replay(path):
    async def scenario(app, driver):
        await driver.press("question_mark")
        return "\n".join(await shown(app, driver, "play, hold"))

    found, _ = pilot(path, scenario)

    assert "hold the picture" not in found
    for told in ("10 s, 5 min back, on", "slower, faster", "save the screen", "quit"):
        assert told in found


def test_damage_found_on_the_way_ends_it_with_the_line(tmp_path, snapshots):
    path = tmp_path / "r.jsonl"
    now = [0.0]
    with Recorder(path, 2**30, "prod", GOALS, lambda: now[0]) as recorder:
        for tick in range(1, 6):
            recorder.take(snapshots(tick))
            now[0] += 1.0
    lines = path.read_bytes().splitlines(keepends=True)
    lines[3] = lines[3].replace(b'"host_name":"gpu-01"', b'"host_name":[]')
    path.write_bytes(b"".join(lines))

    async def scenario(app, driver):
        await driver.press("right")
        while app.failure is None:
            await driver.pause(0.01)

    _, app = pilot(path, scenario)

    assert isinstance(app.failure, UsageError)
    assert f"{path}:4: " in app.failure.message


def test_what_is_wrong_with_the_end_is_said_below_until_a_key_is_pressed(path):
    async def scenario(app, driver):
        before = (await shown(app, driver, "was not ended"))[-1]
        await driver.press("j")
        return before, screen_of(app)[-1]

    (before, after), _ = pilot(path, scenario, note="it was not ended properly")

    assert "it was not ended properly" in before
    assert "1 overview" in after


def test_screens_are_saved_and_copied_and_it_is_said(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    copied = []

    async def scenario(app, driver):
        monkeypatch.setattr(app, "copy_to_clipboard", copied.append)
        notes = []
        await shown(app, driver, "0:00:20/0:00:39")
        for key in ("e", "S", "y", "Y"):
            before = screen_of(app)
            await driver.press(key)
            notes.append(screen_of(app)[-1].strip())
        await driver.press("4", "y")
        return before, [*notes, screen_of(app)[-1].strip()]

    (before, notes), _ = pilot(path, scenario, at_s=20.0)
    text, picture = (next(tmp_path.glob(f"dynctl-top-overview-*{end}")) for end in (".txt", ".svg"))

    assert notes == [
        f"written: {text.name}", f"written: {picture.name}", "row sent to the terminal's clipboard",
        "screen sent to the terminal's clipboard", "no row here; Y copies the screen",
    ]  # fmt: skip
    assert text.read_text().splitlines()[:-1] == [line.rstrip() for line in before[:-1]]
    assert picture.read_text().startswith("<svg")
    assert copied[0].startswith("chat-prefill-0")
    assert copied[1].startswith("dynctl top  prod")


def test_a_directory_that_cannot_be_written_is_said(path, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("dynctl.tui.dashboard.save", refuse)

    async def scenario(app, driver):
        await driver.press("e")
        return screen_of(app)[-1].strip()

    assert pilot(path, scenario)[0] == "not written: Permission denied"


def test_the_clipboard_gets_it_by_the_terminals_own_sequence(path):
    async def scenario(app, driver):
        written = []
        app._driver.write = written.append
        await driver.press("y")
        return "".join(written)

    found, _ = pilot(path, scenario)
    _, _, rest = found.partition("\x1b]52;c;")
    assert base64.b64decode(rest.partition("\a")[0]).startswith(b"chat-prefill-0")


def test_n_goes_to_the_next_event_and_its_capital_back(tmp_path, snapshots):
    now, path = [0.0], tmp_path / "r.jsonl"
    with Recorder(path, 2**30, "prod", GOALS, lambda: now[0]) as recorder:
        for tick in range(1, 31):
            recorder.take(snapshots(tick, stale_s=9.0 if 12 <= tick < 20 else 0.0))
            now[0] += 1.0

    async def scenario(app, driver):
        screens = []
        for key, wanted in (("n", "0:00:11"), ("n", "0:00:19"), ("N", "0:00:11"), ("n", "0:00:19")):
            await driver.press(key)
            screens.append("\n".join(await shown(app, driver, f"‖ held {wanted}/0:00:29")))
        return screens

    (first, second, back, _), _ = pilot(path, scenario)

    assert "gpu-02  no answer within 5 s" in first
    assert "gpu-02  answers again" in second
    assert "answers again" not in back
