"""`aligner serve-model`: its answers equal transformers'; a judge can use it."""

from __future__ import annotations

import json
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from aligner import cli
from aligner.data.tokenizer import Tokenizer
from aligner.paths import RunPaths
from aligner.rewards.function_forms import ScoringRequest
from aligner.rewards.judge import build_judge
from aligner.schema.reward_sources import JudgeSource
from tests.agents.calling_model import saved
from tests.agents.serving_model import served

QUESTIONS = ["a?", "What is 2 + 2?", "Why?"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("model"), "chatml")


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    with served(model) as url:
        yield url


def ask(url: str, question: str, **settings: Any) -> dict[str, Any]:
    body = {"model": "judge", "messages": [{"role": "user", "content": question}], **settings}
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def ask_refused(url: str, question: str, **settings: Any) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as raised:
        ask(url, question, **settings)
    return raised.value.code, json.load(raised.value)["error"]["message"]


def tokens_of(model: Path, question: str) -> torch.Tensor:
    tokenizer = Tokenizer(model)
    words = tokenizer.chat_template.render(
        [{"role": "user", "content": question}], None, add_generation_prompt=True
    )
    return tokenizer.encode(words)


@torch.no_grad()
def test_concurrent_answers_equal_transformers(model: Path, url: str) -> None:
    from transformers import AutoModelForCausalLM

    network, tokenizer = (
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval(),
        Tokenizer(model),
    )
    whole = {"temperature": 0, "max_tokens": 6, "logprobs": True}
    first = {"temperature": 0, "max_tokens": 1, "logprobs": True, "top_logprobs": 20}
    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(lambda question: ask(url, question, **whole), QUESTIONS))
        firsts = list(threads.map(lambda question: ask(url, question, **first), QUESTIONS))
    for question, answer, begun in zip(QUESTIONS, answers, firsts, strict=True):
        read = tokens_of(model, question)
        tokens, logprobs = read, []
        for _ in range(6):
            each = network(tokens[None]).logits[0, -1].log_softmax(-1)
            tokens = torch.cat([tokens, each.argmax()[None]])
            logprobs.append(float(each.max()))
        (choice,) = answer["choices"]
        assert choice["message"] == {
            "role": "assistant",
            "content": tokenizer.decode(tokens[len(read) :]),
        }
        assert choice["finish_reason"] == "length"
        assert [token["logprob"] for token in choice["logprobs"]["content"]] == pytest.approx(
            logprobs, rel=1e-4
        )
        assert answer["usage"] == {
            "prompt_tokens": len(read),
            "completion_tokens": 6,
            "total_tokens": len(read) + 6,
        }
        expected, ids = network(read[None]).logits[0, -1].log_softmax(-1).topk(20)
        (token,) = begun["choices"][0]["logprobs"]["content"]
        assert [one["logprob"] for one in token["top_logprobs"]] == pytest.approx(
            expected.tolist(), rel=1e-4
        )
        texts = [tokenizer.decode([number], skip_special_tokens=False) for number in ids.tolist()]
        assert [one["token"] for one in token["top_logprobs"]] == texts and token["token"] == texts[
            0
        ]


@torch.no_grad()
def test_every_token_has_alternatives(model: Path, url: str) -> None:
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    settings = {"max_tokens": 5, "logprobs": True, "top_logprobs": 3, "temperature": 0.8}
    answer = ask(url, "a?", top_p=0.9, ignore_eos=True, seed=4, **settings)
    tokens = answer["choices"][0]["logprobs"]["content"]
    assert len(tokens) == 5
    read = tokens_of(model, "a?")
    expected = (network(read[None]).logits[0, -1] / 0.8).log_softmax(-1).topk(3)
    assert [one["logprob"] for one in tokens[0]["top_logprobs"]] == pytest.approx(
        expected.values.tolist(), rel=1e-4
    )
    for token in tokens:
        values = [one["logprob"] for one in token["top_logprobs"]]
        assert values == sorted(values, reverse=True) and token["logprob"] <= values[0]
        texts = [one["token"] for one in token["top_logprobs"]]
        assert token["token"] not in texts or token["logprob"] in values


