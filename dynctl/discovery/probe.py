"""What a probe is: a piece of POSIX shell that runs on a host, and a pure parser of what it prints.

Not here: any probe (`probes/`), running them (`discover`).
Pure.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from dynctl.core.command import Completed
from dynctl.core.text import clean
from dynctl.errors import ProbeError

TIMEOUT_STATUS = 124
"""Exit status of a probe that was stopped at its limit, as `timeout` says it."""
ABSENT_STATUS = 127
"""Exit status of a probe whose tool is not installed."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One question to a host."""

    script: str
    """POSIX shell, constant: data reaches it through the environment only."""
    parse: Callable[[Completed], object]
    """Facts from what the script printed; raises ProbeError with tool and line, never another exception."""
    needs: str = ""
    """Shell condition without which the script is not even started, so that an absent tool costs no process."""
    marks: re.Pattern[str] | None = None
    """What a capture of this tool holds, so that its kind can be recognised; None: never captured by hand."""


class ToolError(ProbeError):
    """Raised when a tool ran and said that it cannot answer; `kind` names the fault for warnings and checks."""

    def __init__(self, message: str, kind: str, hint: str | None = None) -> None:
        super().__init__(message, hint)
        self.kind = kind


def text_of(done: Completed) -> str:
    """Decode stdout; bytes that are no UTF-8 become replacement characters."""
    return done.stdout.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n")


def integer(text: str | None, max_digits: int = 15) -> int | None:
    """Read a plain decimal number; None when it is none, or absurdly long."""
    value = (text or "").strip()
    return int(value) if re.fullmatch(rf"[0-9]{{1,{max_digits}}}", value) else None


def fail(tool: str, line: int, text: str, why: str) -> ProbeError:
    """Make the error for a line that cannot be understood; the caller raises it."""
    return ProbeError(f"{tool} line {line}: {why}: {clean(text, 80)!r}")


_SMI_FAULTS = (
    (
        "driver/library version mismatch",
        "driver_library_mismatch",
        "the NVIDIA kernel module and library differ: reboot, or reload the module",
    ),
    (
        "couldn't communicate with the nvidia driver",
        "driver_not_loaded",
        "load or install the NVIDIA driver (is nouveau in use?)",
    ),
    (
        "gpu is lost",
        "gpu_lost",
        "a GPU fell off the bus: reboot the host",
    ),
    (
        "unable to determine the device handle",
        "gpu_lost",
        "the driver cannot open a GPU that is on the bus: see dmesg for Xid 79, then reboot",
    ),
    (
        "no devices were found",
        "no_usable_gpu",
        "the driver sees no usable GPU: see dmesg",
    ),
    (
        "insufficient permissions",
        "no_permission",
        "the user may not open /dev/nvidia*: add it to the group that may",
    ),
    (
        "failed to initialize nvml",
        "nvml_failed",
        "run nvidia-smi on the host and follow what it says",
    ),
)


def check_smi(done: Completed) -> None:
    """Recognise what nvidia-smi says instead of an answer, on either stream.

    Raises:
        ToolError: with the kind of fault and the next step.
    """
    if done.exit_status == TIMEOUT_STATUS:
        raise ToolError(
            "nvidia-smi did not answer within its limit: the driver hangs",
            "timeout",
            "reboot the host",
        )
    said = (text_of(done) + "\n" + done.stderr.decode("utf-8", "replace"))[:65536]
    for phrase, kind, hint in _SMI_FAULTS:
        at = said.lower().find(phrase)
        if at >= 0:
            line = said[said.rfind("\n", 0, at) + 1 :].split("\n", 1)[0]
            library = re.search(r"NVML library version:\s*([\d.]{1,20})", said)
            version = f" (library {library[1]})" if library else ""
            raise ToolError(f"nvidia-smi: {clean(line, 160)}{version}", kind, hint)
    if done.exit_status != 0 and not done.stdout.strip():
        raise ToolError(
            f"nvidia-smi ended with status {done.exit_status}: {clean(said, 160) or 'no output'}",
            "failed",
        )
