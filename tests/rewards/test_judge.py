"""Judge scores: requests, retries, cache, metrics, and the parsers of the judge's answers."""

from __future__ import annotations

import json
import math
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from aligner.errors import ConfigError
from aligner.paths import RunPaths
from aligner.rewards.function_forms import ScoringRequest
from aligner.rewards.judge import (
    COUNTS,
    Judge,
    JudgeLedger,
    JudgeMeter,
    build_judge,
    judge_run_name,
    parse_completion,
    parse_ranking,
    parse_score,
    parse_verdict,
    parse_yes_probability,
)
from aligner.rewards.remote import HttpEndpoint, RateLimiter
from aligner.rewards.scorers import ScorerUnavailable, ScoringError, call_scorer
from aligner.schema import RewardConfig
from aligner.schema.reward_sources import JudgeSource
from tests.rewards.judge_server import JudgeServer, Reply, judging, likely, says

REQUESTS = [ScoringRequest("2+2=", response, {"answer": "4"}) for response in ("4", "5", "four")]
PATTERN = RewardConfig.judge_pattern


def judge_of(server: JudgeServer, directory: Path, **settings: object) -> Judge:
    """Return a judge that uses the server and stores answers in a run directory."""
    given = {"judge_timeout_s": 5.0, "judge_template": "{prompt}{response}", **settings}
    source = JudgeSource(
        name="judge", key="reward", judge_url=server.url, judge_model="tester", **given
    )
    return build_judge(source, RunPaths(directory))


def nonzero_counts(directory: Path) -> dict[str, float]:
    """Return the nonzero counts of a run's judges."""
    meter = JudgeMeter([], judge_run_name(RunPaths(directory)))
    meter._directories = [RunPaths(directory).judge]
    return {
        name.removeprefix("judge/"): amount for name, amount in meter.metrics().items() if amount
    }


def test_score_is_read_and_cost_is_counted(tmp_path: Path) -> None:
    worth = {"4": 9, "5": 1, "four": 7.5}
    with judging(
        lambda question, _: says(f"Well. SCORE: {worth[question[4:]]}", 100, 20)
    ) as server:
        judge = judge_of(server, tmp_path, judge_input_price=2.0, judge_output_price=10.0)
        assert call_scorer("judge", judge, REQUESTS) == [9.0, 1.0, 7.5]
    assert {body["model"] for body in server.asked} == {"tester"} and set(server.paths) == {
        "/v1/chat/completions"
    }
    assert server.asked[0] | {"messages": []} == {
        "model": "tester",
        "messages": [],
        "temperature": 0.0,
        "max_tokens": 512,
    }
    assert sorted(server.questions) == ["2+2=4", "2+2=5", "2+2=four"]
    found = nonzero_counts(tmp_path)
    assert found.pop("cost") == found.pop("cost_total") == pytest.approx((300 * 2 + 60 * 10) / 1e6)
    assert found == {"questions": 3, "tokens_in": 300, "tokens_out": 60}


def test_equal_samples_share_one_judge_request(tmp_path: Path) -> None:
    with judging(lambda *_: says("SCORE: 3")) as server:
        assert judge_of(server, tmp_path)([*REQUESTS, *REQUESTS]) == [3.0] * 6
    assert len(server.asked) == 3


def test_template_with_missing_record_field_is_refused(
    tmp_path: Path,
) -> None:
    request = ScoringRequest(
        "Why {response}?",
        "So {prompt}.",
        {"answer": ["a", 1], "prompt": "another", "rubric": "Be {kind}"},
    )
    template = '{rubric} {"json": 1} {prompt}|{response}|{answer} {lowest}-{highest}'
    with judging(lambda *_: says("SCORE: 1")) as server:
        judge_of(server, tmp_path, judge_template=template)([request])
        assert server.questions == [
            'Be {kind} {"json": 1} Why {response}?|So {prompt}.|["a", 1] 0-10'
        ]
        with pytest.raises(
            ScoringError,
            match=r"template uses \{rubric\}, but the record of prompt '2\+2=' lacks this field",
        ):
            judge_of(server, tmp_path, judge_template=template)(REQUESTS)


