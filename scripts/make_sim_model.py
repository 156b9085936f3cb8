#!/usr/bin/env python3
"""Make the simulated engine's model directory: a byte-level BPE tokenizer, a chat template, a configuration.

    python scripts/make_sim_model.py [OUT_DIR]

Offline and deterministic: the text it learns from is written here. The shape in config.json is that of an 8B model
with grouped-query attention, so that plans and transfer times come out as for a real one; there are no weights.
"""

import json
import random
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 4096
SPECIAL = ["<|bos|>", "<|eos|>", "<|pad|>", "<|start|>", "<|end|>"]

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)

NOUNS = """
answer question message token model prompt system user assistant host engine router agent plan cluster rack node
network link switch cable port socket thread process memory cache block page buffer queue batch stream request reply
session tenant key secret certificate address name label group policy weight score cost budget limit window deadline
timeout retry failure error warning fault repair restart clock timer second minute hour day week month year morning
evening night summer winter spring autumn river mountain valley forest field garden tree leaf root branch flower seed
stone sand water rain snow wind storm cloud sky sun moon star light shadow fire smoke heat ice glass metal iron copper
silver gold wood paper letter word sentence story book chapter library teacher student school lesson example exercise
test result number sum product ratio share part whole piece edge corner centre circle square line point angle curve
surface volume length width height depth distance speed force energy power voltage current signal noise pattern shape
colour sound music song voice silence dance game player team coach match score board card dice coin market price trade
farm farmer bread butter cheese apple orange lemon grape berry carrot onion potato pepper salt sugar honey coffee tea
kitchen table chair window door wall floor roof house street bridge road path train station ship boat harbour island
coast beach wave ocean fish bird horse sheep goat cat dog mouse rabbit fox bear wolf deer insect bee spider snake
doctor nurse patient hospital medicine heart brain blood bone muscle skin hand finger arm leg foot eye ear nose mouth
child parent mother father sister brother friend neighbour guest visitor family village town city country border law
judge court council vote leader worker engineer builder painter writer reader driver pilot sailor soldier guard
machine motor wheel gear lever spring screw nail hammer saw drill ladder rope chain lock lamp mirror camera phone
screen keyboard printer computer server laptop battery charger cable sensor robot program function method class object
value list table column row index file folder path version change branch commit review release bug feature document
"""

VERBS = """
ask tell say write read speak listen hear see look watch find lose search keep hold carry bring take give send receive
open close start stop begin end finish wait run walk move turn climb fall rise grow shrink build break mend repair
make create destroy change replace copy paste print draw paint count measure weigh compare choose decide plan prepare
learn teach study remember forget know think believe understand explain describe answer call help save spend buy sell
pay share divide join split cut fold bend stretch push pull lift drop throw catch kick hit touch feel taste smell cook
bake boil fry eat drink sleep wake rest work play sing laugh cry smile travel drive ride fly swim sail cross follow
lead guide visit meet leave arrive return enter pass reach cover hide show point agree argue promise refuse accept
allow forbid need want wish hope fear trust doubt try fail win load store fetch route balance drain schedule cache
evict stream encode decode hash verify compile deploy observe report probe
"""

OTHERS = """
the a an and or but if then else when while because so that this these those there here where why how what which who
whose each every all some any none many much few more most less least several other another same different such only
also again still already yet soon later now today tomorrow yesterday always never often seldom once twice perhaps
maybe really very quite rather too enough almost nearly about above below over under between among before after during
until since within without with from into onto across along around behind beside beyond near far up down in out on off
at by for of to as than like is are was were be been being has have had do does did can could will would shall should
may might must not no yes please thank sorry first second third next last new old young big small large little long
short high low deep wide narrow thick thin heavy light strong weak hard soft hot cold warm cool dry wet clean dirty
fast slow quick early late full empty open closed good bad better worse best worst right wrong true false clear dark
bright quiet loud sharp blunt smooth rough sweet sour bitter fresh stale rich poor cheap dear safe dangerous easy
difficult simple complex useful careful kind polite honest brave calm happy sad angry tired hungry thirsty busy free
ready certain possible necessary important common rare public private local global internal external red green blue
yellow white black brown grey pink purple one two three four five six seven eight nine ten hundred thousand million
I you he she it we they me him her us them my your his its our their
"""

CODE = '''
def measure(values, limit=10):
    """Return the mean of the values below the limit."""
    total = 0.0
    for index, value in enumerate(values):
        if value is None or value > limit:
            continue
        total += float(value)
    return total / max(1, len(values))


class Router:
    def __init__(self, engines, policy="kv"):
        self.engines = list(engines)
        self.policy = policy

    async def choose(self, request):
        try:
            return min(self.engines, key=lambda engine: engine.cost(request))
        except ValueError as error:
            raise RuntimeError(f"no engine for {request.id}: {error}") from error


import json
import sys
from pathlib import Path

if __name__ == "__main__":
    print(json.dumps({"name": "sim", "ready": True, "tokens": [1, 2, 3], "ratio": 0.5, "next": None}, indent=2))
    sys.exit(0)
'''

PROSE = """
A prompt is cut into tokens, and tokens into blocks. A block that was computed once can be used again, as long as
everything before it is the same. So a router that knows which engine holds which blocks can send a conversation back
to where its beginning already lies. What is not there must be computed, and that takes time for every token.

The first token of an answer waits for the whole prompt. Each later token waits only for the one before it. When both
kinds of work share an engine, a long prompt makes everybody wait; when they are kept apart, the blocks must travel
from one host to another. Which is cheaper depends on the length of the prompt, the speed of the link and the load.

You are a helpful assistant. Please answer in one short sentence. Explain your reasoning step by step, then give the
result. Summarise the following text in three points. Translate this letter. Write a function that sorts a list of
numbers. What is the difference between a process and a thread? How do I restart a service on a remote host?
"""


def text(rnd: random.Random) -> str:
    """Write one document: sentences, a question, numbers, punctuation, code."""
    words = f"{NOUNS} {VERBS} {OTHERS}".split()
    lines = []
    for _ in range(60):
        picked = [rnd.choice(words) for _ in range(rnd.randrange(4, 16))]
        mark = rnd.choice([".", ".", ".", "?", "!", ":", ";"])
        comma = rnd.randrange(len(picked))
        picked[comma] += ","
        lines.append(" ".join(picked).capitalize() + mark)
    numbers = [f"{rnd.randrange(10 ** rnd.randrange(1, 7))}" for _ in range(40)]
    return " ".join(lines) + "\n" + " ".join(numbers) + "\n" + CODE + PROSE + "\n".join(lines[:5])


def train() -> Tokenizer:
    """Train the tokenizer; a prompt of plain text begins with <|bos|>, as with Llama models."""
    rnd = random.Random(7)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text(rnd) for _ in range(400)], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
    )
    return tokenizer


def main() -> None:
    """Write the three files."""
    default = Path(__file__).parent.parent / "dynctl" / "sim" / "model"
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = train()
    (out / "tokenizer.json").write_text(tokenizer.to_str(pretty=False) + "\n", encoding="utf-8")
    config = {
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "pad_token": "<|pad|>",
        "additional_special_tokens": ["<|start|>", "<|end|>"],
        "model_max_length": 131072,
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    shape = {
        "architectures": ["DynctlSimForCausalLM"],
        "model_type": "dynctl_sim",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    (out / "config.json").write_text(json.dumps(shape, indent=2) + "\n")
    size = (out / "tokenizer.json").stat().st_size
    print(f"{out}: vocabulary {tokenizer.get_vocab_size()}, tokenizer.json {size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
