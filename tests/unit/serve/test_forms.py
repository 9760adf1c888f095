import json
from typing import Any

import pytest

from plait.serve.form.forms import MAX_CHOICES, ChatForm, CompletionForm, GenerationForm, read_form
from plait.serve.form.refusal import Refusal

HI = [{"role": "user", "content": "hi"}]


def completion(**values: Any) -> CompletionForm:
    return read_form(CompletionForm, json.dumps({"model": "m", "prompt": "p", **values}).encode())


def chat(**values: Any) -> ChatForm:
    return read_form(ChatForm, json.dumps({"model": "m", "messages": HI, **values}).encode())


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        ("one", ["one"]),
        (["one", "two"], ["one", "two"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ("", [""]),
    ],
)
def test_a_prompt_has_all_four_forms(prompt: object, wanted: object) -> None:
    assert completion(prompt=prompt).prompt == wanted


@pytest.mark.parametrize("prompt", [3, [], [[]], [True], [1.5], [-1], [None], {"text": "one"}, None])
def test_what_is_no_prompt_is_refused(prompt: object) -> None:
    with pytest.raises(Refusal, match="prompt: a prompt is a string, or a list of token ids") as caught:
        completion(prompt=prompt)
    assert (caught.value.status, caught.value.param) == (400, "prompt")


def test_null_is_the_default_everywhere() -> None:
    names = set(GenerationForm.model_fields) - {"model"}
    assert completion(**dict.fromkeys(names)) == completion()
    assert chat(**dict.fromkeys([*names, "max_completion_tokens", "logprobs"])) == chat()


def test_defaults_are_those_of_openai() -> None:
    form, talk = completion(), chat()
    assert (form.num_choices, form.max_new_tokens, form.has_log_probs, form.includes_usage) == (1, 16, False, False)
    assert (talk.num_choices, talk.max_new_tokens, talk.has_log_probs) == (1, None, False)


def test_max_completion_tokens_goes_before_max_tokens() -> None:
    assert chat(max_tokens=5).max_new_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=7).max_new_tokens == 7


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("temperature", -0.1, "temperature: input should be greater than or equal to 0"),
        ("temperature", "1", "temperature: input should be a valid number"),
        ("top_p", 0, "top_p: input should be greater than 0"),
        ("top_p", 1.1, "top_p: input should be less than or equal to 1"),
        ("n", 0, "n: input should be greater than or equal to 1"),
        ("n", MAX_CHOICES + 1, "n: input should be less than or equal to 128"),
        ("n", 1.0, "n: input should be a valid integer"),
        ("n", True, "n: input should be a valid integer"),
        ("max_tokens", 0, "max_tokens: input should be greater than or equal to 1"),
        ("max_tokens", "16", "max_tokens: input should be a valid integer"),
        ("seed", 2**63, "seed: input should be less than"),
        ("stop", [""], "stop.0: string should have at least 1 character"),
        ("stop", "", "stop.0: string should have at least 1 character"),
        ("stop", [f"{i}" for i in range(17)], "stop: list should have at most 16 items"),
        ("stop", "x" * 1001, "stop.0: string should have at most 1000 characters"),
        ("stop", 7, "stop: input should be a valid list"),
        ("stream", "yes", "stream: input should be a valid boolean"),
        ("stream_options", {"include_usage": 1}, "stream_options.include_usage: input should be a valid boolean"),
        ("stream_options", {"usage": True}, "stream_options.usage: extra inputs are not permitted"),
        ("model", 3, "model: input should be a valid string"),
        ("logprobs", 5, "logprobs: 5 alternatives of each token are not given here"),
    ],
)
def test_a_wrong_value_is_refused_by_name(name: str, value: object, said: str) -> None:
    with pytest.raises(Refusal) as caught:
        completion(**{name: value})
    assert said in caught.value.message
    assert (caught.value.status, caught.value.param) == (400, name)


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(Refusal, match="n: input should .*; top_p: input should"):
        completion(n=0, top_p=2)


@pytest.mark.parametrize("name", ["model", "prompt"])
def test_what_is_missing_is_named(name: str) -> None:
    body = {"model": "m", "prompt": "p"}
    del body[name]
    with pytest.raises(Refusal, match=f"{name}: field required"):
        read_form(CompletionForm, json.dumps(body).encode())


@pytest.mark.parametrize(
    ("name", "value"),
    [("echo", True), ("best_of", 2), ("suffix", "x"), ("logit_bias", {"1": 2}), ("frequency_penalty", 0.5)],
)
def test_what_is_not_done_here_is_refused_rather_than_passed_over(name: str, value: object) -> None:
    with pytest.raises(Refusal, match=f"{name} is not supported") as caught:
        completion(**{name: value})
    assert caught.value.code == "unsupported_parameter"


def test_what_asks_for_nothing_is_taken() -> None:
    completion(echo=False, best_of=1, suffix=None, logit_bias={}, frequency_penalty=0.0, user="u", metadata={"a": "b"})
    chat(tools=[], tool_choice="none", response_format={"type": "text"}, parallel_tool_calls=True, top_logprobs=0)


def test_tools_are_refused() -> None:
    with pytest.raises(Refusal, match="tools is not supported"):
        chat(tools=[{"type": "function"}])


def test_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(Refusal, match="there is no parameter 'temprature'"):
        completion(temprature=1)
    with pytest.raises(Refusal, match="there is no parameter 'prompt'"):
        chat(prompt="p")


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"{'model': 1}", b"\xff\xfe", b'{"model": "\\ud800", "prompt": "p"}', b"[" * 100_000,
        b'{"model": "m", "prompt": "p", "temperature": NaN}', b'{"model": "m"} x', b'{"seed": ' + b"9" * 10_000 + b"}",
    ],
)  # fmt: skip
def test_what_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(Refusal) as caught:
        read_form(CompletionForm, body)
    assert caught.value.status == 400


@pytest.mark.parametrize("body", [b"[]", b"3", b"null", b'"text"'])
def test_json_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(Refusal, match="no object"):
        read_form(CompletionForm, body)


def test_content_may_come_in_parts() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].content == "one\ntwo"


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "not 'image_url'"),
        ({"role": "user", "content": ["text"]}, "a part is no object"),
        ({"role": "user", "content": 3}, "messages.0.content: input should be a valid string"),
        ({"role": "user"}, "messages.0.content: field required"),
        ({"role": "robot", "content": "x"}, "messages.0.role: input should be"),
        ({"role": "user", "content": "x", "tool_calls": [{}]}, "messages.0.tool_calls: extra inputs"),
        ("hi", "messages.0: input should be"),
    ],
)
def test_a_message_that_cannot_be_read_is_refused(message: object, said: str) -> None:
    with pytest.raises(Refusal) as caught:
        chat(messages=[message])
    assert said in caught.value.message
    assert caught.value.param == "messages"


@pytest.mark.parametrize("messages", [[], "hi", None, {}])
def test_a_chat_has_messages(messages: object) -> None:
    with pytest.raises(Refusal, match="messages: "):
        chat(messages=messages)


def test_an_answer_may_be_sent_back_as_it_came() -> None:
    answer = {"role": "assistant", "content": "hello", "refusal": None, "tool_calls": None, "annotations": []}
    assert chat(messages=[*HI, answer]).messages[1].content == "hello"


def test_stream_options_need_a_stream() -> None:
    with pytest.raises(Refusal, match="stream_options is for stream = true"):
        completion(stream_options={"include_usage": True})
    assert completion(stream=True, stream_options={"include_usage": True}).includes_usage
