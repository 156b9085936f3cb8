"""Mutate captures and read them: facts or a named ProbeError, never another exception, a hang, or a wrong fact.

Lines and cells are dropped, doubled, cut, swapped, shuffled and overwritten, one to six times per capture, by a seed,
so that what fails can be made again. Prints what came of it; ends with 1 when anything did that must not.

    .venv/bin/python benchmarks/fuzz_captures.py [--count 100000] [--seed 0]
"""

import argparse
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from dynctl.core.command import Command, Completed
from dynctl.discovery.capture import Capture, kinds_of, probes, read_captures
from dynctl.discovery.drawing import drawings
from dynctl.discovery.facts import TopoFacts
from dynctl.discovery.probe import ToolError
from dynctl.discovery.view import document
from dynctl.errors import DynctlError, ProbeError

CASES = Path(__file__).parents[1] / "tests" / "discovery" / "cases"
HANG_S = 5
"""A capture of a few KiB is read in milliseconds; this long is a hang."""
WHOLE_EVERY = 10
"""How often a mutated capture goes all the way to a document and a drawing."""

Mutation = Callable[[list[str], random.Random], None]


def _drop(lines: list[str], rng: random.Random) -> None:
    del lines[rng.randrange(len(lines))]


def _double(lines: list[str], rng: random.Random) -> None:
    at = rng.randrange(len(lines))
    lines.insert(at, lines[at])


def _cut_line(lines: list[str], rng: random.Random) -> None:
    at = rng.randrange(len(lines))
    lines[at] = lines[at][: rng.randint(0, len(lines[at]))]


