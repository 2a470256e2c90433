"""Pass rates of prompts, the sampling curriculum, and filters by pass rate."""

from __future__ import annotations

import json
import random
import re
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.checks.check import check
from aligner.config.compose import compose_config
from aligner.data.model_directory import prepare_model
from aligner.data.pass_rates import PassRates, PromptOutcome, PromptSelector, collect_outcomes
from aligner.data.prompts import PromptStream, open_prompts
from aligner.data.tokenizer import Tokenizer
from aligner.data.types import Prompt
from aligner.errors import AlignerError, ConfigError
from aligner.schema import CurriculumConfig, DataConfig

NAN = float("nan")


def stream(*sizes, seed=1, weights=None, **curriculum) -> PromptStream:
    """Build a stream whose prompt texts are the prompts' numbers, counted over all sources."""
    numbers = iter(range(sum(sizes)))
    sources = [
        [Prompt(0, str(next(numbers)), torch.tensor([5])) for _ in range(size)] for size in sizes
    ]
    made = PromptStream(sources, weights, seed=seed, shuffle=True)
    made.selector = PromptSelector(CurriculumConfig(**curriculum), seed)
    return made


def of_rates(rates, number=0) -> PassRates:
    """Return pass rates of prompts that were sampled once, in pass `number`.

    A prompt with rate NaN was never sampled.
    """
    found = PassRates.empty(len(rates))
    known = [(place, rate) for place, rate in enumerate(rates) if rate == rate]
    return found.with_outcomes(
        [PromptOutcome(0, place, number, 1, rate) for place, rate in known], decay=1.0
    )


def test_pass_counts_ignore_samples_without_score():
    places = {3: (1, 0), 8: (0, 1), 5: (2, 0)}
    scores = torch.tensor([1.0, 0.0, 0.5, NAN, NAN, NAN, 2.0, -1.0, 0.4])
    ids = [8, 8, 8, 5, 5, 5, 3, 3, 3]
    assert collect_outcomes(ids, scores, places.__getitem__, 0.5) == [
        PromptOutcome(3, 1, 0, 3, 1.0),
        PromptOutcome(5, 2, 0, 0, 0.0),
        PromptOutcome(8, 0, 1, 3, 2.0),
    ]
    graded = collect_outcomes(ids, scores, places.__getitem__, None)
    assert [(one.sample_count, one.pass_count) for one in graded] == [
        (3, pytest.approx(1.4)),
        (0, 0.0),
        (3, 1.5),
    ]


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.5, 1.0]))
def test_pass_rate_equals_memory_weighted_reference(seed, memory):
    draw = random.Random(seed)
    rates, histories = PassRates.empty(3), [[] for _ in range(3)]
    for step in range(6):
        drawn = []
        for example in draw.sample(range(3), 2):
            samples = draw.randrange(4)
            passed = draw.randint(0, samples)
            drawn.append(PromptOutcome(step, example, step, samples, float(passed)))
            histories[example].append((step, samples, passed))
        before = rates.selection_counts.clone()
        after = rates.with_outcomes(drawn, memory)
        assert torch.equal(rates.selection_counts, before), (
            "what a batch that is drawn ahead has been given stays"
        )
        rates = after
    for example, history in enumerate(histories):
        scored = [(samples, passed) for _, samples, passed in history if samples]
        weights = [memory ** (len(scored) - 1 - place) for place in range(len(scored))]
        samples = sum(
            weight * samples for weight, (samples, _) in zip(weights, scored, strict=True)
        )
        passed = sum(weight * passed for weight, (_, passed) in zip(weights, scored, strict=True))
        expected = passed / samples if scored else NAN
        assert float(rates.compute_rates()[example]) == pytest.approx(
            expected, rel=1e-12, nan_ok=True
        )
        assert int(rates.selection_counts[example]) == len(history)
        assert int(rates.last_epochs[example]) == max((step for step, _, _ in history), default=-1)


