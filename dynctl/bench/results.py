"""What is stored: a run's `result.json` (the report) and `requests.jsonl` (a line per request); of several runs a summary.

A summary (`trial.json`, `repeat.json`, `sweep.json`) lies above the directories of its runs. Not here: what they mean.

IO: files.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from dynctl.bench.changes import Run
from dynctl.bench.compare import Stored
from dynctl.bench.record import Record
from dynctl.bench.repeat import SCHEMA as REPEAT_SCHEMA
from dynctl.bench.repeat import Repeat
from dynctl.bench.report import SCHEMA, Report
from dynctl.bench.sweep import SCHEMA as SWEEP_SCHEMA
from dynctl.bench.sweep import Sweep
from dynctl.bench.trial import SCHEMA as TRIAL_SCHEMA
from dynctl.bench.trial import Trial
from dynctl.errors import DynctlError, UsageError
from dynctl.files import reason, write_atomic
from dynctl.store import save

RESULT = "result.json"
REQUESTS = "requests.jsonl"
TRIAL = "trial.json"
REPEAT = "repeat.json"
SWEEP = "sweep.json"
SUMMARIES: dict[str, tuple[type[Trial | Repeat | Sweep], str]] = {
    TRIAL: (Trial, TRIAL_SCHEMA),
    REPEAT: (Repeat, REPEAT_SCHEMA),
    SWEEP: (Sweep, SWEEP_SCHEMA),
}
"""File to what it holds."""
T = TypeVar("T")
_IS_A_RESULT = "give a directory that dynctl bench run --out wrote"


class _Head(msgspec.Struct):
    schema: str = ""


def write(directory: Path, report: Report, records: Sequence[Record]) -> None:
    """Write both files of a run.

    Raises:
        DynctlError: naming the directory, when it cannot be written.
    """
    try:
        save(directory / RESULT, report)
        lines = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
        write_atomic(directory / REQUESTS, lines)
    except OSError as error:
        raise DynctlError(f"cannot write to {directory}: {reason(error)}") from error
    forget(directory)


def write_summary(directory: Path, summary: Trial | Repeat | Sweep) -> Path:
    """Write what several runs came to, above their directories; return the file.

    Raises:
        DynctlError: naming the directory, when it cannot be written.
    """
    name = next(name for name, (kind, _) in SUMMARIES.items() if isinstance(summary, kind))
    forget(directory)
    try:
        save(directory / name, summary)
    except OSError as error:
        raise DynctlError(f"cannot write to {directory}: {reason(error)}") from error
    return directory / name


def forget(directory: Path) -> None:
    """Remove an earlier summary, whose runs are written over; `bench show` would take it for what was written last.

    Raises:
        DynctlError: naming the directory, when it cannot be written.
    """
    try:
        for name in SUMMARIES:
            (directory / name).unlink(missing_ok=True)
    except OSError as error:
        raise DynctlError(f"cannot write to {directory}: {reason(error)}") from error


def read(path: Path) -> Report | Trial | Repeat | Sweep:
    """Read what a directory holds, a file of it may be named as well: a summary of several runs, else the run.

    Raises:
        UsageError: when there is none, it is damaged, or of another version.
    """
    for name, (kind, schema) in SUMMARIES.items():
        file = path if path.name == name else path / name
        if file.exists():
            return _read(file, kind, schema)
    return read_report(path)


def read_report(directory: Path) -> Report:
    """Read a run's report; its `result.json` may be named as well.

    Raises:
        UsageError: when there is none, it is damaged, or of another version.
    """
    path = directory if directory.name == RESULT else directory / RESULT
    return _read(path, Report, SCHEMA)


def read_stored(path: Path) -> Stored:
    """Read a run with its requests, or all of a run that was repeated.

    Raises:
        UsageError: when it is neither, or cannot be read.
    """
    found = read(path)
    if isinstance(found, Report):
        return Stored(str(path), (Run(str(path), found, read_records(path, found)),))
    above = path if path.is_dir() else path.parent
    if not isinstance(found, Repeat):
        parts = "turn" if isinstance(found, Trial) else "stage"
        raise UsageError(
            f"{path} holds several runs that were not alike",
            f"name one of them: {above / f'{parts}-1'}",
        )
    runs = []
    for number in range(1, len(found.seeds) + 1):
        directory = above / f"run-{number}"
        report = read_report(directory)
        runs.append(Run(str(directory), report, read_records(directory, report)))
    return Stored(str(path), tuple(runs))


def _read(path: Path, kind: type[T], known: str) -> T:
    content = _content(path)
    try:
        schema = msgspec.json.decode(content, type=_Head).schema
        if schema != known:
            raise UsageError(
                f"{path} is {schema or 'of no schema'}, and this dynctl reads {known}",
                _IS_A_RESULT,
            )
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no result of dynctl bench: {error}", _IS_A_RESULT) from error


def read_records(directory: Path, report: Report) -> tuple[Record, ...]:
    """Read a run's requests, warm-up included.

    Raises:
        UsageError: naming the line that cannot be read; when they are not those of the report.
    """
    path = (directory.parent if directory.name == RESULT else directory) / REQUESTS
    decode = msgspec.json.Decoder(Record).decode
    records = []
    for number, line in enumerate(_content(path).splitlines(), 1):
        try:
            records.append(decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UsageError(
                f"{path}:{number}: no request of dynctl bench: {error}", _IS_A_RESULT
            ) from error
    measured = sum(not record.is_warmup for record in records)
    if measured != report.requests.sent:
        raise UsageError(
            f"{path} holds {measured} measured requests, and {RESULT} beside it says {report.requests.sent}",
            "they are of two runs, or one was cut: run it again",
        )
    return tuple(records)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {reason(error)}", _IS_A_RESULT) from error