def _cut_stream(lines: list[str], rng: random.Random) -> None:
    del lines[rng.randint(len(lines) // 3, len(lines)) :]


def _swap(lines: list[str], rng: random.Random) -> None:
    a, b = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[a], lines[b] = lines[b], lines[a]


def _shuffle(lines: list[str], rng: random.Random) -> None:
    a = rng.randrange(len(lines))
    some = lines[a : a + rng.randint(2, 12)]
    rng.shuffle(some)
    lines[a : a + len(some)] = some


def _wrap(lines: list[str], rng: random.Random) -> None:
    at = rng.randrange(len(lines))
    where = rng.randint(0, len(lines[at]))
    lines[at : at + 1] = [lines[at][:where], lines[at][where:]]


def _join(lines: list[str], rng: random.Random) -> None:
    at = rng.randrange(len(lines))
    lines[at : at + 2] = ["".join(lines[at : at + 2])]


def _indent(lines: list[str], rng: random.Random) -> None:
    mark = rng.choice(["    ", "# ", "> ", "\t", "gpu-01: "])
    a = rng.randrange(len(lines))
    for at in range(a, min(len(lines), a + rng.randint(1, 20))):
        lines[at] = mark + lines[at]


def _cells(lines: list[str], rng: random.Random) -> None:
    """Drop, double, empty or swap cells of a line, whatever separates them."""
    at = rng.randrange(len(lines))
    parts = re.split(r"(\t|,| {2,}|\|)", lines[at])
    if len(parts) < 3:
        return
    i, j = rng.randrange(0, len(parts), 2), rng.randrange(0, len(parts), 2)
    kind = rng.randrange(4)
    if kind == 0:
        del parts[i : i + 2]
    elif kind == 1:
        parts[i:i] = parts[i : i + 2]
    elif kind == 2:
        parts[i] = ""
    else:
        parts[i], parts[j] = parts[j], parts[i]
    lines[at] = "".join(parts)


def _bytes(lines: list[str], rng: random.Random) -> None:
    at = rng.randrange(len(lines))
    where = rng.randint(0, len(lines[at]))
    put = rng.choice(["\t", " ", "X", "0", "9" * 30, "|", ":", "[", "\x1b", ",", "\x00", "é", "<", ">", "-", "N/A", "&lt;", "٣", "²"])  # fmt: skip
    lines[at] = lines[at][:where] + put + lines[at][where + rng.randint(0, 2) :]


def _tabs(lines: list[str], rng: random.Random) -> None:
    """Lose a tenth of a line's tabs, so that its cells run together."""
    at = rng.randrange(len(lines))
    lines[at] = "".join("" if c == "\t" and rng.random() < 0.1 else c for c in lines[at])


MUTATIONS: tuple[Mutation, ...] = (_drop, _double, _cut_line, _cut_stream, _swap, _shuffle, _wrap, _join, _indent, _tabs, _cells, _bytes)  # fmt: skip
UNNOTICED = {_bytes, _cells}
"""These may write one right label over another, which nothing can notice: facts are not judged after them."""


def mutate(text: str, rng: random.Random) -> tuple[str, bool]:
    """Damage a capture; also tell whether its facts can still be judged."""
    is_judged = True
    for _ in range(rng.randint(1, 6)):
        lines = text.split("\n")
        mutation = rng.choice(MUTATIONS)
        mutation(lines, rng)
        is_judged = is_judged and mutation not in UNNOTICED
        text = "\n".join(lines) or "\n"
    return text, is_judged


class Fuzz:
    """All captures, what their matrices tell, and what came of mutating them."""

    def __init__(self) -> None:
        self.probes = probes()
        self.texts = {
            path.parent.name: path.read_text(errors="replace")
            for path in sorted(CASES.glob("*/*/stdout.txt"))
        }
        topo = self.probes["nvidia_smi_topo"]
        self.kinds = {
            name: kinds_of(text.encode(), self.probes) for name, text in self.texts.items()
        }
        self.told = {
            name: cells_of(topo.parse(done(text)))
            for name, text in self.texts.items()
            if "nvidia_smi_topo" in self.kinds[name]
        }
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []

    def one(self, seed: int) -> None:
        """Mutate and read one capture."""
        rng = random.Random(seed)
        name = rng.choice(sorted(self.texts))
        text, is_judged = mutate(self.texts[name], rng)
        for kind in self.kinds[name]:
            try:
                facts = self.probes[kind].parse(done(text, rng.choice([0, 0, 0, 1, 124])))
            except ToolError:
                self.outcomes["tool error"] += 1
            except ProbeError as error:
                self.outcomes["probe error"] += 1
                if " line " not in error.message:
                    self.wrong.append(f"seed {seed}: {name}: no line in {error.message!r}")
            except Exception as error:  # which one is the finding
                self.wrong.append(f"seed {seed}: {name}: {kind}: {type(error).__name__}: {error}")
            else:
                self.outcomes["facts"] += 1
                if is_judged and isinstance(facts, TopoFacts) and name in self.told:
                    self._judge(seed, name, facts)
        if seed % WHOLE_EVERY == 0:
            self._whole(seed, name, text)

    def _judge(self, seed: int, name: str, facts: TopoFacts) -> None:
        right = self.told[name]
        for key, cell in cells_of(facts).items():
            if cell in {None, ""}:
                continue
            # A number cut at the end of its line is another number, which nothing can notice.
            is_cut = key[1] == "gpu_numa_id" and str(right.get(key)).startswith(str(cell))
            if key in right and right[key] not in {cell, None} and not is_cut:
                self.wrong.append(f"seed {seed}: {name}: {key} is {cell}, not {right[key]}")
                return

    def _whole(self, seed: int, name: str, text: str) -> None:
        try:
            topology, _ = read_captures([Capture(name, text.encode())])
            document(topology)
            for _, lines in drawings(topology):
                if any(len(line) > 80 for line in lines):
                    self.wrong.append(f"seed {seed}: {name}: drawn wider than 80 columns")
        except DynctlError:
            self.outcomes["of no kind"] += 1
        except Exception as error:  # which one is the finding
            self.wrong.append(f"seed {seed}: {name}: whole: {type(error).__name__}: {error}")


def cells_of(facts: object) -> dict[tuple[int, object], object]:
    """Every cell a matrix tells, by GPU index and the other's index or name, or the name of the column."""
    assert isinstance(facts, TopoFacts)
    cells: dict[tuple[int, object], object] = {}
    for i, row, nics in zip(facts.gpu_indexes, facts.links, facts.nic_links, strict=True):
        cells |= {(i, j): cell for j, cell in zip(facts.gpu_indexes, row, strict=True)}
        cells |= {(i, nic): cell for nic, cell in zip(facts.nic_names, nics, strict=True)}
    for name in ("cpu_affinity", "numa_affinity", "gpu_numa_id"):
        for i, cell in zip(facts.gpu_indexes, getattr(facts, name), strict=True):
            cells[i, name] = cell
    return cells


def done(text: str, status: int = 0) -> Completed:
    """A tool's output as the probes get it."""
    return Completed(Command(("capture",)), status, text.encode(), b"")


def run(first_seed: int, count: int) -> Fuzz:
    """Mutate `count` captures; a hang is interrupted and named."""
    fuzz = Fuzz()

    def hangs(*_: object) -> None:
        raise TimeoutError(f"not read within {HANG_S} s")

    signal.signal(signal.SIGALRM, hangs)
    for seed in range(first_seed, first_seed + count):
        signal.alarm(HANG_S)
        fuzz.one(seed)
    signal.alarm(0)
    return fuzz


def main() -> int:
    """Report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    began = time.monotonic()
    fuzz = run(options.seed, options.count)
    print(
        f"{options.count} mutated captures of {len(fuzz.texts)} in {time.monotonic() - began:.0f} s"
    )
    print(", ".join(f"{count} × {what}" for what, count in fuzz.outcomes.most_common()))
    print("\n".join(fuzz.wrong[:50]) or "no other exception, no hang, no wrong fact")
    return 1 if fuzz.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
