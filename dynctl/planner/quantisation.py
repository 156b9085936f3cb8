"""How a checkpoint stores each of its weights: format, bytes per weight, and which modules its ignore list spares.

Reads `quantization_config` (fp8, block fp8, mxfp4, AWQ, GPTQ, bitsandbytes, compressed-tensors, ModelOpt's nvfp4 and
fp8) as engines do. An unknown method is refused: a wrong guess would be a wrong plan.
Not here: how many weights there are (`model`).
Pure.
"""

import fnmatch
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dynctl.core.text import clean
from dynctl.errors import PlanError

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Format:
    """A way to store weights."""

    name: str
    bytes_per_weight: float


BF16 = Format("bf16", 2.0)
FP8 = Format("fp8", 1.0)
NVFP4 = Format("nvfp4", 0.5 + 1 / 16)
"""4 bits and one 8-bit scale per 16 weights."""
MXFP4 = Format("mxfp4", 0.5 + 1 / 32)
"""4 bits and one 8-bit scale per 32 weights."""
_MAX_PATTERNS = 20_000


def _fp8_block(rows: int, columns: int) -> Format:
    return Format("fp8-block", 1.0 + 4 / max(1, rows * columns))


def _integer(bits: int, group: int, has_zeros: bool = True) -> Format:
    """Integer weights with one 16-bit scale and maybe a zero point per group; group -1 is a whole row."""
    scales = (2 + (bits / 8 if has_zeros else 0)) / group if group > 0 else 0.001
    return Format(f"int{bits}", bits / 8 + scales)


@dataclass(frozen=True, slots=True)
class Scheme:
    """What a checkpoint's quantisation makes of a module, by the module's full name."""

    format: Format
    spares: Callable[[str], bool]
    is_experts_only: bool = False

    def format_of(self, module: str) -> Format:
        """The format of one linear module's weights."""
        if self.is_experts_only and ".experts" not in module:
            return BF16
        return BF16 if self.spares(module) else self.format


def read_scheme(config: Config, name: str) -> Scheme:
    """Read the quantisation of a parsed `config.json`; a checkpoint without any is 16 bit throughout.

    Raises:
        PlanError: when the method is unknown.
    """
    inner = _quantisation_of(config)
    if inner is None:
        # Engines load float32 checkpoints in 16 bit too.
        return Scheme(BF16, lambda _: False)
    method = str(inner.get("quant_method", "")).lower()
    found = _format(method, inner)
    if found is None:
        label = method or str(inner.get("quant_algo", "")) or "without a name"
        raise PlanError(
            f"model {clean(name)}: quantisation {clean(label)} is unknown, so its size cannot be computed",
            "give the layout yourself with pools:, or declare its shape, or use a checkpoint in bf16, fp8, "
            "int4 (awq, gptq), mxfp4 or nvfp4",
        )
    return Scheme(found, _spares(inner), is_experts_only=method == "mxfp4")


def kv_dtype_bytes(config: Config) -> float:
    """Bytes of one KV value as the checkpoint declares it: 1 where it names an 8-bit cache, which engines then take."""
    inner = _quantisation_of(config)
    if inner is None:
        return 2.0
    scheme = inner.get("kv_cache_scheme")
    is_eight = isinstance(scheme, Mapping) and scheme.get("num_bits") == 8
    return 1.0 if is_eight or str(inner.get("kv_cache_quant_algo", "")).upper() == "FP8" else 2.0


def _quantisation_of(config: Config) -> Config | None:
    """What a checkpoint says of its quantisation, also where that stands one level deeper; None: nothing."""
    quant = config.get("quantization_config") or config.get("compression_config")
    if not isinstance(quant, Mapping):
        return None
    nested = quant.get("quantization")
    return {**quant, **nested} if isinstance(nested, Mapping) else quant


def _format(method: str, quant: Config) -> Format | None:
    algorithm = str(quant.get("quant_algo", "")).lower()
    bits = quant.get("bits")
    group = quant.get("group_size")
    group = group if isinstance(group, int) else 128
    if method == "mxfp4":
        return MXFP4
    if "nvfp4" in algorithm or "nvfp4" in str(quant.get("format", "")).lower():
        return NVFP4
    if method in {"fp8", "fbgemm_fp8"} or algorithm.startswith("fp8"):
        block = quant.get("weight_block_size")
        if isinstance(block, list | tuple) and len(block) == 2:
            return _fp8_block(int(block[0]), int(block[1]))
        return FP8
    if method in {"awq", "gptq", "auto-round", "gptq_marlin", "awq_marlin"} and bits in {4, 8}:
        return _integer(int(bits), group)
    if method == "bitsandbytes":
        return _integer(4 if quant.get("load_in_4bit") else 8, 64)
    if method in {"compressed-tensors", "modelopt", ""}:
        return _from_groups(quant)
    return None


def _from_groups(quant: Config) -> Format | None:
    """The first weight group of compressed-tensors and newer ModelOpt files."""
    for entry in (quant.get("config_groups") or {}).values():
        weights = entry.get("weights") if isinstance(entry, Mapping) else None
        if not isinstance(weights, Mapping):
            continue
        bits, size = weights.get("num_bits"), weights.get("group_size")
        is_float = str(weights.get("type", "float" if bits == 8 else "int")) == "float"
        if bits == 4 and is_float:
            return MXFP4 if size == 32 else NVFP4
        if bits == 8 and is_float:
            block = weights.get("block_structure")
            if isinstance(block, list | tuple) and len(block) == 2:
                return _fp8_block(int(block[0]), int(block[1]))
            return FP8
        if bits in {4, 8}:
            group = size if isinstance(size, int) else 128 if bits == 4 else -1
            return _integer(int(bits), group, has_zeros=weights.get("symmetric") is False)
    return None


def _spares(quant: Config) -> Callable[[str], bool]:
    """A test of module names against the checkpoint's ignore list: exact, prefix, suffix, glob or `re:` entries."""
    entries = [
        str(entry)
        for key in ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules")
        for entry in quant.get(key) or ()
    ][:_MAX_PATTERNS]
    plain: set[str] = set()
    patterns: list[re.Pattern[str]] = []
    for entry in entries:
        if entry.startswith("re:"):
            patterns.append(_compiled(entry[3:]))
            continue
        # Multimodal wrappers put the language model under a prefix of their own.
        stem = entry.removeprefix("language_model.")
        if any(c in stem for c in "*?["):
            # Transformers and ModelOpt both let a pattern that names a parent spare everything below it.
            patterns.append(re.compile(fnmatch.translate(stem.rstrip("*") + "*")))
        else:
            plain.add(stem)

    def spares(module: str) -> bool:
        pieces = module.split(".")
        heads = {".".join(pieces[: i + 1]) for i in range(len(pieces))}
        if plain & heads or plain & set(pieces):
            return True
        return any(pattern.match(module) for pattern in patterns)

    return spares


def _compiled(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error:
        # An entry that is no expression spares only the module of that very name.
        return re.compile(re.escape(text))
