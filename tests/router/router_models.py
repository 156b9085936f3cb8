"""Model directories that differ from the shipped one in a single respect."""

import json
import shutil

from dynctl.sim.options import MODEL_DIR
from dynctl.sim.text import TextModel


def other_tokenizer(folder):
    """A model directory whose words have each other's ids."""
    shutil.copytree(MODEL_DIR, folder)
    model = json.loads((folder / "tokenizer.json").read_bytes())
    vocabulary = model["model"]["vocab"]
    special = {token["content"] for token in model["added_tokens"]}
    plain = [word for word in vocabulary if word not in special]
    ids = [vocabulary[word] for word in plain]
    vocabulary.update(zip(plain, ids[1:] + ids[:1], strict=True))
    (folder / "tokenizer.json").write_text(json.dumps(model))
    return TextModel(folder)


def other_template(folder):
    """A model directory whose chats begin otherwise."""
    shutil.copytree(MODEL_DIR, folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_bytes())
    file = folder / "chat_template.jinja"
    if file.is_file():
        file.write_text("Once upon a time. " + file.read_text())
    else:
        config["chat_template"] = "Once upon a time. " + config["chat_template"]
        path.write_text(json.dumps(config))
    return TextModel(folder)