def test_prompt_outside_range_rests_and_is_retried():
    prompts = stream(6, between=[0.1, 0.9], rest_passes=2)
    rates = of_rates([0.5, 0.0, 1.0, 0.1, 0.9, NAN])
    taken, end = prompts.select(6, 20, rates)
    assert [prompt.id for prompt in taken] == sorted(
        {prompt.id for prompt in taken}
    ) and end == taken[-1].id + 1
    passes = [
        Counter(int(prompt.text) for prompt in taken if prompt.id // 6 == number)
        for number in (1, 2, 3, 4)
    ]
    assert passes[0] == passes[1] == Counter([0, 3, 4, 5]), (
        "those that always or never pass rest in the second and third"
    )
    assert passes[2] == passes[3] == Counter(range(6))
    assert all(prompt.text == prompts.take(prompt.id, 1)[0].text for prompt in taken), (
        "a prompt's place says which it is"
    )


def test_too_few_prompts_in_range_raises():
    prompts = stream(5, between=[0.1, 0.9], rest_passes=0)
    rates = of_rates([0.5, 0.0, 1.0, 0.5, 0.0])
    taken, _ = prompts.select(500, 2, rates)
    assert {prompt.text for prompt in taken} <= {"0", "3"}
    with pytest.raises(
        AlignerError,
        match=(
            r"between=\[0.1, 0.9\]: 3 prompts are required, but only 2 of 5 have a pass rate in"
        ),
    ):
        prompts.select(500, 3, rates)


def test_sampling_frequency_equals_configured_chance():
    prompts = stream(5, target=0.5, min_probability=0.05)
    taken, end = prompts.select(5, 4000, of_rates([0.0, 0.1, 0.5, 0.8, NAN]))
    counts, passes = Counter(int(prompt.text) for prompt in taken), (end - 5) / 5
    for example, chance in enumerate([0.05, 4 * 0.1 * 0.9, 1.0, 4 * 0.8 * 0.2, 1.0]):
        assert counts[example] / passes == pytest.approx(
            chance, abs=3.5 / passes**0.5 * 0.5 + 1 / passes
        )
    assert [len(prompts.select(5, count, of_rates([0.0] * 5))[0]) for count in (0, 1, 3)] == [
        0,
        1,
        3,
    ]


@pytest.mark.parametrize("target", [0.2, 0.5, 0.9])
def test_sampling_chance_peaks_at_target(target):
    rule = PromptSelector(CurriculumConfig(target=target, min_probability=1e-9), 1)
    chances = [rule.selection_probability(number / 100) for number in range(101)]
    assert max(range(101), key=chances.__getitem__) == round(100 * target) and max(
        chances
    ) == pytest.approx(1)
    top = round(100 * target)
    assert chances[: top + 1] == sorted(chances[: top + 1]) and chances[top:] == sorted(
        chances[top:], reverse=True
    )
    assert PromptSelector(CurriculumConfig(), 1).selection_probability(0.0) == 1


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_sampled_prompts_do_not_depend_on_batch_size(data):
    sizes = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    weights = [data.draw(st.sampled_from([0.3, 1.0, 2.0])) for _ in sizes]
    rates = of_rates(
        [data.draw(st.sampled_from([0.0, 0.3, 0.5, 1.0, NAN])) for _ in range(sum(sizes))]
    )
    given_all = {
        "weights": weights,
        "between": [0.1, 0.9],
        "target": 0.4,
        "seed": data.draw(st.integers(0, 9)),
    }
    start, count = data.draw(st.integers(0, 3000)), data.draw(st.integers(1, 12))
    taken, end = stream(*sizes, **given_all).select(start, count, rates)
    cut = data.draw(st.integers(0, count))
    other = stream(*sizes, **given_all)
    first, middle = other.select(start, cut, rates)
    second, last = other.select(middle, count - cut, rates)
    assert [prompt.id for prompt in first + second] == [
        prompt.id for prompt in taken
    ] and last == end


def test_pass_rates_load_only_for_the_same_prompts(tmp_path):
    rates = PassRates.empty(3, 7)
    for drawn, memory in (
        ([PromptOutcome(0, 1, 4, 3, 0.1 + 0.2), PromptOutcome(1, 2, 0, 1, 1.0)], 1.0),
        ([PromptOutcome(2, 1, 5, 3, 1e-9)], 0.3),
    ):
        rates = rates.with_outcomes(drawn, memory)
    rates.save(tmp_path / "pass_rates")
    found = PassRates.empty(3, 7).load(tmp_path / "pass_rates")
    assert found is not None and found.checksum == 7
    assert all(
        torch.equal(getattr(found, name), getattr(rates, name))
        for name in ("selection_counts", "last_epochs", "sample_counts", "pass_counts")
    )
    assert PassRates.empty(4, 7).load(tmp_path / "pass_rates") is None
    assert PassRates.empty(3, 8).load(tmp_path / "pass_rates") is None
    (tmp_path / "pass_rates" / "pass_rates.safetensors").write_bytes(b"no")
    with pytest.raises(AlignerError, match="cannot be read"):
        found.load(tmp_path / "pass_rates")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    run = tmp_path_factory.mktemp("run")
    return Tokenizer(prepare_model(compose_config(["experiment=tiny_ppo", f"run.dir={run}"])))


def written(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def texts(data, tokenizer):
    opened = open_prompts(data, tokenizer, seed=1)
    return [prompt.text for prompt in opened.iterate_examples()], opened.notices


RATED = [
    {"prompt": text, "solved": rate}
    for text, rate in {"a": 0.5, "b": 0.0, "c": 1.0, "d": 0.9}.items()
]


def test_records_are_filtered_and_sorted_by_pass_rate(tokenizer, tmp_path):
    path = written(tmp_path / "rated.jsonl", RATED)
    data = DataConfig(path=path, fields={"pass_rate": "solved"}, pass_rate=[0.1, 0.9])
    kept, (notice,) = texts(data, tokenizer)
    assert kept == ["a", "d"]
    assert notice.endswith(
        f"skipped 2 of 4 records; first problem: {path}:2: `pass_rate` 0 is outside"
        " data.pass_rate=[0.1, 0.9]"
    )
    easy_first = DataConfig(path=path, sort_by="-solved", shuffle=False)
    assert texts(easy_first, tokenizer)[0] == ["c", "d", "a", "b"]
    assert [prompt.text for prompt in open_prompts(easy_first, tokenizer, 1).take(3, 3)] == [
        "b",
        "c",
        "d",
    ], "pass by pass"
    assert texts(DataConfig(path=path, sort_by="solved", shuffle=False), tokenizer)[0] == [
        "b",
        "a",
        "d",
        "c",
    ]


def test_abstentions_do_not_count_in_stored_pass_rates(tokenizer, tmp_path):
    path = written(tmp_path / "plain.jsonl", [{"prompt": text} for text in "abc"])
    scored = [("a", 1), ("a", None), ("b", 0), ("b", None), ("c", None)]
    samples = written(
        tmp_path / "samples.jsonl", [{"prompt": text, "score": score} for text, score in scored]
    )
    data = DataConfig(path=path, pass_rate_samples=samples, pass_rate=[0.0, 1.0])
    chosen, notices = texts(data, tokenizer)
    assert sorted(chosen) == ["a", "b"]
    assert "has no sample of this record's prompt with a score" in str(notices)


def test_records_are_filtered_by_stored_samples(tokenizer, tmp_path):
    path = written(tmp_path / "plain.jsonl", [{"prompt": text, "answer": "1"} for text in "abc"])
    scored = [("a", 1), ("a", 0), ("b", 1), ("b", 1), ("c", 0.5), ("c", 0)]
    samples = written(
        tmp_path / "samples.jsonl", [{"prompt": text, "score": score} for text, score in scored]
    )
    data = DataConfig(path=path, pass_rate_samples=samples, pass_rate=[0.1, 0.9])
    assert texts(data, tokenizer)[0] == ["a"]
    data.pass_threshold = None
    assert texts(data, tokenizer)[0] == ["a", "c"]
    data.pass_rate, data.sort_by, data.shuffle = [], "-pass_rate", False
    assert texts(data, tokenizer)[0] == ["b", "a", "c"]
    (prompt,) = open_prompts(data, tokenizer, 1).take(2, 1)
    assert prompt.metadata == {"answer": "1", "pass_rate": 0.25}
    written(tmp_path / "plain.jsonl", [{"prompt": "a"}, {"prompt": "new"}])
    with pytest.raises(
        ConfigError,
        match=r"plain.jsonl:2: data.pass_rate_samples=.* has no sample of this record's prompt",
    ):
        texts(data, tokenizer)
    written(tmp_path / "samples.jsonl", [{"prompt": "a", "response": "1"}])
    with pytest.raises(
        ConfigError, match=r"samples.jsonl:1: record lacks field `score` \(a number\)"
    ):
        texts(data, tokenizer)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a"}, "record lacks field `pass_rate` (a number)"),
        ({"prompt": "a", "pass_rate": 1.5}, "field `pass_rate` is 1.5, must be in [0, 1]"),
        ({"prompt": "a", "pass_rate": True}, "field `pass_rate` is True, must be a finite number"),
    ],
)
def test_missing_or_invalid_pass_rate_is_refused(tokenizer, tmp_path, record, message):
    path = written(tmp_path / "bad.jsonl", [record])
    with pytest.raises(ConfigError, match=re.escape(message)):
        texts(DataConfig(path=path, pass_rate=[0.1, 0.9]), tokenizer)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("data.pass_rate=[0.9,0.1]", "data.pass_rate=[0.9, 0.1]: must be [LOW, HIGH]"),
        ("data.curriculum.between=[0.5]", "data.curriculum.between=[0.5]: must be [LOW, HIGH]"),
        ("data.curriculum.between=[0,2]", "data.curriculum.between=[0, 2]: must be [LOW, HIGH]"),
        ("data.curriculum.target=1", "data.curriculum.target"),
        ("data.sort_by=hardness", "data.sort_by=hardness: is not supported with data.shuffle=true"),
        ("data.pass_rate_samples=none.jsonl", "data.pass_rate_samples=none.jsonl: no such file"),
        (
            "data.pass_rate_samples=none.jsonl",
            "has no effect without data.pass_rate or data.sort_by; set data.pass_rate=[LOW, HIGH]",
        ),
    ],
)
def test_invalid_pass_rate_configuration_is_refused(given, message):
    with pytest.raises(ConfigError) as caught:
        check(compose_config(["experiment=tiny_ppo", given]))
    assert message in str(caught.value)
