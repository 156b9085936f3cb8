"""The simulated engine's model directory, made by scripts/make_sim_model.py: tokenizer, template, configuration; no weights."""
