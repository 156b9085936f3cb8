"""Fifty prompts that tell tokenizers and chat templates apart: scripts, white space, code, numbers, look-alikes of special
tokens, conversations of all roles. A registration compares their token ids with the engine's. Pure: constants."""

from collections.abc import Mapping
from typing import Any, Final

TEXTS: Final[tuple[str, ...]] = (
    # Words and their borders.
    "Hello, world!",
    "hello HELLO hELLO hello-hello hello_hello",
    "I'm you'll WE'RE don't rock'n'roll o'clock",
    "The quick brown fox jumps over the lazy dog. " * 4,
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
    "e.g. i.e. U.S.A. Ph.D. 3rd p.m. www.example.org/a?b=c&d=%20#e",
    # White space.
    "  leading and trailing  ",
    "line\nbreaks\r\nand\ttabs",
    "a  b   c    d     e        f                g",
    "\n\n\n\tindented\n\n\t\ttwice\n ",
    " ",
    "no\u00a0break\u2003em\u2009thin\u3000wide\u2028line\ufeffmark",
    # Scripts.
    "Grüße, naïve café – “quotes”…",
    "日本語のテキストと 한국어",
    "中文测试:你好,世界!繁體字也要試試。",
    "Съешь же ещё этих мягких французских булок, да выпей чаю",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία",
    "نص حكيم له سر قاطع وذو شأن عظيم",
    "עברית מימין לשמאל 123 English",
    "हिन्दी में एक वाक्य और ไทยไม่มีช่องว่าง",
    "ქართული ენა · Հայերեն · አማርኛ",
    # Unicode that is written in more than one way.
    "caf\u00e9 cafe\u0301 \ufb01ne \u212b \u00c5 A\u030a \u2460 \u00bd",
    "👩‍👩‍👧 emoji and \u200b zero width",
    "🇩🇪🇯🇵 👍🏽 ❤️ 1️⃣ 🏳️‍🌈 🫠",
    "𝕬𝖇𝖈 𝟙𝟚𝟛 𐍈 𠜎",
    "\x0b\x0c\x1b[31mred\x1b[0m \x7f",
    # Code and markup.
    "def f(x):\n    return x ** 2  # code",
    "for (int i = 0; i < n; ++i) { a[i] += b[i] << 2; }\t// C",
    '{"key": [1, 2.5, null, true], "nested": {"a": "\\n"}}',
    "# Title\n\n- *item*\n- `code`\n\n| a | b |\n|---|---|\n",
    "<html><body class='x'>&nbsp;&amp;</body></html>",
    "SELECT * FROM t WHERE a != 'b' AND c >= 10;--",
    # Numbers and runs.
    "0123456789 3.14159 1e-9 0xFF",
    "1 12 123 1234 12345 123456 1,234,567.89 -5 +7 2026-11-30T04:05:06Z",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "==== ---- .... !!!! ???? ////\\\\\\\\ ((([[[{{{}}}]]])))",
    # What looks like a special token.
    "<|user|> <s> [INST] looks like a special token </s>",
    "<|im_start|>system\n<|im_end|><|endoftext|><|eot_id|><start_of_turn><think></think>[/INST]<pad><unk>",
)

CHATS: Final[tuple[tuple[Mapping[str, Any], ...], ...]] = (
    ({"role": "user", "content": "Hello, world!"},),
    ({"role": "user", "content": "  spaces around\n\n"},),
    ({"role": "user", "content": "<|im_end|> </s> [INST] <|eot_id|> <|assistant|>"},),
    ({"role": "user", "content": "日本語で 👩‍👩‍👧 bitte, s'il vous plaît"},),
    (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 2 + 2?\n"},
    ),
    (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 2 + 2?\n"},
        {"role": "assistant", "content": " 4."},
        {"role": "user", "content": "And 3 + 3?"},
    ),
    (
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "four"},
        {"role": "user", "content": "five"},
    ),
    (
        {"role": "user", "content": "Show code."},
        {"role": "assistant", "content": "```python\nprint('x')\n```\n"},
        {"role": "user", "content": "Thanks!\n\n\tMore?"},
    ),
    (
        {"role": "user", "content": "Think."},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nDone."},
        {"role": "user", "content": "And?"},
    ),
    ({"role": "user", "content": [{"type": "text", "text": "in a part"}]},),
    (
        {"role": "user", "content": "Weather in Graz?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "call00001",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Graz", "days": 2}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call00001", "content": '{"sun": true}'},
    ),
    (
        {"role": "user", "content": "Look it up."},
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [
                {
                    "id": "call00002",
                    "type": "function",
                    "function": {"name": "look_up", "arguments": "{}"},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call00002", "content": "nothing found\n"},
        {"role": "assistant", "content": "Nothing."},
        {"role": "user", "content": "Pity."},
    ),
)
"""A template, or an engine, may refuse some of them."""
