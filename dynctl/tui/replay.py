"""`dynctl top --replay`: the same screens from a recording, with keys to go through it. IO: terminal, the player's clock."""

from collections.abc import Callable
from dataclasses import replace

from textual import events

from dynctl.errors import DynctlError
from dynctl.telemetry.ledger import Ledger
from dynctl.telemetry.look import Look
from dynctl.telemetry.player import Player
from dynctl.tui.catalog import screen_of
from dynctl.tui.dashboard import NUM_EVENTS, Dashboard
from dynctl.tui.messages import Reached
from dynctl.tui.view import View

SECONDS, MINUTES = 10.0, 300.0
"""How far two pairs of keys go."""

_MOVES: dict[str, Callable[[Player], None]] = {
    "space": Player.toggle,
    "comma": lambda player: player.step(-1),
    "full_stop": lambda player: player.step(1),
    "left": lambda player: player.jump(-SECONDS),
    "right": lambda player: player.jump(SECONDS),
    "left_curly_bracket": lambda player: player.jump(-MINUTES),
    "right_curly_bracket": lambda player: player.jump(MINUTES),
    "n": Player.hunt,
    "N": Player.hunt_back,
    "minus": lambda player: player.change_speed(-1),
    "plus": lambda player: player.change_speed(1),
    "equals_sign": lambda player: player.change_speed(1),
}


class ReplayApp(Dashboard):
    """The dashboard of a recording."""

    def __init__(self, player: Player, note: str = "") -> None:
        super().__init__(Ledger().trends)
        self._player = player
        self._latest = replace(self._latest, note=note, playing=player.playing)

    def on_mount(self) -> None:
        """Start playing."""
        super().on_mount()
        self.run_worker(self._play(), name="play")

    async def _play(self) -> None:
        try:
            async for look in self._player.looks():
                self.post_message(Reached(look))
        except DynctlError as error:
            # Told after the terminal is restored, by whoever ran the app.
            self.failure = error
            self.exit()

    def on_reached(self, message: Reached) -> None:
        """Show another place."""
        self._fill(message.look)
        self._draw()

    def _fill(self, look: Look) -> None:
        self._latest = replace(
            self._latest,
            overview=look.overview,
            trends=look.ledger.trends,
            events=look.ledger.events.newest(NUM_EVENTS),
            traces=look.ledger.requests.newest(),
        )
        self._chosen()

    def _took(self, event: events.Key) -> bool:
        # Textual names keys; where case matters, what they type says more.
        move = _MOVES.get(event.character or "") or _MOVES.get(event.key)
        if move is None:
            return False
        move(self._player)
        self._draw()
        return True

    def _chosen(self) -> None:
        asks = screen_of(self._latest.choices).asks(self._latest)
        self._latest = replace(self._latest, answers=self._player.answer(asks))

    def _picture(self) -> View:
        return replace(self._latest, playing=self._player.playing)
