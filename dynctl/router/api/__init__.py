"""The OpenAI-style wire: requests, answers, keys, streams."""
