"""The text thread: what it cannot do is said, what it cannot survive ends the worker: no app is left waiting."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from sparkd.gguf.model_file import ModelFile
from sparkd.ipc.internal import Decode, Decoded, Encode, Encoded, Refused, Run
from sparkd.ipc.messages import MessageError, Part, Sampling, encode
from sparkd.worker.desk import Desk, Prepare, Texts
from sparkd.worker.limits import Room
from sparkd.worker.sequences import Sequence

DEMO = Path(__file__).parents[2] / "sparkd/demo/spark-demo-laguna.gguf"


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture(scope="module")
def texts() -> Iterator[Texts]:
    texts = Texts(ModelFile.open(DEMO).metadata, room=Room(2048), vocab=4096)
    yield texts
    texts.close()


def test_a_text_of_more_tokens_than_an_answer_holds_is_refused_with_both_numbers(texts: Texts) -> None:
    answer = texts.work(Encode(1, "\U00020000" * 600_000, special=False))
    assert isinstance(answer, Encoded) and answer.tokens is None and answer.error is not None
    assert "2400000 tokens" in answer.error and "2097152" in answer.error


def test_what_has_ids_is_resumed_before_anything_for_texts_is_built() -> None:
    texts = Texts(ModelFile.open(DEMO).metadata, room=Room(2048), vocab=4096)
    run = Run(1, None, [100, 200], None, None, {}, Sampling(seed=1), [], 8, ignore_eos=False, produced=[300])
    resumed = texts.work(run)
    assert isinstance(resumed, Sequence) and list(resumed.tokens) == [100, 200, 300]
    assert "_encoders" not in vars(texts.tokenizer) and texts._template is None
    assert texts.work(Prepare()) is None
    assert "_encoders" in vars(texts.tokenizer) and texts._template is not None
    texts.close()


def test_the_longest_answer_fits_into_a_message() -> None:
    encode(Encoded(1, [2**31 - 1] * 2097152))
    with pytest.raises(MessageError):
        encode(Encoded(1, [2**31 - 1] * 4 * 2097152))


def test_what_the_thread_cannot_survive_is_raised_where_its_results_are_taken(context: zmq.Context[Any]) -> None:
    class Broken:
        def work(self, order: Encode) -> Encoded:
            if order.job == 2:
                raise ZeroDivisionError("job 2")
            return Encoded(order.job, [1])

        def close(self) -> None:
            pass

    desk = Desk(context, Broken())  # type: ignore[arg-type]
    results: list[object] = []

    def take_all() -> None:
        while desk.woken.poll(30_000):
            results.extend(desk.take())

    desk.put(Encode(1, "", special=False))
    assert desk.woken.poll(30_000)
    assert desk.take() == [Encoded(1, [1])]
    desk.put(Encode(2, "", special=False))
    with pytest.raises(ZeroDivisionError, match="job 2"):
        take_all()
    desk.close()


TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]


def order(**given: Any) -> Run:
    fields: dict[str, Any] = dict.fromkeys(("prompt", "tokens", "chat", "tools"))
    return Run(
        1,
        **{**fields, "options": {}, "sampling": Sampling(), "stop": [], "max_tokens": 9, "ignore_eos": False, **given},
    )


def test_an_answer_in_parts_begins_where_its_prompt_left_off(texts: Texts) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    thinking = texts.work(order(chat=chat, options={"enable_thinking": True}, parts=True))
    direct = texts.work(order(chat=chat, parts=True))
    assert isinstance(thinking, Sequence) and isinstance(direct, Sequence)
    assert thinking.answer is not None and direct.answer is not None
    assert thinking.answer.push("Yes.") == [Part("reasoning", "Yes.")]
    assert direct.answer.push("Yes.") == [Part("text", "Yes.")]
    without = texts.work(order(chat=chat))
    assert isinstance(without, Sequence) and without.answer is None


def test_a_resumed_answer_in_parts_goes_on_in_the_middle_of_a_call(texts: Texts) -> None:
    prompt = texts.tokenizer.encode("<think>\n", special=True)
    produced = texts.tokenizer.encode("Hm.</think>So.\n<tool_call>no", special=True)
    sequence = texts.work(order(tokens=prompt, tools=TOOLS, parts=True, produced=produced))
    assert isinstance(sequence, Sequence) and sequence.answer is not None
    assert sequence.answer.push("w</tool_call>") == [Part("call", "{}", 0, "now")]


def test_an_answer_that_must_be_a_call_begins_as_one_whatever_the_prompt_ends_with(texts: Texts) -> None:
    for thinking in (False, True):
        run = order(tokens=None, chat=[{"role": "user", "content": "Hi"}], options={"enable_thinking": thinking})
        plain = texts.work(run)
        forced = texts.work(dataclasses.replace(run, parts=True, call="now"))
        assert isinstance(plain, Sequence) and isinstance(forced, Sequence) and forced.answer is not None
        added = texts.tokenizer.decode(forced.tokens[plain.prompt :])
        assert added == ("\n</think>\n\n" if thinking else "") + "<tool_call>now\n"
        again = texts.work(order(tokens=forced.tokens.tolist(), tools=TOOLS, parts=True, call="now"))
        assert isinstance(again, Sequence) and again.answer is not None
        assert again.answer.push("</tool_call>") == [Part("call", "{}", 0, "now")]
        assert not again.answer.push("")


def test_a_conversation_is_tokenized_as_it_is_asked_for_an_answer(texts: Texts) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    asked = texts.work(order(chat=chat, options={"enable_thinking": True}))
    answer = texts.work(Encode(1, None, special=False, chat=chat, options={"enable_thinking": True}))
    assert isinstance(asked, Sequence) and isinstance(answer, Encoded)
    assert answer.tokens == asked.tokens.tolist()
    wrong = texts.work(Encode(1, None, special=False, chat=[{"role": "king"}]))
    assert isinstance(wrong, Encoded) and wrong.error is not None and "'king'" in wrong.error


def test_tokens_become_text_and_bytes(texts: Texts) -> None:
    tokens = texts.tokenizer.encode("é!<|im_end|>", special=True)
    assert texts.work(Decode(1, tokens, pieces=False)) == Decoded(1, "é!<|im_end|>")
    answer = texts.work(Decode(1, tokens, pieces=True))
    assert isinstance(answer, Decoded) and answer.pieces is not None
    assert [bytes(piece) for piece in answer.pieces] == [texts.tokenizer.token_bytes(token) for token in tokens]
    wrong = texts.work(Decode(1, [4096], pieces=True))
    assert isinstance(wrong, Decoded) and wrong.error is not None and "4096" in wrong.error


def test_output_may_be_shortened_to_what_the_context_leaves_and_a_prompt_never(texts: Texts) -> None:
    fits = texts.work(order(tokens=[1] * 2000, max_tokens=5000, shorten=True))
    assert isinstance(fits, Sequence) and fits.max_tokens == 48
    little = texts.work(order(tokens=[1] * 2000, max_tokens=5, shorten=True))
    assert isinstance(little, Sequence) and little.max_tokens == 5
    over = texts.work(order(tokens=[1] * 2048, max_tokens=5000, shorten=True))
    assert isinstance(over, Refused) and "the prompt has 2048 tokens" in over.message


def test_the_status_says_what_conversations_may_hold_once_the_template_is_built() -> None:
    texts = Texts(ModelFile.open(DEMO).metadata, room=Room(2048), vocab=4096)
    assert texts.chat == {}
    texts.work(Prepare())
    assert texts.chat["tools"] is False and "enable_thinking" in texts.chat["options"] and not texts.chat["missing"]
    texts.close()