def test_yes_no_scores_come_from_logprobs(tmp_path: Path) -> None:
    answers = {
        "4": likely(**{"Yes": 0.6, " yes": 0.2, "No": 0.2}),
        "5": likely(No=0.9, maybe=0.1),
        "four": likely(Yes=0.5, no=0.5),
    }
    with judging(lambda question, _: says("Yes", **answers[question[4:]])) as server:
        scores = judge_of(server, tmp_path, judge_asks="yes_no")(REQUESTS)
        assert judge_of(server, tmp_path, judge_asks="yes_no")(REQUESTS) == scores  # from the cache
    assert scores == pytest.approx([0.8, 0.0, 0.5])
    assert len(server.asked) == 3
    assert all(
        (body["max_tokens"], body["logprobs"], body["top_logprobs"]) == (1, True, 20)
        for body in server.asked
    )


def test_pairs_are_judged_in_both_orders(tmp_path: Path) -> None:
    """A judge that always answers A yields ties; a judge that prefers length yields a ranking."""
    template = "{prompt}:{response_a}|{response_b}"
    others = [ScoringRequest("3+3=", response) for response in ("6", "six")]
    with judging(lambda *_: says("VERDICT: A")) as server:
        biased = judge_of(server, tmp_path / "a", judge_asks="pairwise", judge_template=template)
        assert biased([*REQUESTS, *others]) == [0.5] * 5
        assert len(server.asked) == 3 * 2 + 2

    def longer(question: str, _: int) -> Reply:
        one, other = question.split(":")[1].split("|")
        return says(
            "VERDICT: tie"
            if len(one) == len(other)
            else f"**VERDICT: {'A' if len(one) > len(other) else 'B'}**"
        )

    mixed = [REQUESTS[0], others[0], *REQUESTS[1:], REQUESTS[2], others[1]]
    with judging(longer) as server:
        judge = judge_of(server, tmp_path / "b", judge_asks="pairwise", judge_template=template)
        # "4", "5" and "four" twice: each "four" wins twice and ties with the other.
        assert judge(mixed) == pytest.approx([0.5 / 3, 0.0, 0.5 / 3, 2.5 / 3, 2.5 / 3, 1.0])
    assert sorted(server.questions) == sorted(
        [f"2+2=:{a}|{b}" for a in ("4", "5", "four") for b in ("4", "5", "four") if a != b]
        + ["3+3=:6|six", "3+3=:six|6"]
    )


def test_prompt_is_ranked_by_one_request(tmp_path: Path) -> None:
    def rank(question: str, _: int) -> Reply:
        return says(
            "The third is right. RANKING: 3 > 1 > 2"
            if question.startswith("3:")
            else "RANKING: 2 > 1"
        )

    others = [ScoringRequest("3+3=", response) for response in ("6", "7", "6")]
    alike = [ScoringRequest("4+4=", "8")] * 2
    with judging(rank) as server:
        judge = judge_of(
            server, tmp_path, judge_asks="ranking", judge_template="{count}:{responses}"
        )
        assert judge([*REQUESTS, *others, *alike]) == [0.5, 0.0, 1.0, 0.0, 1.0, 0.0, 0.5, 0.5]
    assert len(server.asked) == 2
    assert "<response_2>\n5\n</response_2>" in max(server.questions)


def test_compare_returns_none_for_unreadable_verdicts(
    tmp_path: Path,
) -> None:
    """The judge prefers 6 to 5, always prefers the first of `four` and 6, and has no verdict on 4.

    Equal texts send no request.
    """
    answers = {
        "5|6": "VERDICT: B",
        "6|5": "VERDICT: A",
        "four|6": "VERDICT: A",
        "6|four": "VERDICT: A",
    }
    with judging(lambda question, _: says(answers.get(question, "Hm."), 100, 20)) as server:
        judge = judge_of(
            server, tmp_path, judge_asks="pairwise", judge_template="{response_a}|{response_b}"
        )
        others = ["6", "6", "6", "6"]
        requests = [REQUESTS[1], REQUESTS[2], REQUESTS[0], ScoringRequest("2+2=", "6")]
        wins = judge.compare(requests, others)
        assert wins == [(0.0, 0.0), (1.0, 0.0), None, (0.5, 0.5)]
        assert len(server.asked) == 4 + 2 * RewardConfig.judge_tries
        assert judge.compare(requests, others) == wins  # unreadable answers are cached
        assert len(server.asked) == 4 + 2 * RewardConfig.judge_tries
    assert nonzero_counts(tmp_path)["unreadable"] == 2
    with (
        judging(lambda *_: Reply(401, b"no")) as server,
        pytest.raises(ScoringError, match="got status 401"),
    ):
        judge_of(server, tmp_path / "b", judge_asks="pairwise", judge_template=None).compare(
            requests, others
        )


