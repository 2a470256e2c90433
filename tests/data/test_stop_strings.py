"""Search for stop strings in the text of a response."""

import random

import pytest

from aligner.data.stop_strings import StopSearch, cut_before_stop
from tests.data.chat_models import TOKENIZERS, chat_model

TEXT = " yes.\n\nuser\n naïve 🙂🙂</answer> yes  no </think>\n\n<think> 🇩🇪 </ans </answer>\n\n\n"
STOPS = ["\n\n", "</answer>", "🙂", " user", "<think>", "<|end|>", "no"]


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("later_tokens", [0, 4])
def test_response_ends_at_the_token_that_completes_a_stop_string(kind, later_tokens):
    tokenizer = chat_model(kind, "chatml")
    numbers = random.Random(kind)
    prompt = tokenizer.encode(" no user\n").tolist()
    search_start = len(prompt) + later_tokens
    end_count = 0
    for _ in range(30):
        # Random tokens are parts of characters and special tokens, too.
        response = [numbers.randrange(tokenizer.vocab_size) for _ in range(10)]
        position = numbers.randrange(10)
        response[position:position] = tokenizer.encode(TEXT[numbers.randrange(20) :]).tolist()
        stops = numbers.sample(STOPS, 2)

        def contains_stop(length, response=response, stops=stops):
            tokens = prompt + response[:length]
            text = tokenizer.decode_after(
                tokens[:search_start], tokens[search_start:], skip_special_tokens=False
            )
            return any(stop in text for stop in stops)

        lengths = range(later_tokens + 1, len(response) + 1)
        expected_end = next(filter(contains_stop, lengths), None)
        search = StopSearch(tokenizer, stops, prompt, search_start)
        assert search.find_end(response) == expected_end
        end_count += expected_end is not None

        # The search may begin within the response, and proceed in parts.
        known = min(numbers.randrange(len(response)), (expected_end or len(response)) - 1)
        search = StopSearch(tokenizer, stops, prompt + response[:known], search_start)
        ends = [search.find_end([token]) for token in response[known:expected_end]]
        assert ends == [None] * (len(ends) - 1) + [None if expected_end is None else 1]
    assert end_count > 10


def test_stop_string_may_not_begin_in_the_prompt():
    tokenizer = chat_model("bytes", "chatml")
    prompt = tokenizer.encode("question\n").tolist()
    line_break = tokenizer.encode("\n").tolist()
    search = StopSearch(tokenizer, ["\n\n"], prompt, len(prompt))
    assert search.find_end(line_break) is None
    assert search.find_end(line_break) == 1


def test_text_is_cut_before_the_first_stop_string():
    assert cut_before_stop("a b c", ["c", "b"]) == "a "
    assert cut_before_stop("a b c", ["d"]) == "a b c"
    assert cut_before_stop("a b c", []) == "a b c"
