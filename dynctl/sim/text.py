"""The model directory's tokenizer and chat template: text to ids and back, and the words the chain may say.

The words are whole words with a leading space, so that what was said tokenises to the same ids again: a conversation's
next turn begins with exactly the tokens the cache holds, as with real models.
Not here: requests, the chain itself. IO: reads the model directory.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from dynctl.errors import EngineError, ExitCode

_WORD = re.compile(
    "^[Ġ▁]([a-z]{2,})$"
)  # byte-level and sentence-piece spellings of a leading space
_MIN_WORDS = 16


class TemplateError(EngineError):
    """Raised when the chat template refuses the messages."""


class TextModel:
    """Tokenizer and template of one model directory.

    Raises:
        EngineError: when the directory has no usable tokenizer.
    """

    def __init__(self, model_dir: Path) -> None:
        try:
            self._tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
            config = json.loads((model_dir / "tokenizer_config.json").read_bytes())
        except Exception as error:
            raise EngineError(
                f"no usable tokenizer in {model_dir}: {error}",
                "give a directory with tokenizer.json and tokenizer_config.json",
                code=ExitCode.USAGE,
            ) from error
        vocabulary = self._tokenizer.get_vocab()
        found = ((token_id, _WORD.match(piece)) for piece, token_id in vocabulary.items())
        self._text_of = {token_id: " " + match[1] for token_id, match in found if match}
        if len(self._text_of) < _MIN_WORDS:
            raise EngineError(
                f"the tokenizer in {model_dir} has no words the simulated engine can say"
            )
        self.words = tuple(sorted(self._text_of))
        """Ids the chain may say."""
        self.vocab_size = max(vocabulary.values()) + 1
        self.bos, self.eos = _token(config, "bos_token"), _token(config, "eos_token")
        self.eos_id = vocabulary.get(self.eos, -1)
        self._template = _compile(config, model_dir)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Cut text into ids."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Put any ids together to text, special tokens left out."""
        return str(self._tokenizer.decode(list(token_ids)))

    def piece(self, token_id: int) -> str:
        """Write one token the chain said; end-of-sequence is no text."""
        return self._text_of.get(token_id, "")

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Name ids as the vocabulary spells them."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    def render(self, messages: Sequence[dict[str, Any]], **options: object) -> str:
        """Apply the chat template.

        Raises:
            TemplateError: when there is none, or it refuses the messages.
        """
        if self._template is None:
            raise TemplateError("the model has no chat template", "use /v1/completions")
        try:
            return self._template.render(
                messages=messages, bos_token=self.bos, eos_token=self.eos, **options
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            raise TemplateError(f"the chat template refuses the messages: {error}") from error


def _token(config: dict[str, Any], name: str) -> str:
    """Read a special token, which some directories spell as an object."""
    value = config.get(name)
    return str(value.get("content", "")) if isinstance(value, dict) else str(value or "")


def _compile(config: dict[str, Any], model_dir: Path) -> jinja2.Template | None:
    beside = model_dir / "chat_template.jinja"
    source = beside.read_text(encoding="utf-8") if beside.exists() else config.get("chat_template")
    if not isinstance(source, str):
        return None
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _refuse
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(source)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
