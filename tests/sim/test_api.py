"""The HTTP surface of one engine, over its Unix socket."""

import pytest


@pytest.fixture(scope="module")
def engine(start_engine):
    return start_engine("a")


PROMPT = list(range(40, 80))


def test_an_answer_follows_the_chain(engine, chain):
    answer = engine.complete(PROMPT, 20).json()
    choice = answer["choices"][0]

    assert choice["token_ids"] == chain.continuation(PROMPT, 20)
    assert choice["prompt_token_ids"] == PROMPT
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == 40
    assert answer["usage"]["completion_tokens"] == 20


def test_streamed_and_whole_answers_are_the_same(engine, chain, text):
    whole = engine.complete(PROMPT, 20).json()["choices"][0]["text"]
    events = engine.stream("/v1/completions", prompt=PROMPT, max_tokens=20, return_token_ids=True)

    assert events[-1] == "[DONE]"
    choices = [event["choices"][0] for event in events[:-1]]
    assert "".join(choice["text"] for choice in choices) == whole
    assert [t for choice in choices for t in choice["token_ids"]] == chain.continuation(PROMPT, 20)
    assert [choice["finish_reason"] for choice in choices] == [None] * 19 + ["length"]
    assert choices[0]["prompt_token_ids"] == PROMPT


def test_chat_uses_the_template_and_says_its_role_first(engine, chain):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    prompt = engine.http.post("/tokenize", json={"model": "tiny", "messages": messages}).json()[
        "tokens"
    ]
    body = {"messages": messages, "max_tokens": 6}
    whole = engine.http.post("/v1/chat/completions", json={**body, "return_token_ids": True}).json()
    events = engine.stream("/v1/chat/completions", **body, stream_options={"include_usage": True})
    deltas = [event["choices"][0]["delta"] for event in events[:-2]]

    assert whole["prompt_token_ids"] == prompt
    assert whole["choices"][0]["token_ids"] == chain.continuation(prompt, 6)
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert (
        "".join(delta["content"] for delta in deltas) == whole["choices"][0]["message"]["content"]
    )
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == 6


def test_a_conversation_goes_on_from_the_cached_blocks_of_its_last_turn(engine):
    """What was said tokenises to the same ids, so the next turn hits prompt and answer, whole blocks."""
    messages = [{"role": "user", "content": "tell me about " + "river mountain " * 40}]
    first = engine.http.post(
        "/v1/chat/completions", json={"messages": messages, "max_tokens": 64}
    ).json()
    said = first["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
    second = engine.http.post(
        "/v1/chat/completions", json={"messages": messages, "max_tokens": 2}
    ).json()
    num_known = first["usage"]["prompt_tokens"] + 64 - 1  # the last token said was never computed

    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == num_known // 16 * 16


def test_continuous_usage_counts_every_event(engine):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = engine.stream("/v1/completions", prompt=PROMPT, max_tokens=4, stream_options=options)

    assert [event["usage"]["completion_tokens"] for event in events[:-1]] == [1, 2, 3, 4, 4]


def test_a_repeated_prompt_is_cached_in_whole_blocks_and_a_salt_separates(engine):
    prompt = list(range(1000, 1050))
    cached = [
        engine.complete(prompt, 1, **extra).json()["usage"]["prompt_tokens_details"][
            "cached_tokens"
        ]
        for extra in ({}, {}, {"cache_salt": "tenant"}, {"cache_salt": "tenant"})
    ]

    assert cached == [0, 48, 0, 48]


def test_stop_texts_cut_the_answer(engine, chain, text):
    said = chain.continuation(PROMPT, 12)
    words = [text.piece(token) for token in said]
    stop = words[5].strip()[:2] + words[5].strip()[2:] + words[6]
    expected = "".join(words[:5]) + " "
    whole = engine.complete(PROMPT, 30, stop=[stop, "never said"]).json()["choices"][0]
    events = engine.stream("/v1/completions", prompt=PROMPT, max_tokens=30, stop=stop)
    included = engine.complete(PROMPT, 30, stop=stop, include_stop_str_in_output=True).json()[
        "choices"
    ][0]

    assert (whole["text"], whole["finish_reason"], whole["stop_reason"]) == (expected, "stop", stop)
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == expected
    assert events[-2]["choices"][0]["stop_reason"] == stop
    assert included["text"] == expected + stop
    assert engine.state()["num_open"] == 0


def test_stop_tokens_and_min_tokens(engine, chain):
    said = chain.continuation(PROMPT, 9)
    early = engine.complete(PROMPT, 9, stop_token_ids=[said[2]]).json()["choices"][0]
    late = engine.complete(PROMPT, 9, stop_token_ids=[said[2]], min_tokens=5).json()["choices"][0]

    assert (early["token_ids"], early["finish_reason"], early["stop_reason"]) == (
        said[:3],
        "stop",
        said[2],
    )
    assert late["finish_reason"] == "length"


def test_the_request_id_names_the_answer(engine):
    answer = engine.complete(PROMPT, 1, headers={"X-Request-Id": "R7"})

    assert answer.json()["id"] == "cmpl-R7"


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"model": "other", "prompt": "x"}, 404, "model"),
        ({"prompt": [1] * 9000}, 400, "prompt"),
        ({"prompt": "x", "max_tokens": 9000}, 400, "max_tokens"),
        ({"prompt": "x", "max_tokens": 0}, 400, None),
        ({"prompt": "x", "temperature": -1}, 400, None),
        ({"prompt": "x", "max_tokens": "many"}, 400, None),
        ({"prompt": "x", "min_tokens": 20}, 400, "min_tokens"),
        ({"prompt": "x", "n": 2}, 400, "n"),
        ({"prompt": "x", "logprobs": 1}, 400, "logprobs"),
        ({"prompt": "x", "echo": True}, 400, "echo"),
        ({"prompt": "x", "stop": [""]}, 400, "stop"),
        ({"prompt": "x", "stream_options": {}}, 400, "stream_options"),
        ({"prompt": "x", "response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"prompt": ["x", "y"]}, 400, "prompt"),
        ({"prompt": [1, -1]}, 400, "prompt"),
        ({"prompt": [1, 99999]}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": {"a": 1}}, 400, "prompt"),
        ({}, 400, "prompt"),
        ([], 400, None),
    ],
    ids=str,
)
def test_bad_requests_are_refused_in_openai_shape(engine, body, status, param):
    answer = engine.http.post("/v1/completions", json=body)
    error = answer.json()["error"]

    assert (answer.status_code, error["code"], error["param"]) == (status, status, param)
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]