@pytest.mark.parametrize("asks", ["pairwise", "ranking"])
@pytest.mark.parametrize(
    "requests", [REQUESTS[:1], [ScoringRequest("", "a"), ScoringRequest("", "b")]]
)
def test_comparison_without_second_sample_is_refused(
    tmp_path: Path, asks: str, requests: list[ScoringRequest]
) -> None:
    with judging(lambda *_: says("A")) as server:
        judge = judge_of(server, tmp_path, judge_asks=asks, judge_template=None)
        with pytest.raises(
            ScoringError,
            match=(
                r"requires the prompt and at least two samples of the prompt, got [12] for"
                r" prompt"
            ),
        ):
            judge(requests)
    assert server.asked == []


def test_failed_judge_requests_are_retried(tmp_path: Path) -> None:
    failures = [Reply(500, b"out of memory"), Reply(0, b""), Reply(503, b"starting")]
    with judging(
        lambda _, number: failures[number % 3] if number % 2 else says("SCORE: 4")
    ) as server:
        assert judge_of(server, tmp_path, judge_concurrency=1)(REQUESTS) == [4.0] * 3
    assert len(server.answered) == 3 and nonzero_counts(tmp_path)["questions"] == 3


@pytest.mark.parametrize(
    "nonsense",
    [
        says("I cannot say."),
        says("SCORE: 11"),
        says(None),
        says(""),
        Reply(200, b"<html>"),
        Reply(200, b"[" * 100_000),
        Reply(200, {"choices": []}),
        Reply(200, {"error": "no"}),
        Reply(200, [1]),
    ],
)
def test_unreadable_answer_is_retried_then_refused(tmp_path: Path, nonsense: Reply) -> None:
    with judging(
        lambda question, _: nonsense if question == "2+2=5" else says("SCORE: 6")
    ) as server:
        judge = judge_of(server, tmp_path)
        with pytest.raises(
            ScoringError,
            match=r"in 3 attempts \(judge_tries\) for prompt '2\+2=' and response '5'",
        ) as raised:
            call_scorer("judge", judge, REQUESTS)
        assert not isinstance(raised.value, ScorerUnavailable)
        assert server.questions.count("2+2=5") == 3 and len(server.asked) == 5
        # The client scores the prompt again alone: cached answers send no request.
        with pytest.raises(ScoringError, match="in 3 attempts"):
            judge(REQUESTS)
        assert judge([REQUESTS[0], REQUESTS[2]]) == [6.0, 6.0]
        assert len(server.asked) == 5
        found = nonzero_counts(tmp_path)
        assert (
            found["questions"],
            found["asked_again"],
            found["unreadable"],
            found["from_cache"],
        ) == (3, 2, 1, 5)
        more = judge_of(server, tmp_path, judge_tries=4)
        with pytest.raises(ScoringError, match="in 4 attempts"):
            more(REQUESTS)
        assert len(server.asked) == 6


def test_second_attempt_gives_the_score(tmp_path: Path) -> None:
    with judging(lambda _, number: says("SCORE: 2") if number else says("Hm.")) as server:
        assert judge_of(server, tmp_path)(REQUESTS[:1]) == [2.0]
    found = nonzero_counts(tmp_path)
    assert (found["questions"], found["asked_again"], found["tokens_in"]) == (
        1,
        1,
        20,
    ) and "unreadable" not in found


def test_status_429_is_retried_after_given_delay(tmp_path: Path) -> None:
    with judging(
        lambda _, number: says("SCORE: 2") if number else Reply(429, b"", {"Retry-After": "1"})
    ) as server:
        start = time.monotonic()
        assert judge_of(server, tmp_path)(REQUESTS[:1]) == [2.0]
    assert time.monotonic() - start >= 1 and len(server.asked) == 2


def test_judge_timeout_keeps_earlier_answers(
    tmp_path: Path,
) -> None:
    done = threading.Event()

    def slow(question: str, _: int) -> Reply:
        if question != "2+2=4":
            done.wait(10)
        return says("SCORE: 2")

    with judging(slow) as server:
        try:
            judge = judge_of(server, tmp_path, judge_timeout_s=0.5, judge_concurrency=1)
            start = time.monotonic()
            with pytest.raises(
                ScorerUnavailable,
                match=r"/v1/chat/completions: no successful response within 0.5 s",
            ):
                call_scorer("judge", judge, REQUESTS)
            assert time.monotonic() - start < 3
            # The third request is not sent to a judge that timed out.
            assert server.questions == ["2+2=4", "2+2=5"]
        finally:
            done.set()
    assert nonzero_counts(tmp_path)["questions"] == 1


