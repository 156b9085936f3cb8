"""Why a process died, read from its exit status and last log lines.

Not here: reading files, deciding about restarts (`lifecycle`). Patterns are of vLLM 0.32, torch 2.13 and CPython 3.11;
an unknown text only means that the last line is quoted.
Pure.
"""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from dynctl.core.text import clean


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a unit is not running."""

    kind: str
    """`oom`, `cuda`, `port`, `config`, `gpu`, `deadline`, `hang`, `stuck`, `internal`, `signal` or `exit`."""
    text: str
    """One line for people."""
    is_final: bool = False
    """A restart cannot cure it."""


# In this order: the first kind of which a pattern matches counts, so that the reason beats its consequences.
# The flag says that a restart cannot cure it.
_PATTERNS: tuple[tuple[str, bool, re.Pattern[str]], ...] = (
    (
        "config",
        True,
        re.compile(
            r"error: unrecognized arguments|error: argument |error: the following arguments"
            r"|validation errors? for|No module named|ModuleNotFoundError|PackageNotFoundError"
            r"|is not a valid model identifier|HFValidationError|RepositoryNotFoundError"
            r"|LocalEntryNotFoundError|does not appear to have a file named|Invalid repository ID"
            r"|Can't load tokenizer|does not recognize this architecture|are not supported for now"
            r"|User-specified max_model_len|Non-MoE models do not support|CUDA driver version is insufficient"
            r"|is larger than the (?:maximum number of tokens|available KV cache memory)"
            r"|NoSuchFileError|no such model|config error:|UnknownModel"
        ),
    ),
    (
        "oom",
        False,
        re.compile(
            r"out of memory|OutOfMemoryError|No available memory for the cache blocks"
            r"|less than desired GPU memory utilization|MemoryError|Cannot allocate memory|oom-kill",
            re.IGNORECASE,
        ),
    ),
    (
        "port",
        False,
        re.compile(r"Address already in use|EADDRINUSE|Errno 98|port \d+ is (?:busy|in use)"),
    ),
    (
        "cuda",
        False,
        re.compile(
            r"CUDA error|CUDA-capable device|NVMLError|Xid|fallen off the bus|NCCL error"
            r"|uncorrectable ECC|cuInit"
        ),
    ),
)

# A traceback's last line says most; these say nothing.
_NOISE = re.compile(r"^\s*(?:$|\^+|~|Traceback |File \"|warnings\.warn|During handling|The above)")
# Engines complain about optional parts at every start; such lines are never the reason of a death.
_HARMLESS = re.compile(r"\b(?:WARNING|INFO|DEBUG)\b")
_ERROR = re.compile(r"\b\w*(?:Error|Exception|error|fatal|FATAL)\b")


def classify(exit_status: int | None, lines: Sequence[str], *, was_ready: bool = False) -> Cause:
    """Say why a process ended.

    `exit_status` is negative for a signal and None when nobody could know it (adopted process);
    `lines` are the last ones it wrote, of this start only. What was ready once had a right configuration.
    """
    how = _how(exit_status)
    lines = [line for line in lines if not _HARMLESS.search(line)]
    # From the end: the last word is nearer to the death than an early complaint.
    for kind, is_final, pattern in _PATTERNS:
        if is_final and was_ready:
            continue
        for line in reversed(lines):
            if pattern.search(line):
                return Cause(kind, f"{how} ({kind}): {clean(line)}", is_final)
    kind = "signal" if exit_status is not None and exit_status < 0 else "exit"
    last = _telling(lines)
    return Cause(kind, f"{how}: {last}" if last and kind == "exit" else how)


def _how(exit_status: int | None) -> str:
    if exit_status is None:
        return "ended"
    if exit_status >= 0:
        return f"exited with {exit_status}"
    try:
        name = signal.Signals(-exit_status).name
    except ValueError:
        name = f"signal {-exit_status}"
    extra = ", perhaps by the kernel for lack of memory" if -exit_status == signal.SIGKILL else ""
    return f"killed by {name}{extra}"


def _telling(lines: Sequence[str]) -> str:
    """Pick the line that says most: the last that names an error, else the last that says anything."""
    spoken = [line for line in lines if not _NOISE.match(line)]
    for line in reversed(spoken):
        if _ERROR.search(line):
            return clean(line)
    return clean(spoken[-1]) if spoken else ""
