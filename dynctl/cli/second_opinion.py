"""Asks another predictor about a plan, in a process of its own environment. IO: subprocess, temporary files, terminal.

Not here: what is asked and how answers compare (`planner.opinion`).
"""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynctl.cli.output import emit, table
from dynctl.core.plan import Plan
from dynctl.core.text import clean
from dynctl.core.units import format_number
from dynctl.errors import DynctlError, UsageError
from dynctl.files import reason

if TYPE_CHECKING:
    from dynctl.planner.opinion import Asked, Opinion
    from dynctl.planner.whatif import Case

CHILD = Path(__file__).with_name("aiconfigurator_child.py")
_INSTALL = "python3 -m venv DIR && DIR/bin/pip install aiconfigurator==0.12.0, then --predictor-python DIR/bin/python"
_MAX_ANSWER_BYTES = 4 * 1024**2


class Predictor(StrEnum):
    """Who else may be asked."""

    AICONFIGURATOR = "aiconfigurator"


def find_python(given: Path | None) -> Path:
    """The other environment's interpreter.

    Raises:
        UsageError: when it is not named, or cannot be run.
    """
    if given is None:
        raise UsageError("--predictor needs an environment with aiconfigurator", _INSTALL)
    path = given.expanduser()
    if path.is_dir():
        path = path / "bin" / "python"
    if not path.is_file() or not os.access(path, os.X_OK):
        raise UsageError(f"--predictor-python {path} is no program that can be run", _INSTALL)
    return path.absolute()


def ask(plan: Plan, case: "Case", python: Path, limit_s: float) -> "list[Opinion]":
    """Ask about every deployment of a plan.

    Raises:
        DynctlError: when the other environment cannot answer at all: missing, failing, too slow, or talking rubbish.
    """
    from dynctl.planner.opinion import compare, questions

    asked = questions(plan, case.topology, case.inventory, case.models, case.calibration)
    if not asked.questions:
        return compare(asked, Predictor.AICONFIGURATOR.value, {})
    with tempfile.TemporaryDirectory(prefix="dynctl-opinion-") as directory:
        said = _run(python, _document(asked, case.configs, Path(directory)), limit_s)
    answers = said.get("answers")
    if not isinstance(answers, dict):
        raise _rubbish(json.dumps(said))
    known = {str(k): v for k, v in answers.items() if isinstance(v, dict)}
    return compare(asked, clean(str(said.get("predictor", "aiconfigurator")), 60), known)


def _document(asked: "Asked", configs: Mapping[str, bytes], directory: Path) -> bytes:
    """The questions, each with a directory that holds its model's config.json."""
    found = []
    for question in asked.questions:
        place = directory / question.deployment
        place.mkdir(exist_ok=True)
        (place / "config.json").write_bytes(configs.get(question.deployment, b"{}"))
        found.append({"id": question.id, "call": {"model_path": str(place), **question.call}})
    return json.dumps({"questions": found}).encode()


def _run(python: Path, document: bytes, limit_s: float) -> dict[str, Any]:
    """Run the child; everything it started goes with it when it is too slow."""
    try:
        child = subprocess.Popen(
            [str(python), "-I", str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise DynctlError(f"{python} cannot be run: {reason(error)}", _INSTALL) from error
    with child:
        try:
            out, noise = child.communicate(document, timeout=limit_s)
        except subprocess.TimeoutExpired as error:
            _kill(child)
            raise DynctlError(
                f"aiconfigurator gave no answer within {limit_s:g} s",
                "raise --predictor-timeout, or plan without --predictor; the plan itself stands",
            ) from error
        except BaseException:
            _kill(child)
            raise
    return _read(child.returncode, out, noise)


def _kill(child: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _read(code: int, out: bytes, noise: bytes) -> dict[str, Any]:
    last = _last_line(noise)
    if code != 0:
        how = f"signal {-code}" if code < 0 else f"exit {code}"
        raise DynctlError(
            f"aiconfigurator failed ({how}){f': {last}' if last else ''}",
            "run it there by hand to see more; the plan itself stands",
        )
    try:
        said = json.loads(out[:_MAX_ANSWER_BYTES])
    except (ValueError, RecursionError):
        raise _rubbish(out[:200].decode(errors="replace")) from None
    if not isinstance(said, dict):
        raise _rubbish(out[:200].decode(errors="replace"))
    if "fatal" in said:
        raise DynctlError(
            f"aiconfigurator cannot be used there: {clean(str(said['fatal']), 300)}", _INSTALL
        )
    return said


def _rubbish(text: str) -> DynctlError:
    return DynctlError(
        f"aiconfigurator's environment answered with something else than asked: {clean(text, 120)!r}",
        "is --predictor-python the interpreter itself? the plan itself stands",
    )


def _last_line(noise: bytes) -> str:
    lines = [line for line in noise.decode(errors="replace").splitlines() if line.strip()]
    return clean(lines[-1], 300) if lines else ""


def draw(opinions: "Sequence[Opinion]") -> None:
    """Print both predictors' figures beside each other."""
    for opinion in opinions:
        if opinion.error:
            emit(f"second opinion on {opinion.deployment}: none, {clean(opinion.error, 300)}")
            continue
        emit(
            f"second opinion on {opinion.deployment}  {clean(opinion.layout, 100)}, {opinion.users} users in a closed loop: "
            f"{opinion.predictor}, tables of {clean(opinion.engine, 40)}"
        )
        names = {"ttft_ms": "TTFT ms", "tpot_ms": "TPOT ms", "out_tok_s_per_gpu": "tok/s per GPU"}
        rows = [
            [
                names[each.figure],
                format_number(each.ours.expected),
                f"{format_number(each.ours.low)} to {format_number(each.ours.high)}",
                format_number(each.theirs),
                f"{each.gap:+.0%}",
                "inside our band" if each.is_inside else "outside our band",
            ]
            for each in opinion.compared
        ]
        table(
            ["FIGURE", "OURS", "BAND", "THEIRS", "GAP", ""],
            rows,
            right=["OURS", "BAND", "THEIRS", "GAP"],
        )
    if opinions:
        emit("")