def test_judge_refusal_is_reported_without_api_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_JUDGE_KEY", " sk-secret\n")
    with judging(lambda *_: Reply(401, b"no such key: sk-secret")) as server:
        with pytest.raises(
            ScoringError, match=r"got status 401, 'no such key: \*\*\*'; expected status 200"
        ) as raised:
            judge_of(server, tmp_path, judge_key_variable="TEST_JUDGE_KEY")(REQUESTS[:1])
        assert server.keys == ["Bearer sk-secret"] and len(server.asked) == 1
        assert "secret" not in repr(raised.value) + repr(HttpEndpoint("http://a", 1, "sk-secret"))
        monkeypatch.setenv("TEST_JUDGE_KEY", "sk\nsecret")
        for name, problem in (
            ("TEST_JUDGE_KEY", "the API key in the environment variable is not valid"),
            ("TEST_NO_KEY", "the environment variable is not set"),
        ):
            with pytest.raises(
                ConfigError, match=rf"reward.judge_key_variable={name}: .*{problem}"
            ):
                judge_of(server, tmp_path, judge_key_variable=name)
    assert not [
        path for path in tmp_path.rglob("*") if path.is_file() and b"secret" in path.read_bytes()
    ]


def test_judges_share_cached_answers_of_a_directory(tmp_path: Path) -> None:
    with judging(lambda *_: says("SCORE: 5")) as server:
        judge_of(server, tmp_path)(REQUESTS)
        assert judge_of(server, tmp_path)(REQUESTS) == [5.0] * 3
        assert len(server.asked) == 3
        shared = str(tmp_path / "run" / "shared")  # a cache of two runs
        assert judge_of(server, tmp_path / "a", judge_cache=shared)(REQUESTS) == [5.0] * 3
        assert judge_of(server, tmp_path / "b", judge_cache=shared)(REQUESTS) == [5.0] * 3
        assert len(server.asked) == 6
        # Another temperature makes another cache key.
        assert judge_of(server, tmp_path, judge_temperature=0.5)(REQUESTS) == [5.0] * 3
        assert len(server.asked) == 9
    found = nonzero_counts(tmp_path)
    assert (found["questions"], found["from_cache"]) == (6, 3)


def test_judge_concurrency_limits_requests_in_flight(tmp_path: Path) -> None:
    def slowly(*_: object) -> Reply:
        time.sleep(0.05)
        return says("SCORE: 5")

    requests = [ScoringRequest("a", str(number)) for number in range(12)]
    with judging(slowly) as server:
        judge_of(server, tmp_path, judge_concurrency=3)(requests)
    assert 1 < server.most_at_a_time <= 3 and len(server.asked) == 12


def test_judge_requests_per_minute_are_limited(tmp_path: Path) -> None:
    start = time.monotonic()
    with judging(lambda *_: says("SCORE: 5")) as server:
        judge_of(server, tmp_path, judge_requests_per_minute=300)(REQUESTS)
    assert time.monotonic() - start >= 0.4


def test_rate_limit_delay_is_not_part_of_timeout(tmp_path: Path) -> None:
    rate_limiter = RateLimiter(100)  # 0.6 s apart
    assert rate_limiter.wait() == 0
    with judging(lambda *_: says("SCORE: 5")) as server:
        endpoint = HttpEndpoint(f"{server.url}/chat/completions", 0.3, rate_limiter=rate_limiter)
        question = json.dumps({"messages": [{"content": "a"}]}).encode()
        assert json.loads(endpoint.post(question))["choices"]


def test_meter_reports_new_counts_and_total_run_cost(tmp_path: Path) -> None:
    meter = JudgeMeter([tmp_path], "mine")
    assert meter.metrics() == {f"judge/{name}": 0.0 for name in (*COUNTS, "cost_total")}
    ledger, another = JudgeLedger(tmp_path, "mine"), JudgeLedger(tmp_path, "theirs")
    ledger.add_counts({"questions": 2, "cost": 0.5})
    another.add_counts({"questions": 100})
    assert {name: amount for name, amount in meter.metrics().items() if amount} == {
        "judge/questions": 2,
        "judge/cost": 0.5,
        "judge/cost_total": 0.5,
    }
    ledger.add_counts({"questions": 1, "cost": 0.25})
    resumed = JudgeMeter([tmp_path], "mine")
    assert resumed.metrics()["judge/questions"] == 0
    metrics_after_resume = meter.metrics()
    assert (
        metrics_after_resume["judge/questions"],
        metrics_after_resume["judge/cost"],
        metrics_after_resume["judge/cost_total"],
    ) == (
        1,
        0.25,
        0.75,
    )


