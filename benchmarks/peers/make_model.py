# ruff: noqa: F401, I001, PTH103, PTH118, PTH123, SIM115, UP031
# Origin: the harness of the peers measurement (files of the same name), unchanged but for formatting.
"""Writes a small model folder (word-level tokenizer, chat template, config) matching simcore.tokenize()."""

import json
import os
import sys

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from simcore import SPECIALS, VOCAB_WORDS, WORD_BASE, word

out = sys.argv[1]
os.makedirs(out, exist_ok=True)
vocab = {s: i for i, s in enumerate(SPECIALS)}
for i in range(len(SPECIALS), WORD_BASE):
    vocab["<r%d>" % i] = i
for i in range(VOCAB_WORDS):
    vocab[word(i)] = WORD_BASE + i
tk = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
tk.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tk.add_special_tokens(["<unk>", "<s>", "</s>", "<pad>"])
tk.save(os.path.join(out, "tokenizer.json"))
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)
json.dump(
    {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "add_bos_token": False,
        "chat_template": TEMPLATE,
        "model_max_length": 131072,
        "clean_up_tokenization_spaces": False,
    },
    open(os.path.join(out, "tokenizer_config.json"), "w"),
)
json.dump(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 2,
        "vocab_size": WORD_BASE + VOCAB_WORDS,
        "max_position_embeddings": 131072,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
        "rms_norm_eps": 1e-5,
    },
    open(os.path.join(out, "config.json"), "w"),
)
json.dump(
    {"bos_token_id": 1, "eos_token_id": 2}, open(os.path.join(out, "generation_config.json"), "w")
)
print("wrote", out)
