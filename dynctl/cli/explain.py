"""`dynctl explain`: why a request went where it went, and where the hits of all requests went. IO: ssh, sockets, files, terminal."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from dynctl.cli.options import (
    DEFAULT_INVENTORY,
    AdminSocket,
    InventoryPath,
    Local,
    Output,
    OutputOption,
)
from dynctl.cli.output import emit, emit_json, say, table
from dynctl.cli.routers import NothingDecidedError, ask_routers
from dynctl.cli.session import is_named
from dynctl.core.text import clean
from dynctl.files import reason

_LAST = "last"
_HITS = "hits"
_LOG_HINT = (
    "--from takes the directory that a router was given as --decision-log, or one of its files"
)
_LEFT_OUT = {
    "full": "runs as many requests as it takes",
    "kv_memory": "has no room for it in its KV memory beside what runs there",
    "failing": "failed several times in a row",
    "busy": "asked for a pause",
    "starts_slowly": "has just joined and had its share",
    "failed_before": "failed this request before",
    "other_kv": "has KV of another kind than who would hand over to it or take it (model, version, flags)",
}
_PATHS = {
    "other_kv": "other_kv: prefill and decode engine differ in what a block of KV is (model, revision, version, flags)"
}
_SESSIONS = {
    "followed": "followed: its last request went to this engine, and no engine holds more of this prompt than another",
    "new": "not seen lately: this is the engine it goes on at",
    "busy": "left its engine, which is clearly busier than the others: the policy chose",
    "away": "left its engine, which is gone, full, started anew or failed this request: the policy chose",
    "cache": "left to the policy: engines hold different amounts of this prompt, which says more",
}
_LINKS = {
    "nvlink": "NVLink",
    "host": "PCIe or memory of one host",
    "rdma": "RDMA",
    "tcp": "TCP",
    "unknown": "a link that is not known here",
}
_PRICES = {
    "learned": "learned from transfers",
    "measured": "as linktest measured",
    "nominal": "by its devices' nominal rate",
    "assumed": "assumed: neither measured nor learned yet",
}
_HIT_TARGETS = ("/policy", "/hits", "/findings", "/shadow")


FromOption = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="PATH",
        help="A decision log's directory, or one of its files, instead of asking routers.",
    ),
]


def command(
    request: Annotated[
        str,
        typer.Argument(
            help="The X-Request-Id the client read; `last`: the newest request; `hits`: all of them together."
        ),
    ] = _LAST,
    inventory: InventoryPath = DEFAULT_INVENTORY,
    local: Local = False,
    admin_socket: AdminSocket = None,
    recorded: FromOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Say why a request went where it went: every candidate, what was expected and what came of it.

    Routers remember their last 10,000 decisions, and look further back in their decision log (--from reads one here, and
    asks nobody). Each is computed again from what was recorded of it and must give the same engine. Exit 1 when no router
    knows the request, 3 when some hosts could not be asked.

    With `hits`: the hit rate as routers predicted it, as engines report it and as routers' own questions find it; the
    best that was possible and what the rest was lost to; and which precondition does not hold on which engine.

    Example: dynctl explain 3f9c1a52e7d000000012
    """
    from dynctl.errors import DynctlError, UsageError

    if not request:
        raise UsageError("an empty id is no request's", "leave it out for the newest request")
    if recorded is not None:
        if request == _HITS:
            raise UsageError("a decision log holds no hit rates", "ask routers for them")
        if local or admin_socket is not None or is_named():
            raise UsageError(
                "--from reads a decision log and asks no router",
                "leave out --inventory, --local and --admin-socket, or --from",
            )
        _show_all(_read(recorded, request), output)
        return
    targets = _HIT_TARGETS if request == _HITS else (_target(request),)
    answers = ask_routers(admin_socket, inventory, targets, local=local)
    if request == _HITS:
        _show_hits(answers.by_router, output)
        answers.raise_failures("answered")
        return
    decisions = _of_one_request([d for (found,) in answers.by_router.values() for d in found])
    if not decisions:
        if any(answers.by_host.values()) and request != _LAST:
            say(f"no router that answers remembers request {clean(request)}")
        answers.raise_failures("answered")
        if request == _LAST:
            raise NothingDecidedError
        raise DynctlError(
            f"no router remembers request {clean(request)}",
            "ids are in the answer's X-Request-Id; the last 10,000 decisions are kept, and what the decision log holds",
        )
    _show_all(decisions, output)
    answers.raise_failures("answered")