def test_sampled_answers_differ_and_invalid_request_is_refused(url: str) -> None:
    choices = ask(url, "a?", temperature=2.0, max_tokens=8, n=4)["choices"]
    assert len({choice["message"]["content"] for choice in choices}) == 4
    firsts = {
        ask(url, "a?", temperature=3.0, max_tokens=1, top_logprobs=1)["choices"][0]["message"][
            "content"
        ]
        for _ in "abcdef"
    }
    assert len(firsts) > 1
    assert "temperature" in ask_refused(url, "a?", temperature=-1)[1]
    assert "maximum context length is 1024 tokens" in ask_refused(url, "a" * 1500)[1]
    with urllib.request.urlopen(f"{url}/models") as response:
        assert json.load(response)["data"][0]["object"] == "model"


def test_answer_ends_before_the_first_stop_string(url: str) -> None:
    settings = {"temperature": 0, "max_tokens": 12}
    (whole,) = ask(url, "a?", **settings)["choices"]
    text = whole["message"]["content"]
    stop = text[5:7]
    (cut,) = ask(url, "a?", stop=["absent", stop], **settings)["choices"]
    assert cut["message"]["content"] == text[: text.index(stop)]
    assert (whole["finish_reason"], cut["finish_reason"]) == ("length", "stop")
    usage = ask(url, "a?", stop=stop, **settings)["usage"]
    assert usage["completion_tokens"] < 12


def test_disconnected_clients_do_not_block_endpoint(url: str) -> None:
    place = urlsplit(url)
    body = json.dumps(
        {"messages": [chat_message("user", "a?")], "max_tokens": 900, "n": 3}
    ).encode()
    for _ in range(3):
        with socket.create_connection((str(place.hostname), int(place.port or 0))) as client:
            head = (
                "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length:"
                f" {len(body)}\r\n\r\n"
            )
            client.sendall(head.encode() + body)
            time.sleep(0.2)
    assert len(ask(url, "a?", max_tokens=2)["choices"]) == 1


@pytest.mark.slow
def test_model_without_chat_template_reads_plain_text(model: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        if file.name in ("config.json", "model.safetensors", "tokenizer.json"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with served(tmp_path) as url:
        assert ask(url, "abc", max_tokens=1)["usage"]["prompt_tokens"] == len(
            Tokenizer(tmp_path).encode("abc", add_bos=True)
        )


@pytest.mark.slow
def test_judge_reads_verdict_and_yes_probability(
    tmp_path: Path,
) -> None:
    from transformers import AutoModelForCausalLM

    learned = {"a|b": "B", "4|5": "B", "why|so": "B", "a": "yes", "4": "no", "so": "yes"}
    model = saved(
        tmp_path,
        "qwen",
        [
            [chat_message("user", question), chat_message("assistant", word)]
            for question, word in learned.items()
        ],
        [],
    )
    requests = [ScoringRequest("2+2=", response) for response in ("4", "a")]
    with served(model) as url:
        source = {
            "name": "judge",
            "key": "reward",
            "judge_url": url,
            "judge_model": "tiny",
            "judge_max_tokens": 1,
        }
        pairwise = JudgeSource(
            judge_asks="pairwise", judge_template="{response_a}|{response_b}", **source
        )
        assert (
            build_judge(pairwise, RunPaths(tmp_path)).compare(requests, ["5", "b"])
            == [(0.0, 1.0)] * 2
        )
        yes_no = JudgeSource(judge_asks="yes_no", judge_template="{response}", **source)
        scores = build_judge(yes_no, RunPaths(tmp_path))(requests)
    network, tokenizer = (
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval(),
        Tokenizer(model),
    )
    for request, score in zip(requests, scores, strict=True):
        with torch.no_grad():
            top = (
                network(tokens_of(model, request.response)[None]).logits[0, -1].softmax(-1).topk(20)
            )
        sums = {"yes": 0.0, "no": 0.0}
        for probability, token in zip(*(each.tolist() for each in top), strict=True):
            if (word := tokenizer.decode([token]).strip().lower()) in sums:
                sums[word] += probability
        assert score == pytest.approx(sums["yes"] / (sums["yes"] + sums["no"]), rel=1e-3)
    assert scores[0] < 0.5 < scores[1]


def chat_message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def test_unservable_directory_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve-model", str(tmp_path)])
    signal.signal(signal.SIGTERM, before)
    captured = capsys.readouterr()
    assert (ended.value.code, captured.out) == (2, "") and str(tmp_path) in captured.err
