"""Text completions of `aligner serve-model` for evaluation harnesses: echoed prompts with their
log-probs, and several prompts in one request."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from aligner.data.tokenizer import Tokenizer
from tests.agents.calling_model import saved
from tests.agents.serving_model import served

PROMPTS = ["2 + 2 =", "The naïve 😀 prompt", "a"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("model"), "chatml")


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    with served(model) as url:
        yield url


def complete(url: str, prompt: Any, **settings: Any) -> dict[str, Any]:
    body = json.dumps({"prompt": prompt, "temperature": 0, **settings}).encode()
    with urllib.request.urlopen(
        urllib.request.Request(f"{url}/completions", body), timeout=60
    ) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def complete_refused(url: str, prompt: Any, **settings: Any) -> str:
    with pytest.raises(urllib.error.HTTPError) as raised:
        complete(url, prompt, **settings)
    assert raised.value.code == 400
    message: str = json.load(raised.value)["error"]["message"]
    return message


@torch.no_grad()
def logprobs_of(model: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probs of all next tokens [T, V], from transformers."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    logprobs: torch.Tensor = network(tokens[None]).logits[0].log_softmax(-1)
    return logprobs


def test_echo_returns_log_probs_of_prompt(model: Path, url: str) -> None:
    tokenizer = Tokenizer(model)
    answer = complete(url, PROMPTS, echo=True, max_tokens=0, logprobs=3)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    encoded = [tokenizer.encode(prompt, add_bos=True) for prompt in PROMPTS]
    total = sum(map(len, encoded))
    assert answer["usage"] == {
        "prompt_tokens": total,
        "completion_tokens": 0,
        "total_tokens": total,
    }
    for prompt, tokens, choice in zip(PROMPTS, encoded, answer["choices"], strict=True):
        assert (choice["text"], choice["finish_reason"]) == (prompt, "length")
        found = choice["logprobs"]
        expected = logprobs_of(model, tokens)[:-1]
        own = expected.gather(1, tokens[1:, None])[:, 0].tolist()
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        assert found["token_logprobs"][1:] == pytest.approx(own, abs=1e-4)
        assert found["tokens"] == [tokenizer.decode_token(token) for token in tokens.tolist()]
        assert found["text_offset"][0] == 0 and len(found["text_offset"]) == len(tokens)
        for top, row, logprob in zip(
            found["top_logprobs"][1:], expected, found["token_logprobs"][1:], strict=True
        ):
            # several tokens may have the same text, such as parts of a character
            assert max(top.values()) == pytest.approx(float(row.max()), abs=1e-4)
            assert logprob in top.values() or logprob < min(top.values())


def test_echoed_prompt_precedes_generated_tokens(model: Path, url: str) -> None:
    tokens = Tokenizer(model).encode(PROMPTS[0], add_bos=True)
    (plain,) = complete(url, PROMPTS[0], max_tokens=4, logprobs=1)["choices"]
    answer = complete(url, tokens.tolist(), max_tokens=4, logprobs=1, echo=True)
    (echoed,) = answer["choices"]
    assert echoed["text"] == PROMPTS[0] + plain["text"]
    assert echoed["logprobs"]["tokens"][-4:] == plain["logprobs"]["tokens"]
    assert echoed["logprobs"]["token_logprobs"][-4:] == pytest.approx(
        plain["logprobs"]["token_logprobs"], abs=1e-5
    )
    # The most probable token was generated, and its two log-probs are the same number.
    for logprob, top in zip(
        plain["logprobs"]["token_logprobs"], plain["logprobs"]["top_logprobs"], strict=True
    ):
        assert logprob == max(top.values())
    assert answer["usage"]["completion_tokens"] == 4
    assert answer["usage"]["prompt_tokens"] == len(tokens)

    (without,) = complete(url, PROMPTS[0], max_tokens=4, echo=True)["choices"]
    assert without["text"] == echoed["text"] and without["logprobs"] is None


def test_choices_are_ordered_by_prompt_then_answer(model: Path, url: str) -> None:
    tokenizer = Tokenizer(model)
    lists = [tokenizer.encode(prompt, add_bos=True).tolist() for prompt in PROMPTS]
    singles = [complete(url, prompt, max_tokens=3)["choices"][0]["text"] for prompt in PROMPTS]
    for prompts in (PROMPTS, lists):
        choices = complete(url, prompts, max_tokens=3, n=2)["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2, 3, 4, 5]
        assert [choice["text"] for choice in choices] == [
            text for text in singles for _ in range(2)
        ]


def test_prompt_of_the_whole_context_can_be_scored(url: str) -> None:
    prompt = [7] * 1024
    (choice,) = complete(url, prompt, max_tokens=0, echo=True, logprobs=1)["choices"]
    assert len(choice["logprobs"]["token_logprobs"]) == 1024
    assert "1024" in complete_refused(url, prompt, max_tokens=1, echo=True)


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([], {}, "prompt: must be a text, a list of token ids"),
        (["a", [1]], {}, "prompt: must be a text"),
        ([[1.5]], {}, "prompt: must be a text"),
        ([True], {}, "prompt: must be a text"),
        (["a", ""], {}, "prompt: must not be empty"),
        ([[1], [99999]], {}, "token id"),
        ("a", {"max_tokens": 0}, "max_tokens=0: must be at least 1 without echo"),
        ("a", {"logprobs": 21}, "logprobs"),
    ],
)
def test_invalid_text_request_is_refused(
    url: str, prompt: Any, settings: dict[str, Any], message: str
) -> None:
    assert message in complete_refused(url, prompt, **settings)
