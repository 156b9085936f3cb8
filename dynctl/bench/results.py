"""What is stored: a run's `result.json` (the report) and `requests.jsonl` (a line per request), a trial's `trial.json`.

Not here: what they mean.

IO: files.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from dynctl.bench.record import Record
from dynctl.bench.report import SCHEMA, Report
from dynctl.bench.trial import SCHEMA as TRIAL_SCHEMA
from dynctl.bench.trial import Trial
from dynctl.errors import DynctlError, UsageError
from dynctl.files import reason, write_atomic
from dynctl.store import save

RESULT = "result.json"
REQUESTS = "requests.jsonl"
TRIAL = "trial.json"
T = TypeVar("T")
_IS_A_RESULT = "give a directory that dynctl bench run --out wrote"


class _Head(msgspec.Struct):
    schema: str = ""


def write(directory: Path, report: Report, records: Sequence[Record]) -> None:
    """Write both files.

    Raises:
        DynctlError: naming the directory, when it cannot be written.
    """
    try:
        save(directory / RESULT, report)
        lines = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
        write_atomic(directory / REQUESTS, lines)
        # Of an earlier trial; `bench show` would take it for what was written last.
        (directory / TRIAL).unlink(missing_ok=True)
    except OSError as error:
        raise DynctlError(f"cannot write to {directory}: {reason(error)}") from error


def read_report(directory: Path) -> Report:
    """Read a run's report; its `result.json` may be named as well.

    Raises:
        UsageError: when there is none, it is damaged, or of another version.
    """
    path = directory if directory.name == RESULT else directory / RESULT
    return _read(path, Report, SCHEMA)


def read_trial(directory: Path) -> Trial | None:
    """Read a trial; None where a directory holds none.

    Raises:
        UsageError: when it is damaged or of another version.
    """
    path = directory if directory.name == TRIAL else directory / TRIAL
    return _read(path, Trial, TRIAL_SCHEMA) if path.exists() else None


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
