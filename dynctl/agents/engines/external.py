"""A server that runs already and speaks OpenAI's API: adopted, watched, never started or stopped.

Extra flags say where its KV events are: `kv-events`, `kv-replay` (ZMQ endpoints) and `topic`.
Pure.
"""

from urllib.parse import urlsplit

from dynctl.agents.launch import Capabilities, Endpoints, Launch, Places
from dynctl.agents.protocol import EngineWish
from dynctl.kv.ranks import can_count

_FLAGS = frozenset({"kv-events", "kv-replay", "topic"})


class ExternalEngine:
    """Adopts a running server by its URL."""

    capabilities = Capabilities(is_process=False, start_deadline_s=60.0, reports_running=False)

    def problems(self, wish: EngineWish) -> tuple[str, ...]:
        """Name what can never work."""
        found = [
            f"engine flag {name!r} means nothing for an external engine"
            for name, _ in wish.args
            if name not in _FLAGS
        ]
        parts = urlsplit(wish.url)
        if parts.scheme != "http" or not parts.hostname:
            found.append(f"engine url {wish.url!r} must look like http://HOST:PORT")
        elif parts.path not in ("", "/") or parts.query or parts.username:
            found.append(f"engine url {wish.url!r} must end after the port")
        found += [
            f"engine flag {name}: {value!r} has no place for each of {wish.dp} ranks; write tcp://HOST:PORT"
            for name, value in wish.args
            if name in ("kv-events", "kv-replay") and not can_count(value, wish.dp)
        ]
        return tuple(found)

    def launch(self, wish: EngineWish, places: Places) -> Launch:  # noqa: ARG002 - the seam's signature
        """Say where it answers; there is nothing to start."""
        args = dict(wish.args)
        at = Endpoints(
            url=wish.url.rstrip("/"),
            kv_events=args.get("kv-events"),
            kv_replay=args.get("kv-replay"),
            topic=args.get("topic", ""),
        )
        return Launch(argv=(), at=at)


ENGINE = ExternalEngine()
