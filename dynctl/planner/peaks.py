"""What GPUs can do at best, per card: dense FLOP/s, memory bandwidth, link per direction. Pure.

Figures are dense, without sparsity. Origin per row: a = system files of aiconfigurator-core 0.12.0 (Apache-2.0),
b = glennklockwood.com/garden/processors/h100, c = rooflinenotes.dev/accelerators, d = datacrunch.io a100-vs-v100,
e = mullet.se L40S sheet, f = baseten.co A10G, g = hmc-tech.com RTX 4090, h = spheron.network RTX 5090,
v = vendor data sheet as remembered. Real cards reach 60 to 80 % of these; `estimate` applies that.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One kind of GPU."""

    name: str
    bf16_flops: float
    fp8_flops: float | None
    """None: no fp8 units; weights in fp8 are computed in 16 bit."""
    memory_gb: float
    memory_bytes_s: float
    link_bytes_s: float
    """NVLink per direction where the cards are joined by it; 0: the product has none."""
    pcie_bytes_s: float
    num_nvlinks: int = 0
    """What `topo -m` shows between two cards of an all-to-all board, as NV#."""
    origin: str = ""
    generation: str = ""
    """`volta`, `turing`, `ampere`, `ada`, `hopper`, `blackwell` or `blackwell-rtx`: engines bring other kernels to each."""
    fp4_flops: float | None = None
    """None: no 4-bit units; 4-bit weights are computed in 8 or 16 bit."""

    @property
    def usable_bytes(self) -> int:
        """What NVML calls the memory's total: data-centre cards with GDDR lose a sixteenth to error correction."""
        has_soft_ecc = self.name in _SOFT_ECC
        return int(self.memory_gb * 2**30 * (0.9375 if has_soft_ecc else 0.995))


_SOFT_ECC = {"l4", "l40", "l40s", "a10", "a10g", "a40", "t4"}
_TFLOPS = 1e12
_GB_S = 1e9
_PCIE_GB_S = {3: 16, 4: 32, 5: 64, 6: 128}
"""x16, per direction, by generation; about 80 % of it is usable."""

_Row = tuple[str, float, float | None, float, float, float, int, int, str]
_FP4_TFLOPS = {"b200-sxm": 9000, "b300-sxm": 13500, "gb200": 10000, "gb300": 15000, "rtx-5090": 1676, "rtx-pro-6000": 1871}  # fmt: skip
_GENERATIONS = (
    ("blackwell", ("b200", "b300", "gb200", "gb300")),
    ("blackwell-rtx", ("rtx-5090", "rtx-pro-6000")),
    ("hopper", ("h100", "h200", "h20", "gh200")),
    ("ada", ("l40", "l4", "rtx-4090", "rtx-6000-ada")),
    ("ampere", ("a100", "a6000", "a40", "a30", "a10", "rtx-3090")),
    ("turing", ("t4",)),
    ("volta", ("v100",)),
)


def _generation(name: str) -> str:
    return next(kind for kind, starts in _GENERATIONS if name.startswith(starts))


def _spec(row: _Row) -> GpuSpec:
    name, bf16, fp8, memory, hbm, link, pcie, num_nvlinks, origin = row
    return GpuSpec(
        name=name,
        bf16_flops=bf16 * _TFLOPS,
        fp8_flops=None if fp8 is None else fp8 * _TFLOPS,
        memory_gb=memory,
        memory_bytes_s=hbm * _GB_S,
        link_bytes_s=link * _GB_S,
        pcie_bytes_s=_PCIE_GB_S[pcie] * _GB_S,
        num_nvlinks=num_nvlinks,
        origin=origin,
        generation=_generation(name),
        fp4_flops=_FP4_TFLOPS[name] * _TFLOPS if name in _FP4_TFLOPS else None,
    )


