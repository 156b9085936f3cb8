"""What the router asks engines with: nobody can have it cached, whatever the vocabulary."""

import random

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from dynctl.router.prober import new_text
from dynctl.router.tokens import ModelTokenizer, load_tokenizer
from dynctl.sim.options import MODEL_DIR

NUM_TOKENS = 64


def whole_words():
    tokenizer = Tokenizer(models.WordLevel({"?": 0} | {f"w{i}": i for i in range(1, 5000)}, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return ModelTokenizer(tokenizer, None)


@pytest.mark.parametrize(
    "tokenizer", [load_tokenizer(MODEL_DIR), whole_words()], ids=["parts", "whole words"]
)
def test_two_questions_begin_with_other_tokens(tokenizer):
    rng = random.Random(1)
    first, second = (
        tokenizer.encode(new_text(tokenizer, NUM_TOKENS, rng), has_special=False) for _ in range(2)
    )
    assert min(len(first), len(second)) >= NUM_TOKENS
    assert first[:16] != second[:16]


def test_without_a_tokenizer_questions_are_random_words():
    rng = random.Random(1)
    assert new_text(None, NUM_TOKENS, rng) != new_text(None, NUM_TOKENS, rng)
