"""What the admin socket answers beyond health and metrics: decisions, their skew, hits, findings, engines, the policy. IO: none of its own."""

import re
import urllib.parse
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from dynctl.core.router_settings import fault_of
from dynctl.core.units import whole
from dynctl.errors import DynctlError
from dynctl.router.api.answers import Failure
from dynctl.router.merging import Shown
from dynctl.router.seen import Seen, see
from dynctl.router.short_flight import ShortFlight
from dynctl.router.skew import SkewSums, add_up

if TYPE_CHECKING:
    from dynctl.router.desk import Desk

_MAX_DECISIONS = 1000
_MAX_SUMMED = 10_000
_POLICY = re.compile(r"[a-z_]{1,40}")


def answer(desk: "Desk", method: str, path: str, query: bytes) -> tuple[int, bytes] | Failure:
    """Answer one request; a failure says why not."""
    desk.afterwards.keep()
    args = urllib.parse.parse_qs(query.decode("ascii", "replace"))
    match (method, path):
        case ("GET", "/decisions"):
            return _decisions(desk, args)
        case ("GET", "/engines" | "/hits" | "/findings" | "/skew"):
            return 200, msgspec.json.encode(_SUMS[path](desk))
        case ("GET", "/policy"):
            return _policy(desk)
        case ("POST", "/policy"):
            return _change_policy(desk, args)
        case ("GET", "/shadow"):
            return _shadow(desk)
        case ("POST", "/shadow"):
            failure = _set_policy(desk, desk.set_shadow, args.get("policy", [""])[0])
            return failure if isinstance(failure, Failure) else _shadow(desk)
        case _:
            return Failure(404, f"no {path} here", "not_found")


async def recalled(desk: "Desk", path: str, query: bytes, shown: Shown) -> Shown:
    """Look on disk for a request that no process remembers."""
    log = desk.decision_log
    if log is None or path != "/decisions" or isinstance(shown, Failure) or shown[1] != b"[]":
        return shown
    wanted = urllib.parse.parse_qs(query.decode("ascii", "replace")).get("request", [""])[0]
    found = await log.find(wanted) if wanted else []
    return 200, msgspec.json.encode([d.to_json() | {"version": version} for d, version in found])


def _skew(desk: "Desk") -> SkewSums:
    _note(desk)
    return add_up(desk.ring.newest(_MAX_SUMMED))


def _hits(desk: "Desk") -> object:
    moved = desk.placement.links.sums(desk.settings.kv_bytes_per_token)
    return desk.hits.to_json() | moved


def _engines(desk: "Desk") -> Seen:
    now_s = desk.now_s()
    unheard = desk.first_events.unheard(now_s) if desk.matches_tokens() else ()
    return see(desk.workers.all(), desk.fleet.silent, unheard, desk.findings(), now_s)


_SUMS: dict[str, Callable[["Desk"], object]] = {
    "/engines": _engines,
    "/hits": _hits,
    "/findings": lambda desk: desk.findings(),
    "/skew": _skew,
}


def _decisions(desk: "Desk", args: dict[str, list[str]]) -> tuple[int, bytes] | Failure:
    limit = whole(args.get("limit", ["100"])[0])
    if limit is None or not 0 < limit <= _MAX_DECISIONS:
        text = f"limit is not between 1 and {_MAX_DECISIONS}"
        return Failure(400, text, "invalid_request", "limit")
    _note(desk)
    return 200, desk.ring.to_json(limit, args.get("request", [None])[0])


def _note(desk: "Desk") -> None:
    """Let requests write their decisions down that have not yet."""
    for flight in desk.flights:
        if isinstance(flight, ShortFlight):
            flight.note()


def _shadow(desk: "Desk") -> tuple[int, bytes]:
    shadow = desk.placement.shadow
    return 200, msgspec.json.encode(None if shadow is None else shadow.to_json())


def _change_policy(desk: "Desk", args: dict[str, list[str]]) -> tuple[int, bytes] | Failure:
    """Change the policy, how long it holds on to caches, or both; what is wrong changes neither."""
    [given] = args.get("stickiness", [""])[:1]
    if given:
        try:
            stickiness = float(given)
            fault = fault_of("stickiness", stickiness)
        except ValueError:
            fault = "that is no number"
        if fault:
            return Failure(400, fault, "invalid_request", "stickiness")
    if "name" in args or not given:
        changed = _set_policy(desk, desk.set_policy, args.get("name", [""])[0])
        if isinstance(changed, Failure):
            return changed
    if given:
        desk.set_stickiness(stickiness)
    return _policy(desk)


def _set_policy(desk: "Desk", use: Callable[[str], None], name: str) -> tuple[int, bytes] | Failure:
    if not _POLICY.fullmatch(name) and not (name == "" and use == desk.set_shadow):
        return Failure(400, "that is no policy's name", "invalid_request", "name")
    try:
        use(name)
    except DynctlError as error:
        return Failure(400, error.message, "invalid_request", "name")
    return _policy(desk)


def _policy(desk: "Desk") -> tuple[int, bytes]:
    return 200, msgspec.json.encode(
        {"policy": desk.policy_name, "stickiness": desk.placement.stickiness}
    )
