"""Model directories on a host: names and sizes of all files, checksums of the small ones that decide behaviour. Pure."""

import re

from dynctl.core.audit import ModelFiles
from dynctl.core.command import Completed
from dynctl.discovery.probe import Probe, fail, text_of

_SCRIPT = r"""
printf '%s\n' "$DYNCTL_MODELS" | while IFS= read -r path; do
  [ -n "$path" ] || continue
  place=$path
  case $path in '~/'*) place=$HOME/${path#??} ;; esac
  if [ -d "$place" ]; then printf '== yes %s\n' "$path"; else printf '== no %s\n' "$path"; continue; fi
  cd "$place" || continue
  find -L . -maxdepth 1 -type f 2>/dev/null | head -n 2000 | while IFS= read -r name; do
    stat -L -c "size %s %n" "$name"
  done
  for name in config.json generation_config.json tokenizer.json tokenizer_config.json chat_template.jinja *.index.json; do
    [ -f "$name" ] && { read -r sum _ <<END
$(cksum <"$name")
END
    printf 'sum %s %s\n' "$sum" "$name"; }
  done
done 2>/dev/null
exit 0
"""


def parse(done: Completed) -> tuple[ModelFiles, ...]:
    """Read one entry per directory asked for.

    Raises:
        ProbeError: when a line is none of the three kinds.
    """
    found: list[ModelFiles] = []
    sizes: list[tuple[str, int]] = []
    sums: list[tuple[str, str]] = []

    def close() -> None:
        if found:
            found[-1] = ModelFiles(
                found[-1].path, found[-1].exists, tuple(sorted(sizes)), tuple(sorted(sums))
            )
        sizes.clear()
        sums.clear()

    for number, line in enumerate(text_of(done).split("\n"), 1):
        if match := re.fullmatch(r"== (yes|no) (.{1,1024})", line):
            close()
            found.append(ModelFiles(match[2], match[1] == "yes"))
        elif match := re.fullmatch(r"size (\d{1,16}) \./(.{1,400})", line):
            sizes.append((match[2], int(match[1])))
        elif match := re.fullmatch(r"sum (\d{1,10}) (.{1,400})", line):
            sums.append((match[2], match[1]))
        elif line.strip():
            raise fail("model files", number, line, "neither directory, size nor checksum")
    close()
    return tuple(found)


PROBE = Probe(_SCRIPT, parse)
