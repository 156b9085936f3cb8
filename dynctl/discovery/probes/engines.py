"""Versions of vLLM, NIXL, UCX, NCCL and torch in the engines' own interpreters, by the names of installed metadata.

Nothing of theirs is imported: torch alone would take seconds and touch the GPUs. Only the UCX that NIXL's wheels bring
along, which no metadata names, is asked itself. Interpreters come from the
inventory, one a line in DYNCTL_ENGINE_PYTHONS. Pure.
"""

import re

from dynctl.core.command import Completed
from dynctl.core.machine import EngineSoftware
from dynctl.discovery.probe import Probe, text_of

_SCRIPT = r"""
list='
import ctypes, os, sys
print("version\t" + ".".join(map(str, sys.version_info[:3])))
for place in sys.path:
    for name in os.listdir(place) if os.path.isdir(place) else ():
        stem, dot, kind = name.rpartition(".")
        if kind in ("dist-info", "egg-info") and "-" in stem:
            print("package\t" + "\t".join(stem.split("-")[:2]))
        if name.startswith("nixl_cu") and name.endswith(".libs"):
            for library in os.listdir(os.path.join(place, name)):
                if library.startswith("libucp-"):
                    try:
                        tell = ctypes.CDLL(os.path.join(place, name, library)).ucp_get_version_string
                        tell.restype = ctypes.c_char_p
                        print("package\tucx-of-" + name[:-5] + "\t" + tell().decode())
                    except (OSError, AttributeError):
                        pass
'
printf '%s\n' "$DYNCTL_ENGINE_PYTHONS" | while IFS= read -r python; do
  [ -n "$python" ] || continue
  printf 'python\t%s\n' "$python"
  case $python in '~/'*) python=$HOME/${python#??} ;; esac
  "$python" -I -c "$list" 2>&1 </dev/null || printf 'failed\t%s\n' "$?"
done
exit 0
"""
_WANTED = re.compile(
    r"(?:vllm|torch|nixl|ucx|libucx|nvidia[_-]nccl|nvidia[_-]cuda[_-]runtime|lmcache|mooncake|flashinfer|triton|transformers)"
    r"(?:[_-][a-z0-9_-]{1,40})?\Z",
    re.IGNORECASE,
)
_MAX_ENGINES = 32
_MAX_PACKAGES = 64


def parse(done: Completed) -> tuple[EngineSoftware, ...]:
    """Read one entry per interpreter; one that does not run says why."""
    found: list[EngineSoftware] = []
    python, version, said = "", None, ""
    packages: dict[str, str] = {}

    def close(error: str | None) -> None:
        if python and len(found) < _MAX_ENGINES:
            found.append(EngineSoftware(python, version, tuple(sorted(packages.items())), error))

    error = None
    for line in (raw[:1000] for raw in text_of(done).split("\n")):
        key, _, rest = line.partition("\t")
        if key == "python":
            close(error)
            python, version, packages, said, error = rest, None, {}, "", None
        elif key == "version" and re.fullmatch(r"\d{1,3}(?:\.\d{1,3}){1,2}", rest):
            version = rest
        elif key == "package":
            name, _, number = rest.partition("\t")
            if _WANTED.match(name) and number and len(packages) < _MAX_PACKAGES:
                packages[name.lower().replace("_", "-")] = number[:60]
        elif key == "failed":
            error = said or f"ended with status {rest[:8]}"
        elif line.strip():
            said = line.strip()[:200]
    close(error)
    return tuple(found)


PROBE = Probe(_SCRIPT, parse, needs='[ -n "$DYNCTL_ENGINE_PYTHONS" ]')