@pytest.mark.parametrize(
    ("messages", "tools"),
    [([], None), ([{"content": "x"}], None), ([{"role": "user", "content": [{"type": "image_url"}]}], None), ([{"role": "user", "content": "x"}], [{}])],
)  # fmt: skip
def test_bad_chats_are_refused(engine, messages, tools):
    answer = engine.http.post("/v1/chat/completions", json={"messages": messages, "tools": tools})

    assert answer.status_code == 400


def test_text_parts_are_joined(engine):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    counts = [
        engine.http.post(
            "/tokenize", json={"messages": [{"role": "user", "content": content}]}
        ).json()["tokens"]
        for content in (parts, "one\ntwo")
    ]

    assert counts[0] == counts[1]


def test_malformed_json_unknown_paths_and_methods_are_refused(engine):
    assert engine.http.post("/v1/completions", content=b"{").status_code == 400
    assert engine.http.get("/nowhere").status_code == 404
    assert engine.http.get("/v1/completions").status_code == 405


def test_facts_about_the_engine(engine):
    get = engine.http.get
    model = get("/v1/models").json()["data"][0]
    sources = get("/kv_event_sources").json()["0"]

    assert (model["id"], model["max_model_len"]) == ("tiny", 8192)
    assert sources == {
        "endpoint": engine.kv_events,
        "replay_endpoint": engine.kv_replay,
        "topic": "kv@a",
    }
    assert get("/health").status_code == get("/ping").status_code == 200
    assert "version" in get("/version").json()
    assert get("/load").json() == {"server_load": 0}


def test_tokenize_and_detokenize_are_inverse(engine, text):
    answer = engine.http.post(
        "/tokenize", json={"prompt": "The river is wide.", "return_token_strs": True}
    ).json()
    back = engine.http.post("/detokenize", json={"tokens": answer["tokens"]}).json()

    assert (
        answer["tokens"][0] == 0
    )  # plain text begins with <|bos|>, chat templates write it themselves
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert back["prompt"].endswith("The river is wide.")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_client_that_leaves_frees_its_blocks(engine, path, until):
    body = {
        "stream": True,
        "max_tokens": 5000,
        "prompt": PROMPT,
        "messages": [{"role": "user", "content": "hi"}],
    }
    client = engine.client(engine.socket)
    with client.stream("POST", path, json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert engine.state()["num_running"] == 1
        num_aborts = len(engine.control.get("/aborts").json())
    client.close()
    until(lambda: not engine.state()["num_running"], "the engine has noticed")
    state = engine.state()

    assert (state["num_running"], state["num_open"]) == (0, 0)
    assert state["num_free_blocks"] == state["num_blocks"] - 1
    assert len(engine.control.get("/aborts").json()) == num_aborts + 1


def test_many_clients_at_once_each_get_their_own_answer(engine, chain):
    from concurrent.futures import ThreadPoolExecutor

    prompts = [[i, *range(100, 120)] for i in range(40, 72)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda prompt: engine.token_ids(prompt, 12), prompts))

    assert answers == [chain.continuation(prompt, 12) for prompt in prompts]