_ROWS: tuple[_Row, ...] = (
    # name, bf16 TFLOP/s, fp8, GB, HBM GB/s, NVLink GB/s, PCIe generation, NV#, origin
    ("h100-sxm", 989, 1979, 80, 3350, 450, 5, 18, "a, b"),
    ("h100-pcie", 756, 1513, 80, 2000, 300, 5, 0, "a, v"),
    ("h100-nvl", 835, 1671, 94, 3900, 300, 5, 0, "v"),
    ("h200-sxm", 989, 1979, 141, 4800, 450, 5, 18, "a, c"),
    ("h20-sxm", 148, 296, 96, 4000, 450, 5, 18, "v"),
    ("gh200", 989, 1979, 96, 4000, 450, 5, 18, "v"),
    ("b200-sxm", 2250, 4500, 180, 7700, 900, 5, 18, "a, c, v"),
    ("b300-sxm", 2250, 4500, 270, 7700, 900, 5, 18, "v"),
    ("gb200", 2500, 5000, 185, 8000, 900, 6, 18, "a"),
    ("gb300", 2500, 5000, 270, 8000, 900, 6, 18, "a"),
    ("a100-sxm-80", 312, None, 80, 2039, 300, 4, 12, "a, d"),
    ("a100-sxm-40", 312, None, 40, 1555, 300, 4, 12, "a, d"),
    ("a100-pcie-80", 312, None, 80, 1935, 300, 4, 0, "a, v"),
    ("a100-pcie-40", 312, None, 40, 1555, 300, 4, 0, "v"),
    ("a40", 150, None, 48, 696, 56, 4, 0, "v"),
    ("a30", 165, None, 24, 933, 100, 4, 0, "v"),
    ("a6000", 155, None, 48, 768, 56, 4, 0, "v"),
    ("l40s", 362, 733, 48, 864, 0, 4, 0, "a, e"),
    ("l40", 181, 362, 48, 864, 0, 4, 0, "v"),
    ("l4", 121, 242, 24, 300, 0, 4, 0, "a"),
    ("rtx-6000-ada", 364, 728, 48, 960, 0, 4, 0, "v"),
    ("a10", 125, None, 24, 600, 0, 4, 0, "v"),
    ("a10g", 70, None, 24, 600, 0, 4, 0, "f, v"),
    ("rtx-4090", 165, 330, 24, 1008, 0, 4, 0, "g"),
    ("rtx-3090", 71, None, 24, 936, 56, 4, 0, "v"),
    ("rtx-5090", 210, 419, 32, 1792, 0, 5, 0, "h"),
    ("rtx-pro-6000", 468, 936, 96, 1597, 0, 5, 0, "a, v"),
    ("t4", 65, None, 16, 320, 0, 3, 0, "v"),
    ("v100-sxm", 125, None, 32, 900, 150, 3, 2, "d, v"),
    ("v100-sxm-16", 125, None, 16, 900, 150, 3, 2, "d, v"),
)
SPECS = tuple(_spec(row) for row in _ROWS)
_BY_NAME = {spec.name: spec for spec in SPECS}

# First match wins; the text is the product name in lower case as NVML gives it, blanks and dashes removed.
_PATTERNS = (
    (r"gb300", "gb300"),
    (r"gb200", "gb200"),
    (r"b300", "b300-sxm"),
    (r"b200", "b200-sxm"),
    (r"gh200", "gh200"),
    (r"h200", "h200-sxm"),
    (r"h20", "h20-sxm"),
    (r"h100nvl|h100.*nvl", "h100-nvl"),
    (r"h100.*pcie", "h100-pcie"),
    (r"h100|h800", "h100-sxm"),
    (r"a100.*pcie.*40|a100pcie40", "a100-pcie-40"),
    (r"a100.*pcie", "a100-pcie-80"),
    (r"a100.*40gb|a100.*40", "a100-sxm-40"),
    (r"a100|a800", "a100-sxm-80"),
    (r"l40s", "l40s"),
    (r"l40", "l40"),
    (r"l4$|l4[^0]", "l4"),
    (r"a10g", "a10g"),
    (r"a10$|a10[^0]", "a10"),
    (r"a30$|a30[^0]", "a30"),
    (r"a40$|a40[^0]", "a40"),
    (r"6000ada", "rtx-6000-ada"),
    (r"rtxpro6000", "rtx-pro-6000"),
    (r"a6000", "a6000"),
    (r"3090", "rtx-3090"),
    (r"4090", "rtx-4090"),
    (r"5090", "rtx-5090"),
    (r"v100.*16gb|v100.*16$", "v100-sxm-16"),
    (r"v100", "v100-sxm"),
    (r"teslat4|^t4$|^nvidiat4$", "t4"),
)


_OTHERS = (
    (r"\bmi ?\d{2,3}|instinct|radeon|\bamd\b", "AMD"),
    (r"gaudi|\barc\b|\bb[56]0\b|intel", "Intel"),
    (r"\btpu", "Google"),
    (r"trainium|inferentia|\btrn\d|\binf\d", "AWS"),
    (r"ascend|910[bc]", "Huawei"),
)


def spec_named(name: str) -> GpuSpec | None:
    """Find figures by this table's own name, such as `h100-sxm`, or by a product name."""
    return _BY_NAME.get(name.lower().replace("_", "-")) or find_spec(name)


def other_maker(name: str) -> str:
    """Whose accelerator this is when it is none of NVIDIA's; empty otherwise."""
    text = name.lower().replace("_", " ").replace("-", " ")
    return next((maker for pattern, maker in _OTHERS if re.search(pattern, text)), "")


@lru_cache(maxsize=256)
def find_spec(gpu_name: str) -> GpuSpec | None:
    """Find the figures of a GPU by the product name NVML gives it; None when it is not in the table."""
    words = re.findall(r"[a-z0-9]+", gpu_name.lower())
    text, ends = "".join(words), set(accumulate(map(len, words)))
    for pattern, name in _PATTERNS:
        found = re.search(pattern, text)
        if found is not None and _is_whole_number(found, text, ends):
            return _BY_NAME[name]
    return None


def _is_whole_number(found: re.Match[str], text: str, ends: Collection[int]) -> bool:
    """Whether the product's number ends where the pattern thinks: an RTX A1000 is no A100, an H100 80GB is an H100."""
    alternatives = (
        re.match(r"[a-z]*[0-9]+", each.lstrip("^")) for each in found.re.pattern.split("|")
    )
    lengths = [len(m[0]) for m in alternatives if m and found[0].startswith(m[0])]
    end = found.start() + max(lengths, default=0)
    return end in ends or not text[end : end + 1].isdigit()