def _read(path: Path, request: str) -> list[dict[str, Any]]:
    """The decisions of one request in a file or directory of a decision log, made again here.

    Raises:
        UsageError: when it cannot be read, or is something else.
        DynctlError: when it does not hold the request.
    """
    from dynctl.errors import DynctlError, UsageError
    from dynctl.router.decision_files import paths_in
    from dynctl.router.recorded import RecordError, from_line

    try:
        files = paths_in(path) if path.is_dir() else [path]
        lines = [line for file in files for line in file.read_bytes().splitlines() if line]
    except OSError as error:
        raise UsageError(f"cannot read {path}: {reason(error)}", _LOG_HINT) from error
    found, num_bad, fault = [], 0, ""
    for line in lines:
        try:
            decision, version = from_line(line)
        except RecordError as error:
            num_bad, fault = num_bad + 1, error.message
            continue
        if request in {_LAST, decision.request_id, decision.shown_id}:
            found.append((decision, version))
    if num_bad and num_bad == len(lines):
        raise UsageError(f"{path} is no decision log: {clean(fault)}", _LOG_HINT)
    if num_bad:
        say(f"{num_bad} of {len(lines)} lines of {path} cannot be read: {clean(fault)}")
    if not found:
        of = "" if request == _LAST else f" of request {clean(request)}"
        raise DynctlError(f"{path} holds no decision{of}", _LOG_HINT)
    newest, _ = max(found, key=lambda one: one[0].unix_s)
    mine = [(d, version) for d, version in found if d.request_id == newest.request_id]
    return _in_order([decision.to_json() | {"version": version} for decision, version in mine])


def _show_all(decisions: list[dict[str, Any]], output: Output) -> None:
    if output is Output.JSON:
        emit_json({"schema": "dynctl.explain/1", "decisions": decisions})
        return
    for decision in decisions:
        _show(_cleaned(decision))


def _cleaned(value: Any) -> Any:  # noqa: ANN401 - a router's JSON
    """Take out of all texts what a terminal would obey."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {name: _cleaned(one) for name, one in value.items()}
    return [_cleaned(one) for one in value] if isinstance(value, list) else value


def _target(request: str) -> str:
    from urllib.parse import quote

    return (
        "/decisions?limit=8"
        if request == _LAST
        else f"/decisions?limit=100&request={quote(request, safe='')}"
    )


def _show_hits(answers: Mapping[str, Sequence[Any]], output: Output) -> None:
    names = [target.removeprefix("/") for target in _HIT_TARGETS]
    routers = [
        {"router": router} | dict(zip(names, found, strict=True)) | found[0]
        for router, found in answers.items()
    ]
    if output is Output.JSON:
        emit_json({"schema": "dynctl.hits/1", "routers": routers})
        return
    for told in routers:
        hits = told["hits"]
        emit(f"{told['router']}: {hits['requests']} requests, {hits['prompt_tokens']} tokens")
        emit(
            f"  hit rate   {_share(hits['predicted_ratio'])} predicted, {_share(hits['reported_ratio'])} reported by "
            f"engines, {_share(hits['probe_ratio'])} of own questions asked again"
        )
        emit(
            f"  possible   {_share(hits['bound_present_ratio'])} of what caches hold, "
            f"{_share(hits['bound_unlimited_ratio'])} if they forgot nothing"
        )
        emit(
            f"  lost       {_share(hits['lost_routing_ratio'])} to routing, "
            f"{_share(hits['lost_eviction_ratio'])} to eviction, {_share(hits['lost_cold_ratio'])} never seen before"
        )
        if moved := _moved(hits):
            emit(f"  KV moved   {moved}")
        if not _looks_at_caches(told["policy"]):
            emit(
                f"  policy     {told['policy']} does not look at caches, so requests placed by it are not counted here"
            )
        for finding in told["findings"]:
            subject = clean(finding["engine"]) or "this router"
            emit(f"  {subject}: {clean(finding['text'])} ({finding['cause']})")
            emit(f"    fix: {clean(finding['hint'])}")
        if told["shadow"]:
            _show_shadow(told["shadow"])


def _moved(hits: Mapping[str, Any]) -> str:
    """How much KV went from prefill to decode engines, over what; empty where nothing did."""
    from dynctl.core.units import format_bytes

    parts = []
    for link, name in _LINKS.items():
        if tokens := hits.get(f"moved_{link}_tokens"):
            num_bytes = hits.get(f"moved_{link}_bytes")
            size = (
                _tokens(tokens)
                if num_bytes is None
                else f"{format_bytes(num_bytes)} ({_tokens(tokens)})"
            )
            parts.append(f"{size} over {name}")
    return ", ".join(parts)


def _looks_at_caches(policy: str) -> bool:
    from dynctl import registry

    package = "dynctl.router.policies"
    # A router of another version may have one that is not known here.
    return policy not in registry.names(package) or bool(
        registry.load(package, policy, "POLICY").uses_index
    )


def _show_shadow(told: Mapping[str, Any]) -> None:
    real, other, gain = told["real"], told["shadow"], told["gain"]
    sure = ""
    if gain["band"] is not None:
        sure = f" ({gain['hit_ratio'] * 100:+.1f} ± {gain['band'] * 100:.1f} points)"
    emit(
        f"  instead    {other['policy']} for {real['policy']}: hits {_share(other['hit_ratio'])} for "
        f"{_share(real['hit_ratio'])}{sure}, TTFT {_ms(other['ttft_ms'])} for {_ms(real['ttft_ms'])} by the same model, "
        f"over {told['num_decisions']} decisions"
    )


def _share(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio * 100:.1f} %"


def _of_one_request(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keep the newest request's decisions, in the order they were made."""
    if not found:
        return []
    newest = max(found, key=lambda decision: float(decision["unix_s"]))["request_id"]
    mine = [decision for decision in found if decision["request_id"] == newest]
    return _in_order(mine)


