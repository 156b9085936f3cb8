"""Which shipped shape a published name means, and how its weights are stored: `nvidia/Llama-3.3-70B-Instruct-FP8`.

Makers and re-packers name checkpoints freely, but nearly all keep family, size and format in the name.
Not here: reading files (`checkpoint`), what a format weighs (`quantisation`).
Pure.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Quant = Mapping[str, Any]
"""A `quantization_config` as checkpoints carry it."""


def _groups(bits: int, kind: str, size: int) -> Quant:
    weights = {"num_bits": bits, "type": kind, "group_size": size}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}  # fmt: skip


FORMATS: Mapping[str, Quant] = {
    "bf16": {},
    "fp8": {"quant_method": "fp8"},
    "fp8-block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "mxfp4": _groups(4, "float", 32),
    "int8": _groups(8, "int", -1),
    "int4": {"quant_method": "awq", "bits": 4, "group_size": 128},
}
"""Formats by the name `dynctl estimate --weights` takes."""

_WORDS = (
    (r"nvfp4|fp4|w4a4", "nvfp4"),
    (r"mxfp4", "mxfp4"),
    (r"fp8-?block|block-?fp8", "fp8-block"),
    (r"(?:w8a8-|w8a16-)?(?:fp8|float8)(?:-?e4m3)?", "fp8"),
    (r"awq|(?:gptq-?)?(?:int|w)-?4(?:a16|bits?)?|(?:bnb-)?4-?bits?|gptq|autoround|int4-awq", "int4"),
    (r"(?:gptq-?)?int-?8|w8a8|w8a16|8-?bits?", "int8"),
    (r"bf16|fp16|16bit", "bf16"),
)  # fmt: skip
"""How names say formats; the first that is found as a word of its own counts."""
_LOCAL_ONLY = r"gguf|ggml|exl[23]|mlx|q[2-8]-(?:k|[01])"
"""Formats for single machines that the engines dynctl starts do not read."""

_SHAPES = (
    (r"distill-llama-(8b|70b)", r"llama-3.1-\1"),
    (r"distill-qwen-(1\.5b|7b|14b|32b)", r"qwen2.5-\1"),
    (r"deepseek-r1-.*qwen3-8b", "qwen3-8b"),
    (r"llama-?4\b.*(scout|maverick)", r"llama-4-\1"),
    (r"llama-?v?3[.-]2\b.*?\b(1b|3b)\b", r"llama-3.2-\1"),
    (r"llama-?v?3(?:[.-][013])?\b.*?\b(8b|70b|405b)\b", r"llama-3.1-\1"),
    (r"^llama-(8b|70b|405b)$", r"llama-3.1-\1"),
    (r"tinyllama-1\.1b", "tinyllama-1.1b"),
    (r"codellama-34b", "codellama-34b"),
    (r"(?:llama-?v?2|codellama|vicuna)\b.*?\b(7b|13b|70b)\b", r"llama-2-\1"),
    (r"qwen-?3-next-80b", "qwen3-next-80b-a3b"),
    (r"qwen-?3-coder-480b", "qwen3-coder-480b-a35b"),
    (r"qwen-?3-(?:coder-)?30b-a3b", "qwen3-30b-a3b"),
    (r"qwen-?3-235b", "qwen3-235b-a22b"),
    (r"qwen-?3-(0\.6b|1\.7b|4b|8b|14b|32b)\b", r"qwen3-\1"),
    (r"qwq-32b", "qwen2.5-32b"),
    (r"qwen-?2-57b-a14b", "qwen2-57b-a14b"),
    (r"qwen-?2(?:\.5)?-(?:coder-|math-)?(0\.5b|1\.5b|3b|7b|14b|32b|72b)\b", r"qwen2.5-\1"),
    (r"mixtral-(8x7b|8x22b)", r"mixtral-\1"),
    (r"ministral-8b", "ministral-8b"),
    (r"mistral-nemo", "mistral-nemo-12b"),
    (r"mistral-small.*(?:22b|2409)|codestral-22b", "mistral-small-22b"),
    (r"mistral-small|devstral-small|magistral-small", "mistral-small-24b"),
    (r"mistral-large-(?:instruct-)?(?:2407|2411|123b)", "mistral-large-123b"),
    (r"mistral-7b|zephyr-7b", "mistral-7b-v0.3"),
    (r"deepseek-(?:coder-)?v2-lite", "deepseek-v2-lite"),
    (r"deepseek-(?:coder-)?v2\b", "deepseek-v2"),
    (r"deepseek-r1\b", "deepseek-r1"),
    (r"deepseek-v3(?!\.2)\b", "deepseek-v3"),
    (r"kimi-k2(?:\.5|-5\b|-thinking)", "kimi-k2.5"),
    (r"kimi-k2\b(?!\.)", "kimi-k2"),
    (r"gpt-?oss-(20b|120b)", r"gpt-oss-\1"),
    (r"gemma-?2-(2b|9b|27b)", r"gemma-2-\1"),
    (r"gemma-?3-(1b|4b|12b|27b)", r"gemma-3-\1"),
    (r"phi-?2\b", "phi-2"),
    (r"phi-?3[.-]5-moe", "phi-3.5-moe"),
    (r"phi-?3(?:[.-]5)?-mini", "phi-3-mini"),
    (r"phi-?3-medium", "phi-3-medium"),
    (r"phi-?4-mini(?!-flash)", "phi-4-mini"),
    (r"phi-?4\b(?!-multimodal|-mini)", "phi-4"),
    (r"glm-?4\.5-air", "glm-4.5-air"),
    (r"glm-?4(?:\.[567]\b(?!-flash|-air)|-moe)", "glm-4.5"),
    (r"glm-(?:4|z1)-(9b|32b)", r"glm-4-\1"),
    (r"minimax-?m2\b", "minimax-m2"),
    (r"\byi-(?:1\.5-)?(6b|34b)", r"yi-\1"),
)
"""Names to shapes; the first match wins, so what is narrower stands first."""


@dataclass(frozen=True, slots=True)
class Named:
    """What a name says."""

    shape: str
    """A shape that ships."""
    weights: str = ""
    """A key of FORMATS; empty: as the shape is published."""
    has_small_cache: bool = False
    """NVIDIA's own 8- and 4-bit checkpoints declare an 8-bit KV cache."""


