"""`dynctl doctor skew`: why engines are loaded unevenly, by what running routers decided. IO: ssh, sockets, terminal."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dynctl.cli.options import Output
from dynctl.cli.output import emit, emit_json, table
from dynctl.cli.routers import NothingDecidedError, ask_routers
from dynctl.core.text import clean

if TYPE_CHECKING:
    from dynctl.checks.skew import Diagnosis

_TARGETS = ("/skew",)


def show_skew(inventory: Path, admin_socket: Path | None, output: Output, *, local: bool) -> None:
    """Ask the routers, judge each pool of their engines and show it.

    Raises:
        DynctlError: when no router answers, or none has decided anything yet; exit 3 when some host could not be asked.
        Exit: with 6, when some pool is loaded unevenly.
    """
    from dynctl.errors import ExitCode

    answers = ask_routers(admin_socket, inventory, _TARGETS, local=local)
    found = _judged({router: sums for router, (sums,) in answers.by_router.items()})
    if not any(found.values()):
        answers.raise_failures("answered")
        raise NothingDecidedError
    if output is Output.JSON:
        emit_json({"schema": "dynctl.skew/1", "routers": _plain(found)})
    else:
        for router, pools in found.items():
            for name, diagnosis in pools.items():
                _draw(f"{router}, prefill engines" if name == "prefill" else router, diagnosis)
    answers.raise_failures("answered")
    if any(d.verdict != "even" for pools in found.values() for d in pools.values()):
        raise typer.Exit(int(ExitCode.GATE))


def _judged(answers: Mapping[str, Any]) -> "dict[str, dict[str, Diagnosis]]":
    import msgspec

    from dynctl.checks.skew import diagnose
    from dynctl.errors import DynctlError
    from dynctl.router.skew import SkewSums

    found = {}
    for router, answer in answers.items():
        try:
            sums = msgspec.convert(answer, SkewSums)
        except msgspec.ValidationError as error:
            raise DynctlError(
                f"router {router} is of another version: {error}", "dynctl up brings it to this one"
            ) from error
        found[router] = {name: diagnose(pool) for name, pool in sorted(sums.pools.items())}
    return found


def _plain(found: "Mapping[str, Mapping[str, Diagnosis]]") -> list[dict[str, Any]]:
    return [
        {
            "router": router,
            "pools": [
                {"pool": name}
                | asdict(diagnosis)
                | {"spreads": [asdict(s) | {"is_even": s.is_even} for s in diagnosis.spreads]}
                for name, diagnosis in pools.items()
            ],
        }
        for router, pools in found.items()
    ]


def _draw(title: str, diagnosis: "Diagnosis") -> None:
    emit(
        f"{clean(title)}: {diagnosis.num_decisions} decisions, most by policy {clean(diagnosis.policy)}"
    )
    rows = [
        [spread.name, f"{spread.ratio:.2f}", spread.engine]
        # A queue's length is no sum of chances.
        + (
            ["–", "–"]
            if spread.in_turn is None
            else [f"{spread.chance:.2f}", f"{spread.in_turn:.2f}"]
        )
        for spread in diagnosis.spreads
    ]
    heads = ("MOST", "CHANCE", "IN TURN")
    table(["LOAD", "MOST", "ENGINE", "CHANCE", "IN TURN"], rows, right=heads)
    emit("")
    for number, cause in enumerate(diagnosis.causes, 1):
        is_it = "yes" if cause.holds else "no"
        emit(f"  {number} {cause.name:<15} {is_it:<3}  {clean(cause.evidence, 400)}")
    emit(f"  {diagnosis.verdict}: {clean(diagnosis.step, 600)}")
    if diagnosis.remedy:
        emit(f"    fix: {clean(diagnosis.remedy, 600)}")
    emit("")
