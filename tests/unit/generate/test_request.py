"""What is refused before anything runs, and with which words."""

import pytest

from plait.errors import ConfigError
from plait.generate.request import Capacity, Request, SamplingConfig


def test_all_wrong_settings_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        SamplingConfig(temperature=-1.0, top_k=-2, top_p=0.0, max_new_tokens=0, stop=("",), seed=0.5)  # type: ignore[arg-type]
    for part in (
        "6 problems",
        "temperature -1.0",
        "top_k -2",
        "top_p 0.0",
        "max_new_tokens 0",
        "stop ('',)",
        "seed 0.5",
    ):
        assert part in raised.value.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", float("nan")), ("temperature", float("inf")), ("temperature", 1e-9), ("temperature", "hot"),
        ("temperature", True), ("top_p", 1.5), ("top_k", 1.5), ("max_new_tokens", True), ("stop", "END"), ("stop", [1]),
        ("ignore_eos", 1), ("seed", None),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_named_with_its_value(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        SamplingConfig(**{name: value})


def test_settings_come_as_json_has_them() -> None:
    settings = {"temperature": 1, "top_k": 5, "stop": "END"}
    assert SamplingConfig.from_mapping(settings) == SamplingConfig(temperature=1, top_k=5, stop=("END",))
    assert SamplingConfig.from_mapping({"stop": ["a", "b"]}).stop == ("a", "b")
    with pytest.raises(ConfigError, match="there is no setting 'top-k'") as raised:
        SamplingConfig.from_mapping({"top-k": 5})
    assert raised.value.hint == 'did you mean "top_k"?'
    with pytest.raises(ConfigError, match="stop 3 is not"):
        SamplingConfig.from_mapping({"stop": 3})


@pytest.mark.parametrize("prompt", [(), (1, -1), (1, 2.0), (True,), [1, 2]])
def test_a_prompt_is_a_tuple_of_token_ids(prompt: object) -> None:
    with pytest.raises(ConfigError, match="request a"):
        Request("a", prompt)  # type: ignore[arg-type]


def test_a_prompt_has_to_fit_the_model() -> None:
    capacity = Capacity(vocab_size=10, max_context=4)
    capacity.check(Request("a", (9, 9, 9)))
    with pytest.raises(ConfigError, match=r"request a: token id 10 is not in the vocabulary 0:10"):
        capacity.check(Request("a", (10,)))
    with pytest.raises(ConfigError, match="a prompt of 4 tokens and one new token do not fit into the context of 4"):
        capacity.check(Request("a", (1, 1, 1, 1)))