def _in_order(decisions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By time; of those made at once prefill comes first."""
    return sorted(decisions, key=lambda one: (float(one["unix_s"]), one["leg"] == "decode"))


def _show(decision: dict[str, Any]) -> None:
    leg = {"whole": "prefill and decode", "prefill": "prefill", "decode": "decode"}
    emit(
        f"{decision['shown_id']}: {leg.get(decision['leg'], decision['leg'])} on "
        f"{decision['engine']}, policy {_policy(decision)}, {decision['outcome'] or 'running'}"
    )
    emit(f"  route key  {clean(decision['route_key'])}")
    emit(f"  prompt     {decision['prompt_tokens']} tokens{_counted(decision)}{_guessed(decision)}")
    emit(f"  cached     {_tokens(decision['overlap_tokens'])} expected, {_realised(decision)}")
    terms = decision["predicted"].items()
    parts = " + ".join(f"{name.removesuffix('_ms')} {_ms(value)}" for name, value in terms)
    emit(f"  TTFT       {_ms(sum(decision['predicted'].values()))} expected ({parts})")
    emit(
        f"             {_ms(decision['ttft_ms'])} measured, after waiting {_ms(decision['waited_ms'])}"
    )
    if decision.get("session"):
        emit(f"  session    {_SESSIONS.get(decision['session'], decision['session'])}")
    if decision["path"]:
        emit(f"  KV         {_path(decision)}")
    other = decision["counterfactual"]
    if other:
        emit(
            f"  otherwise  {other['engine']}: {_tokens(other['overlap_tokens'])} cached, "
            f"TTFT {_ms(other['predicted_ttft_ms'])} expected"
        )
    if decision.get("left_out"):
        reasons = [f"{clean(e)} {_LEFT_OUT.get(r, r)}" for e, r in decision["left_out"].items()]
        emit(f"  left out   {', '.join(reasons)}")
    is_same = "the same engine" if decision["is_reproduced"] else "ANOTHER ENGINE"
    emit(f"  again      the recorded inputs give {is_same}{_by_other(decision)}")
    _draw(decision)


def _by_other(decision: dict[str, Any]) -> str:
    """Who recorded it, where that was another version: its policies may have weighed otherwise."""
    from dynctl import __version__

    version = decision.get("version", __version__)
    return (
        "" if version == __version__ else f" (recorded by {version}, made again by {__version__})"
    )


def _draw(decision: dict[str, Any]) -> None:
    candidates = decision["candidates"]
    names = [name for name in candidates[0] if name != "engine"]
    rows = [
        ["→" if c["engine"] == decision["engine"] else "", c["engine"]]
        + [f"{c[name]:g}" for name in names]
        for c in candidates
    ]
    heads = [name.upper() for name in names]
    table(["", "ENGINE", *heads], rows, right=heads)
    emit("")


def _policy(decision: dict[str, Any]) -> str:
    failed = " (it failed; the least loaded engine was taken)" if decision["is_fallback"] else ""
    return f"{decision['policy']}{failed}"


def _counted(decision: dict[str, Any]) -> str:
    """How many the engine counted, where that differs: a guess from the text, or an engine with another tokenizer."""
    counted = decision["counted_tokens"]
    return (
        f", {counted} by the engine's count"
        if counted not in {0, decision["prompt_tokens"]}
        else ""
    )


def _guessed(decision: dict[str, Any]) -> str:
    return "" if decision["is_tokenized"] else " (guessed from the text; routed by load)"


def _realised(decision: dict[str, Any]) -> str:
    cached = decision["cached_tokens"]
    return "not reported by the engine" if cached is None else f"{cached} by the engine's count"


def _path(decision: dict[str, Any]) -> str:
    costs, moved = decision["costs"], _to_move(decision)
    if costs is None:
        return f"{_PATHS.get(decision['path'], decision['path'])}{moved}"
    both = f"copy {_ms(costs['copy_ms'])}, recompute {_ms(costs['recompute_ms'])}"
    basis = decision.get("link_price")
    price = f"; the link's price is {_PRICES.get(basis, basis)}" if basis else ""
    return f"{decision['path']} ({both}{price}){moved}"


def _to_move(decision: dict[str, Any]) -> str:
    """What is to be copied, and over what; nothing where a router of another version does not say."""
    from dynctl.core.units import format_bytes

    if not decision.get("link"):
        return ""
    size = f", {format_bytes(decision['move_bytes'])}," if decision["move_bytes"] else ""
    return f", {_tokens(decision['move_tokens'])}{size} over {_LINKS.get(decision['link'], decision['link'])}"


def _tokens(number: int) -> str:
    return f"{number} tokens"


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} ms"