def recognise(name: str, known: Iterable[str]) -> Named | None:
    """The shape and format a name means; `known` are the shipped shapes. None when no shape is meant."""
    shapes = set(known)
    maker, _, last = name.strip().lower().rstrip("/").rpartition("/")
    text = re.sub(r"[\s_]+", "-", last)
    if text in shapes:
        return Named(text)
    weights = next((fmt for words, fmt in _WORDS if _word(words, text)), "")
    for pattern, template in _SHAPES:
        match = re.search(pattern, text)
        shape = match.expand(template) if match else ""
        if shape in shapes:
            break
    else:
        return None
    if weights == "fp8" and shape.startswith("qwen3") and maker in {"", "qwen"}:
        weights = "fp8-block"  # as Qwen itself publishes them
    if weights == "fp8-block" and f"{shape}-fp8" in shapes:
        return Named(f"{shape}-fp8")
    return Named(shape, weights, has_small_cache=maker == "nvidia" and bool(weights))


def unreadable_format(name: str) -> str:
    """The word in a name for a format no engine here reads; empty when there is none."""
    match = _word(_LOCAL_ONLY, re.sub(r"[\s_]+", "-", name.lower()))
    return match.group(1) if match else ""


def _word(words: str, text: str) -> re.Match[str] | None:
    return re.search(rf"(?:^|[-./])({words})(?:$|[-./])", text)


def quantised(config: Mapping[str, Any], weights: str, has_small_cache: bool = False) -> Mapping[str, Any]:  # fmt: skip
    """A parsed config.json as if its checkpoint stored weights in a format of FORMATS."""
    quant = dict(FORMATS[weights])
    own = config.get("quantization_config")
    if isinstance(own, Mapping) and own.get("quant_method") == "mxfp4" and weights in {"mxfp4", "nvfp4"}:  # fmt: skip
        return config  # published in 4 bit: what is called so is the checkpoint itself
    if weights == "nvfp4" and "kv_lora_rank" in config:
        # NVIDIA's checkpoints of MLA models leave attention as it was.
        quant["exclude_modules"] = ["*self_attn*", "lm_head"]
    if has_small_cache:
        quant["kv_cache_quant_algo"] = "FP8"
    inner = {k: v for k, v in config.items() if k != "quantization_config"}
    return {**inner, "quantization_config": quant} if quant else inner


def alike(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The names most like this one, best first."""
    text = name.rpartition("/")[2].lower()
    return difflib.get_close_matches(text, list(known), count, 0.5)