def test_uncommitted_answer_is_discarded(
    tmp_path: Path,
) -> None:
    """A second connection closes without a commit, like a killed process."""
    ledger = JudgeLedger(tmp_path, "mine")
    with closing(sqlite3.connect(tmp_path / "answers.sqlite")) as killed:
        killed.execute("INSERT INTO answers VALUES ('a', 1, '{}')")
    assert ledger.find_answer("a") is None
    ledger.store_answer("a", 1, parse_completion(says("b").body), {"questions": 1})
    assert ledger.find_answer("a") == (1, parse_completion(says("b").body))


def test_unusable_judge_directory_is_reported(tmp_path: Path) -> None:
    (tmp_path / "judge").write_text("")
    source = JudgeSource(name="judge", key="reward", judge_url="http://a", judge_model="b")
    with pytest.raises(ConfigError, match=r"cannot read or write the judge's answers"):
        build_judge(source, RunPaths(tmp_path))


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("SCORE: 7", 7.0),
        ("SCORE: 1\nno, SCORE:\n 3.5/10", 3.5),
        ("SCORE: -1", None),
        ("SCORE: 10.5", None),
        ("7", None),
        ("score: 7", None),
        ("", None),
    ],
)
def test_score_is_read_from_last_match_within_bounds(text: str, score: float | None) -> None:
    assert parse_score(text, PATTERN, 0, 10) == score


def test_custom_pattern_reads_only_finite_scores() -> None:
    assert parse_score("<grade>B</grade>", r"<grade>(\w)</grade>", 0, 10) is None
    assert parse_score("4 of 5", r"(\d)? of", 0, 5) == 4
    assert parse_score(" of 5", r"(\d)? of", 0, 5) is None
    assert parse_score("nan", r"(\w+)", 0, 5) is None


def test_yes_probability_is_read_from_logprobs() -> None:
    assert parse_yes_probability([("Yes", math.log(0.3)), ("no", math.log(0.1))]) == pytest.approx(
        0.75
    )
    assert parse_yes_probability([("Sure", 0.0)]) is None and parse_yes_probability([]) is None
    assert parse_yes_probability([("yes", -math.inf), ("no", math.nan)]) is None


@pytest.mark.parametrize(
    ("text", "won"),
    [
        ("VERDICT: A", 1.0),
        ("VERDICT: A. No, **verdict: b**", 0.0),
        ("VERDICT: tie", 0.5),
        ("B", 0.0),
        (" [Tie]. ", 0.5),
        ("VERDICT: Actually none", None),
        ("A is better", None),
        ("", None),
    ],
)
def test_verdict_is_read_from_judge_answer(text: str, won: float | None) -> None:
    assert parse_verdict(text) == won


@pytest.mark.parametrize(
    ("text", "worth"),
    [
        ("RANKING: 2 > 1 > 3", [0.5, 1.0, 0.0]),
        ("RANKING: 1 > 2 > 3, or better RANKING: [3]>[2] > [1]", [0.0, 0.5, 1.0]),
        ("3 > 1 > 2", [0.5, 0.0, 1.0]),
        ("RANKING: 2 > 1", None),
        ("RANKING: 1 > 2 > 2", None),
        ("RANKING: 1 > 2 > 4", None),
        ("RANKING: 1 > 2 > 99999999999999", None),
        ("first, second, third", None),
    ],
)
def test_ranking_is_read_from_judge_answer(text: str, worth: list[float] | None) -> None:
    assert parse_ranking(text, 3) == worth


def test_malformed_judge_response_fields_are_ignored() -> None:
    for body in (None, 1, [], {}, {"choices": None}, {"choices": [{"message": None}]}):
        assert parse_completion(body).content is None
    odd = {
        "choices": [
            {
                "message": {"content": "a"},
                "logprobs": {"content": [{"top_logprobs": [{"token": "a"}]}]},
            }
        ],
        "usage": 5,
    }
    assert parse_completion(odd) == parse_completion(
        json.loads('{"choices": [{"message": {"content": "a"}}]}')
    )
