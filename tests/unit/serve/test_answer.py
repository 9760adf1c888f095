from plait.generate.request import Event
from plait.serve.form.answer import ChatAnswer, Choice, CompletionAnswer

EVENTS = [
    Event("id-0", 65, "A", None, 3, 1, -0.5),
    Event("id-0", 66, "", None, 3, 2, -1.5),
    Event("id-0", 67, "BC", "length", 3, 3, -2.5),
]
HEAD = {"id": "id", "created": 7, "model": "m"}


def written(index: int = 0) -> Choice:
    choice = Choice(index)
    for event in EVENTS:
        choice.add(event, chr)
    return choice


def test_a_choice_is_the_sum_of_its_pieces() -> None:
    choice, total = Choice(0), ""
    pieces = [choice.add(event, chr) for event in EVENTS]
    for piece in pieces:
        total += piece.text
    assert total == choice.text == "ABC"
    assert [each.offset for each in choice.log_probs] == [0, 1, 1]
    assert (choice.finish_reason, choice.num_prompt_tokens, choice.num_new_tokens) == ("length", 3, 3)


def test_a_piece_without_text_is_empty_only_when_nothing_else_is_in_it() -> None:
    assert Choice(0).add(EVENTS[1], None).is_empty
    assert not Choice(0).add(EVENTS[1], chr).is_empty
    assert not Choice(0).add(Event("id-0", 2, "", "stop", 3, 1), None).is_empty


def test_a_completion_has_openais_form() -> None:
    answer = CompletionAnswer("id", 7, "m", 1, chr)
    assert answer.build_whole([written()]) == {
        **HEAD,
        "object": "text_completion",
        "choices": [
            {
                "index": 0,
                "text": "ABC",
                "logprobs": {
                    "tokens": ["A", "B", "C"],
                    "token_logprobs": [-0.5, -1.5, -2.5],
                    "text_offset": [0, 1, 1],
                    "top_logprobs": None,
                },
                "finish_reason": "length",
            }
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6},
    }


def test_a_chat_answer_has_openais_form() -> None:
    answer = ChatAnswer("id", 7, "m", 1, None)
    assert answer.build_whole([written()])["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "ABC", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
        }
    ]


def test_a_chat_stream_says_first_who_speaks() -> None:
    answer = ChatAnswer("id", 7, "m", 2, None)
    opening = answer.list_opening(range(2), includes_usage=True)
    assert [chunk["choices"][0]["delta"] for chunk in opening] == [{"role": "assistant", "content": ""}] * 2
    assert [chunk["choices"][0]["index"] for chunk in opening] == [0, 1]
    assert all(chunk["usage"] is None for chunk in opening)
    assert CompletionAnswer("id", 7, "m", 2, None).list_opening(range(2), includes_usage=True) == []


def test_log_probabilities_of_a_chat_have_bytes_unless_a_token_is_half_a_character() -> None:
    answer = ChatAnswer("id", 7, "m", 1, lambda token: "\ufffd" if token == 66 else chr(token))
    choice = Choice(0)
    for event in EVENTS:
        choice.add(event, answer.show_token)
    listed = answer.build_whole([choice])["choices"][0]["logprobs"]["content"]
    assert [each["bytes"] for each in listed] == [[65], None, [67]]
    assert [each["logprob"] for each in listed] == [-0.5, -1.5, -2.5]


def test_usage_counts_a_prompt_once_however_many_choices_it_has() -> None:
    usage = CompletionAnswer("id", 7, "m", 2, None).build_usage([written(index) for index in range(4)])
    assert usage == {"prompt_tokens": 6, "completion_tokens": 12, "total_tokens": 18}
