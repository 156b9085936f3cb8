"""Matrices of any machine, printed in any style and damaged in any way: a cell is right or unknown, never guessed."""

import contextlib
import random
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynctl.core.command import Command, Completed
from dynctl.discovery.probes.nvidia_smi_topo import parse, parse_topo
from dynctl.errors import ProbeError

SEEDS = 40

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks
"""


class Box:
    """A random machine and its printed matrix."""

    def __init__(self, rng, gpus=None):
        self.gpus = gpus or rng.randint(1, 9)
        self.nics = rng.choice([0, 0, 1, 2, 5, 12])
        self.labels = [f"GPU{i}" for i in range(self.gpus)]
        self.nic_labels = [f"NIC{i}" for i in range(self.nics)]
        pool = rng.choice(
            [["NV18"], ["NV4", "SYS"], ["NV1", "NV2", "SYS"], ["PIX", "PXB", "PHB", "NODE", "SYS"]]
        )
        everything = self.labels + self.nic_labels
        self.link = {}
        for i, a in enumerate(everything):
            for b in everything[:i]:
                is_gpu = a.startswith("GPU")
                kind = rng.choice(pool if is_gpu else ["PIX", "PXB", "NODE", "SYS"])
                self.link[a, b] = self.link[b, a] = kind
        self.numa = [str(i * 2 // self.gpus) for i in range(self.gpus)]
        self.cpus = [f"{n}-{int(n) + 23},{int(n) + 48}-{int(n) + 71}" for n in self.numa]

    def rows(self, names):
        for a in names:
            yield a, [" X " if a == b else self.link[a, b] for b in names]

    def text(self, rng, separator="\t"):
        names = self.labels + self.nic_labels
        header = "\t" + "\t".join(names) + "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID"
        lines = [header]
        for name, cells in self.rows(names):
            line = name + "\t" + "\t".join(cells)
            if name.startswith("GPU"):
                i = int(name[3:])
                line += f"\t{self.cpus[i]}\t{self.numa[i]}\t\tN/A"
            elif rng.random() < 0.5:
                line += "\t\t\t\t"
            lines.append(line)
        if separator != "\t":
            lines = [line.expandtabs(8) for line in lines]
        legend = "".join(f"  NIC{i}: mlx5_{i}\n" for i in range(self.nics))
        return "\n".join(lines), LEGEND + (f"\nNIC Legend:\n\n{legend}" if self.nics else "")


def assert_right_or_unknown(facts, box, *, all_known=False):
    for i, cpus, numa in zip(
        facts.gpu_indexes, facts.cpu_affinity, facts.numa_affinity, strict=True
    ):
        assert cpus == box.cpus[i] or (not cpus and not all_known), (i, cpus)
        assert numa == box.numa[i] or (numa is None and not all_known), (i, numa)
    assert set(facts.gpu_numa_id) <= {None}
    assert set(facts.nic_names) <= {*box.nic_labels, *(f"mlx5_{i}" for i in range(box.nics))}
    for i, a in zip(facts.gpu_indexes, facts.links, strict=True):
        for j, cell in zip(facts.gpu_indexes, a, strict=True):
            wanted = "X" if i == j else box.link[f"GPU{i}", f"GPU{j}"]
            assert cell == wanted or (cell is None and not all_known), (i, j, cell, wanted)
    for i, row in zip(facts.gpu_indexes, facts.nic_links, strict=True):
        for name, cell in zip(facts.nic_names, row, strict=True):
            wanted = box.link[f"GPU{i}", "NIC" + name.removeprefix("mlx5_").removeprefix("NIC")]
            assert cell == wanted or (cell is None and not all_known), (i, name, cell, wanted)


def expand(text, rng):
    return "\n".join(line.expandtabs(8) for line in text.split("\n"))


def collapse(text, rng):
    return "\n".join(
        " " * 6 + " ".join(line.split()) if line.startswith("\t") else "  ".join(line.split())
        for line in text.split("\n")
    )


def quote(text, rng):
    mark = rng.choice(["# ", "> ", "    ", "2024-05-01T10:00:00Z ", "gpu-01: ", "[worker-0] "])
    return "\n".join(mark + line for line in text.split("\n"))


def colour(text, rng):
    first, _, rest = text.partition("\n")
    start, end = rng.choice([("\x1b[4m", "\x1b[0m"), ("[4m", "[0m")])
    return f"\t{start}{first.strip()}{end}\n{rest}"


def pipes(text, rng):
    return "\n".join("| " + " | ".join(line.split("\t")) + " |" for line in text.split("\n"))


def strip_header_tab(text, rng):
    return text.lstrip("\t")


def carriage_returns(text, rng):
    return text.replace("\n", "\r\n")


def frame(text, rng):
    return (
        "==== GPU Topology ====\nsome words GPU and NIC\n" + text + "\n==== Environment ====\nLD=1"
    )


def shuffle_rows(text, rng):
    head, *rows = text.split("\n")
    rng.shuffle(rows)
    return "\n".join([head, *rows])


def double(text, rng):
    return text + "\n" + LEGEND + "\n" + text


LOSSLESS = [expand, collapse, quote, colour, pipes, strip_header_tab, carriage_returns, frame, shuffle_rows, double]  # fmt: skip


@pytest.mark.parametrize("style", LOSSLESS, ids=lambda style: style.__name__)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_styles_that_lose_nothing_are_read_whole(style, seed):
    rng = random.Random(seed)
    box = Box(rng)
    matrix, legend = box.text(rng)

    facts = parse_topo(style(matrix, rng) + "\n" + legend)

    assert len(facts.gpu_indexes) == box.gpus
    assert len(facts.nic_names) == box.nics
    assert_right_or_unknown(facts, box, all_known=True)


def by_a_terminal(line, width):
    return [line[i : i + width] for i in range(0, max(1, len(line)), width)]


def by_a_terminal_that_indents(line, width):
    return [
        line[:width],
        *("    " + part for part in by_a_terminal(line[width:], width - 4) if part),
    ]


def by_an_editor(line, width):
    return textwrap.wrap(line, width) or [""]


@pytest.mark.parametrize("wrap", [by_a_terminal, by_a_terminal_that_indents, by_an_editor])
@pytest.mark.parametrize("width", [72, 80, 100, 132])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_wrapped_matrices_are_put_together_again(seed, width, wrap):
    rng = random.Random(seed)
    box = Box(rng)
    matrix, legend = box.text(rng)
    lines = expand(matrix, rng).split("\n")

    facts = parse_topo(
        "\n".join(part for line in lines for part in wrap(line, width)) + "\n" + legend
    )

    assert len(facts.gpu_indexes) == box.gpus
    assert_right_or_unknown(facts, box, all_known=True)


@pytest.mark.parametrize("width", [40, 72, 80, 100, 132])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_columns_that_were_cut_are_unknown(seed, width):
    rng = random.Random(seed)
    box = Box(rng)
    matrix, legend = box.text(rng)
    cut = "\n".join(line[:width] for line in expand(matrix, rng).split("\n"))

    facts = parse_topo(f"{cut}\n{legend}")

    assert_right_or_unknown(facts, box)
    assert facts.may_lack_nics or facts.nic_names or not box.nics


def lose_tabs(text, rng):
    return "".join("" if c == "\t" and rng.random() < 0.05 else c for c in text)


def lose_rows(text, rng):
    head, *rows = text.split("\n")
    return "\n".join([head, *[row for row in rows if rng.random() < 0.8]])


def cut_rows(text, rng):
    return "\n".join(
        line[: rng.randint(8, len(line))] if rng.random() < 0.2 and len(line) > 8 else line
        for line in text.split("\n")
    )


def cut_stream(text, rng):
    return text[: rng.randint(len(text) // 3, len(text))]


def blank_cells(text, rng):
    def damage(line):
        parts = line.split("\t")
        return "\t".join(p if i == 0 or rng.random() > 0.05 else "" for i, p in enumerate(parts))

    head, *rows = text.split("\n")
    return "\n".join([head, *map(damage, rows)])


def lose_header(text, rng):
    return text.partition("\n")[2]


def double_rows(text, rng):
    return "\n".join(line for line in text.split("\n") for _ in range(rng.choice([1, 1, 2])))


LOSSY = [lose_tabs, lose_rows, cut_rows, cut_stream, blank_cells, double_rows]


@pytest.mark.parametrize("damage", LOSSY, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("is_expanded", [False, True], ids=["tabs", "spaces"])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_damage_never_yields_a_wrong_link(damage, is_expanded, seed):
    rng = random.Random(seed)
    box = Box(rng)
    matrix, legend = box.text(rng)
    damaged = damage(matrix, rng)

    try:
        facts = parse_topo((expand(damaged, rng) if is_expanded else damaged) + "\n" + legend)
    except ProbeError:
        return

    assert_right_or_unknown(facts, box)


@pytest.mark.parametrize("seed", range(20))
def test_without_a_header_columns_are_the_row_labels(seed):
    rng = random.Random(seed)
    box = Box(rng)
    matrix, legend = box.text(rng)

    facts = parse_topo(lose_header(matrix, rng) + "\n" + legend)

    assert len(facts.gpu_indexes) == box.gpus
    assert_right_or_unknown(facts, box, all_known=True)


MUTATIONS = ["drop", "double", "cut", "swap", "byte"]


def mutate(text, rng):
    for _ in range(rng.randint(1, 6)):
        kind = rng.choice(MUTATIONS)
        lines = text.split("\n")
        i = rng.randrange(len(lines))
        if kind == "drop":
            del lines[i]
        elif kind == "double":
            lines.insert(i, lines[i])
        elif kind == "cut":
            lines[i] = lines[i][: rng.randint(0, len(lines[i]))]
        elif kind == "swap":
            j = rng.randrange(len(lines))
            lines[i], lines[j] = lines[j], lines[i]
        else:
            at = rng.randint(0, len(lines[i]))
            lines[i] = lines[i][:at] + rng.choice("\t X0|:[N\x1b,\x00é") + lines[i][at + 1 :]
        text = "\n".join(lines) or "\n"
    return text


@given(st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_any_mutation_gives_facts_or_a_probe_error(seed):
    rng = random.Random(seed)
    text = mutate("\n".join(Box(rng).text(rng)), rng)

    try:
        facts = parse(Completed(Command(("sh",)), 0, text.encode(), b""))
    except ProbeError:
        return

    count = len(facts.gpu_indexes)
    assert len(facts.links) == count
    assert all(len(row) == count for row in facts.links)


@given(st.text(alphabet="GPU0123NICX \t\nNVSYPHBmlx5_|-,/A:", max_size=400))
@settings(max_examples=300, deadline=None)
def test_noise_gives_facts_or_a_probe_error(text):
    with contextlib.suppress(ProbeError):
        parse(Completed(Command(("sh",)), 0, text.encode(), b""))


def test_a_huge_line_is_bounded():
    text = "GPU0\t X \t" + "NV18\t" * 400_000

    facts = parse_topo("\tGPU0\tGPU1\n" + text + "\n")

    assert facts.links[0][1] is None or facts.links[0][1] == "NV18"
