"""Training examples of the offline trainers, read from records of every supported form."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from aligner.config.compose import compose_config
from aligner.data.examples import (
    Demonstration,
    LabeledSteps,
    Preference,
    RunData,
    open_demonstrations,
    open_labeled_answers,
    open_labeled_steps,
    open_preferences,
    open_run_data,
)
from aligner.data.model_directory import prepare_model
from aligner.data.prompts import open_evaluation_prompts, open_prompts
from aligner.data.records import has_steps
from aligner.data.tokenizer import Tokenizer
from aligner.errors import ConfigError
from aligner.schema import (
    AlgorithmConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    RunConfig,
)
from aligner.schema.evaluation_suites import Suite

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}<eos> {% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
USER = {"role": "user", "content": "1+1?"}
SHORT, LONG = ({"role": "assistant", "content": text} for text in ("2", "it is 2"))
CHAT_PROMPT = "user: 1+1? assistant: "


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Tokenizer:
    run = tmp_path_factory.mktemp("run")
    return Tokenizer(prepare_model(compose_config(["experiment=tiny_ppo", f"run.dir={run}"])))


@pytest.fixture(scope="module")
def chat(plain, tmp_path_factory) -> Tokenizer:
    directory = shutil.copytree(plain.directory, tmp_path_factory.mktemp("chat") / "model")
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return Tokenizer(directory)


@pytest.fixture
def data(tmp_path):
    """Return a function that writes records to a file and returns its configuration."""

    def written(*records, **settings) -> DataConfig:
        path = tmp_path / "records.jsonl"
        path.write_text(
            "".join(
                (record if isinstance(record, str) else json.dumps(record)) + "\n"
                for record in records
            )
        )
        return DataConfig(path=str(path), shuffle=False, **settings)

    return written


def parts(tokenizer: Tokenizer, demonstration) -> tuple[str, str]:
    """Return prompt and response as text; check that the only EOS token is the last token."""
    tokens, length = demonstration.tokens, demonstration.prompt_length
    assert tokens.dtype == torch.int64
    assert (tokens[length:] == tokenizer.eos_token_ids[0]).nonzero().tolist() == [
        [tokens.numel() - length - 1]
    ]
    return tokenizer.decode(tokens[:length]), tokenizer.decode(tokens[length:])


def test_plain_demonstration_ends_with_eos(plain, data):
    stream = open_demonstrations(
        data({"prompt": "1+1=", "response": " 2"}, {"prompt": "a", "response": "b<eos>"}), plain, 1
    )
    assert [parts(plain, each) for each in stream.take(0, 3)] == [
        ("1+1=", " 2"),
        ("a", "b"),
        ("1+1=", " 2"),
    ]
    assert len(stream) == 2


def test_end_of_sequence_is_omitted_if_disabled(plain, data):
    pair = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    (open_pair,) = open_preferences(
        data(pair, end_of_sequence=False, max_response_tokens=2), plain, 1
    ).take(0, 1)
    (ended_pair,) = open_preferences(data(pair, max_response_tokens=2), plain, 1).take(0, 1)
    for bare, ended in zip(
        (open_pair.chosen, open_pair.rejected),
        (ended_pair.chosen, ended_pair.rejected),
        strict=True,
    ):
        assert torch.equal(
            torch.cat([bare.tokens, torch.tensor(plain.eos_token_ids[:1])]), ended.tokens
        )


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [USER, SHORT]},
        {"prompt": [USER], "response": "2"},
        {"prompt": [USER], "response": [SHORT]},
        {"prompt": "ignored", "response": [USER, SHORT]},
    ],
)
def test_chat_demonstration_is_rendered_by_template(chat, data, record):
    (demonstration,) = open_demonstrations(data(record), chat, 1).take(0, 1)
    assert parts(chat, demonstration) == (CHAT_PROMPT, "2")


def test_last_answer_of_several_turns_is_the_response(chat, data):
    (demonstration,) = open_demonstrations(
        data({"messages": [USER, SHORT, USER, LONG]}), chat, 1
    ).take(0, 1)
    assert parts(chat, demonstration) == ("user: 1+1? assistant: 2 " + CHAT_PROMPT, "it is 2")


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": [USER], "chosen": "2", "rejected": "it is 2"},
        {"prompt": [USER], "chosen": [SHORT], "rejected": [LONG]},
        {"chosen": [USER, SHORT], "rejected": [USER, LONG]},
    ],
)
def test_preference_forms_give_two_answers_to_one_prompt(chat, data, record):
    (preference,) = open_preferences(data(record), chat, 1).take(0, 1)
    assert parts(chat, preference.chosen) == (CHAT_PROMPT, "2")
    assert parts(chat, preference.rejected) == (CHAT_PROMPT, "it is 2")
    assert preference.margin is None


def test_plain_preference_has_its_margin(plain, data):
    (preference,) = open_preferences(
        data({"prompt": "a", "chosen": "b", "rejected": "c", "margin": 2}), plain, 1
    ).take(0, 1)
    assert (parts(plain, preference.chosen), parts(plain, preference.rejected)) == (
        ("a", "b"),
        ("a", "c"),
    )
    assert preference.margin == 2.0


@pytest.mark.parametrize("margin", [2, -1, "x"])
def test_margin_is_ignored_if_disabled(plain, data, margin):
    settings = data({"prompt": "a", "chosen": "b", "rejected": "c", "margin": margin}, margin=False)
    (preference,) = open_preferences(settings, plain, 1).take(0, 1)
    assert preference.margin is None


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ({}, "record lacks field `margin`"),
        ({"margin": 0.5}, "field `margin` is ignored because data.margin=false"),
    ],
)
def test_missing_required_margin_is_refused(plain, data, written, problem):
    settings = data({"prompt": "a", "chosen": "b", "rejected": "c", **written}, margin=not written)
    with pytest.raises(ConfigError, match=rf":1: {problem}; kind=rpo_sq requires it"):
        open_preferences(settings, plain, 1, margin_for="kind=rpo_sq")


@pytest.mark.parametrize(("label", "wanted"), [(True, True), (0, False)])
def test_labeled_answer_is_desirable_or_undesirable(plain, data, label, wanted):
    (example,) = open_labeled_answers(
        data({"prompt": "a", "response": "b", "label": label}), plain, 1
    ).take(0, 1)
    assert (parts(plain, example.answer), example.is_desirable) == (("a", "b"), wanted)


@pytest.mark.parametrize("written", [{}, {"label": "yes"}, {"label": 2}, {"label": None}])
def test_invalid_label_is_refused(plain, data, written):
    with pytest.raises(
        ConfigError, match=rf":1: field `label` is {written.get('label')!r}, must be true or false"
    ):
        open_labeled_answers(data({"prompt": "a", "response": "b", **written}), plain, 1)


@pytest.mark.parametrize("prompt", ["1+1=", [USER]])
def test_step_labels_are_at_last_token_of_each_step(chat, data, prompt):
    record = {"prompt": prompt, "steps": ["1+1 ", "is 3.", "so 2"], "labels": [1, 0, True]}
    assert has_steps(data(record))
    (example,) = open_labeled_steps(data(record), chat, 1).take(0, 1)
    length = example.prompt_length
    assert chat.decode(example.tokens[:length]) == ("1+1=" if prompt == "1+1=" else CHAT_PROMPT)
    assert chat.decode(example.tokens[length:]) == "1+1 is 3.so 2"
    assert [chat.decode(example.tokens[length : place + 1]) for place in example.positions] == [
        "1+1 ",
        "1+1 is 3.",
        "1+1 is 3.so 2",
    ]
    assert example.labels.tolist() == [1.0, 0.0, 1.0]


def test_has_steps_is_false_for_preferences(data):
    assert not has_steps(data({"prompt": "a", "chosen": "b", "rejected": "c"}))


def test_last_answer_is_omitted_from_chat_prompt(chat, data):
    records = ({"prompt": [USER], "answer": "2"}, {"messages": [USER, SHORT], "answer": "2"})
    for prompt in open_prompts(data(*records), chat, 1).take(0, 2):
        assert (prompt.text, prompt.metadata) == ("user: 1+1?<eos> assistant: ", {"answer": "2"})


BAD_DEMONSTRATIONS = [
    ({"prompt": "a"}, "record lacks field `response` \\(a string\\); fields of the record: prompt"),
    (
        {"response": "a"},
        "record lacks field `prompt` \\(a string\\); fields of the record: response",
    ),
    ({"prompt": "a", "response": 3}, "field `response` must be a string, got int"),
    ({"prompt": "a", "response": " "}, "field `response` is empty"),
    (
        {"prompt": "a", "response": "abcd"},
        r"the response has 5 tokens, allowed: 1 to data\.max_response_tokens=4: 'abcd'",
    ),
    (
        {"prompt": "a" * 65, "response": "b"},
        r"the prompt has 65 tokens, allowed: 1 to data\.max_prompt_tokens=64",
    ),
    ({"prompt": "a", "response": "É"}, "lacks"),
    (
        {"prompt": "a", "response": "b \ud83d"},
        r"'b \\ud83d' cannot be tokenized: it is not valid UTF-8",
    ),
    (
        {"messages": [USER, {"role": "assistant", "content": "\ud83d"}]},
        "it is not valid UTF-8",
    ),
    ({"messages": []}, "field `messages` is an empty list"),
    (
        {"messages": [USER]},
        "messages: the last message has role 'user', must have role 'assistant'",
    ),
    (
        {"messages": [SHORT]},
        "messages: the assistant's last message must follow a message with another role",
    ),
    (
        {"messages": [USER, SHORT, SHORT]},
        "messages: the assistant's last message must follow a message with another role",
    ),
    ({"messages": [USER, {"role": "assistant", "content": ""}]}, "the last message is empty"),
    (
        {"messages": [USER, {"role": "assistant"}]},
        r"messages\[1\]: a message must have `role` and `content`, both strings",
    ),
    ("{", "not valid JSON"),
]


@pytest.mark.parametrize(("record", "message"), BAD_DEMONSTRATIONS)
def test_invalid_demonstration_is_refused_with_location(chat, data, record, message):
    with pytest.raises(ConfigError, match=rf"records\.jsonl:2: .*{message}"):
        open_demonstrations(
            data({"prompt": "a", "response": "b"}, record, max_response_tokens=4), chat, 1
        )


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "record lacks field `rejected` \\(a string\\)"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "`chosen` and `rejected` are identical"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "field `rejected` is empty"),
        (
            {"prompt": "a", "chosen": "b", "rejected": "c", "margin": -1},
            "field `margin` is -1, must be a finite number >= 0",
        ),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "x"}, "field `margin` is 'x'"),
        (
            {"chosen": [USER, SHORT], "rejected": [{"role": "user", "content": "hi"}, LONG]},
            "`chosen` and `rejected` must have the same prompt",
        ),
    ],
)
def test_invalid_preference_is_refused_with_location(chat, data, record, message):
    with pytest.raises(ConfigError, match=rf"records\.jsonl:1: .*{message}"):
        open_preferences(data(record), chat, 1)


@pytest.mark.parametrize(
    ("steps", "labels", "message"),
    [
        (["a", "b"], [1], "got 2 `steps` but 1 `labels`"),
        (["a", " "], [1, 0], r"steps\[1\] is ' ', must be a non-empty string"),
        (["a", "b"], [1, 2], r"labels\[1\] is 2, must be 0 or 1"),
        (["a"], [None], r"labels\[0\] is None"),
        ([], [], "field `steps` is an empty list"),
        (
            ["abc", "de"],
            [1, 1],
            (
                r"text of steps\[1\] has 2 tokens, allowed: 1 to data\.max_response_tokens=4, shared"
                r" by all steps"
            ),
        ),
    ],
)
def test_invalid_steps_are_refused_with_location(plain, data, steps, labels, message):
    with pytest.raises(ConfigError, match=rf"records\.jsonl:1: .*{message}"):
        open_labeled_steps(
            data({"prompt": "x", "steps": steps, "labels": labels}, max_response_tokens=4), plain, 1
        )


def test_missing_template_is_refused_with_skip_bad_records(plain, data):
    records = ({"prompt": "a", "response": "b"}, {"messages": [USER, SHORT]})
    with pytest.raises(ConfigError, match="chat messages require a chat template"):
        open_demonstrations(data(*records, skip_bad_records=True), plain, 1)


def test_template_that_changes_prompt_is_refused(plain, data, tmp_path):
    directory = shutil.copytree(plain.directory, tmp_path / "model")
    (directory / "chat_template.jinja").write_text(
        "{{ messages | length }}{{ messages[-1].content }}"
    )
    with pytest.raises(ConfigError, match="renders the prompt differently when a response follows"):
        open_demonstrations(data({"messages": [USER, SHORT]}), Tokenizer(directory), 1)


def test_invalid_records_are_skipped_on_request(chat, data):
    good = {"prompt": "a", "response": "b"}
    records = [record for record, _ in BAD_DEMONSTRATIONS]
    settings = data(good, *records, good, skip_bad_records=True, max_response_tokens=4)
    stream = open_demonstrations(settings, chat, 1)
    assert [parts(chat, each) for each in stream.take(0, 3)] == [("a", "b")] * 3
    assert len(stream) == 2
    (notice,) = stream.notices
    assert (
        f"skipped {len(records)} of {len(records) + 2} records; first problem: {settings.path}:2:"
        " record lacks field `response`" in notice
    )
    with pytest.raises(ConfigError, match="none of the 1 records can be used"):
        open_demonstrations(data(records[0], skip_bad_records=True), chat, 1)


SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
PAIRS = [{"prompt": "ab", "chosen": letter, "rejected": letter * 2} for letter in "cdefg"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    run = RunConfig(dir=str(tmp_path_factory.mktemp("run")))
    return Tokenizer(
        prepare_model(Config(run=run, model=ModelConfig(source="random", config=SHAPE)))
    )


def written(file: Path, records: Sequence[Mapping[str, Any]]) -> str:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


def opened(trainer: str, tokenizer: Tokenizer, path: str, **data: Any) -> RunData:
    return open_run_data(
        Config(algorithm=AlgorithmConfig(trainer=trainer), data=DataConfig(path=path, **data)),
        tokenizer,
    )


@pytest.mark.promise("held-out-rows-are-never-trained")
@pytest.mark.parametrize("trainer", ["sft", "dpo", "reward_model"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_held_out_rows_are_never_trained_on(
    tokenizer: Tokenizer, tmp_path: Path, trainer: str, shuffle: bool
) -> None:
    path = written(tmp_path / "rows.jsonl", [pair | {"response": pair["chosen"]} for pair in PAIRS])
    data = opened(trainer, tokenizer, path, held_out=2, shuffle=shuffle)
    again = opened(trainer, tokenizer, path, held_out=2, shuffle=shuffle)

    def answers(rows: Sequence[Any]) -> list[str]:
        return [
            tokenizer.decode((row if trainer == "sft" else row.chosen).tokens[2:]) for row in rows
        ]

    kept = answers(data.held_out)
    assert kept == answers(again.held_out) and len(kept) == 2 and (kept == ["f", "g"]) != shuffle
    assert set(answers(data.examples.take(0, 9))) == set("cdefg") - set(kept)
    how = (
        "selected at random with seed=1"
        if shuffle
        else "the last records, because data.shuffle=false"
    )
    assert data.notices == (
        f"data.held_out=2: records of each source held out for evaluation, {how}",
    )


def test_holding_out_all_records_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = written(tmp_path / "pairs.jsonl", PAIRS)
    with pytest.raises(
        ConfigError, match=r"data\.held_out=5: the data has only 5 records; hold out fewer records"
    ):
        opened("dpo", tokenizer, path, held_out=5)


def test_reward_model_accepts_pairs_or_labeled_steps(tokenizer: Tokenizer, tmp_path: Path) -> None:
    pairs = opened("reward_model", tokenizer, written(tmp_path / "pairs.jsonl", PAIRS))
    assert (
        isinstance(pairs.examples.take(0, 1)[0], Preference) and pairs.normalization_samples is None
    )
    path = written(
        tmp_path / "steps.jsonl", [{"prompt": "ab", "steps": ["c", "de"], "labels": [1, 0]}]
    )
    steps = opened("reward_model", tokenizer, path)
    assert isinstance(steps.examples.take(0, 1)[0], LabeledSteps)
    samples = written(tmp_path / "samples.jsonl", [{"prompt": "ab", "response": "c"}])
    with pytest.raises(ConfigError, match="is not supported for records with `steps`"):
        opened("reward_model", tokenizer, path, normalization=samples)


def test_normalization_uses_first_samples_of_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    samples = written(
        tmp_path / "samples.jsonl",
        [{"prompt": "ab", "response": letter, "prompt_index": 0} for letter in "cde"],
    )
    path = written(tmp_path / "pairs.jsonl", PAIRS)
    data = opened("reward_model", tokenizer, path, normalization=samples, normalization_samples=2)
    assert data.normalization_samples is not None and all(
        isinstance(sample, Demonstration) for sample in data.normalization_samples
    )
    assert [tokenizer.decode(sample.tokens[2:]) for sample in data.normalization_samples] == [
        "c",
        "d",
    ]


def test_recorded_response_tokens_are_kept(plain, data):
    end, tokens = plain.eos_token_ids[0], plain.encode("it is 2").tolist()
    (ended,) = open_demonstrations(
        data(
            {
                "prompt": "1+1=",
                "response": "it is 2",
                "tokens": [*tokens, end],
                "finish_reason": "stop",
            }
        ),
        plain,
        1,
    ).take(0, 1)
    assert ended.tokens[ended.prompt_length :].tolist() == [*tokens, end]
    cut = {"prompt": "1+1=", "response": "it is 2", "tokens": tokens, "finish_reason": "length"}
    (demonstration,) = open_demonstrations(data(cut), plain, 1).take(0, 1)
    # A truncated response gets no EOS token.
    assert demonstration.tokens[demonstration.prompt_length :].tolist() == tokens
    for settings, record in (
        ({"generated_tokens": False}, cut),
        ({}, {**cut, "tokens": len(tokens)}),
    ):
        (demonstration,) = open_demonstrations(data(record, **settings), plain, 1).take(0, 1)
        assert demonstration.tokens[demonstration.prompt_length :].tolist() == [*tokens, end]


@pytest.mark.promise("sft-trains-generated-tokens-only")
def test_sft_on_episode_learns_generated_tokens_only(plain, data):
    tokens = plain.encode("it is 2").tolist()
    record = {"prompt": "1+1=", "response": "it is 2", "tokens": tokens, "finish_reason": "stop"}
    drawn = [1, 1, 1, 0, 0, 1, 1]
    for settings in ({}, {"learned_turns": "all"}):
        (found,) = open_demonstrations(data({**record, "drawn": drawn}, **settings), plain, 1).take(
            0, 1
        )
        assert (
            found.tokens[found.prompt_length :].tolist() == tokens
            and found.response_mask is not None
        )
        assert found.response_mask.tolist() == [False] * found.prompt_length + [
            bool(each) for each in drawn
        ]
    for wrong in (drawn[1:], [0] * 7, [1, 1, 1, 2, 0, 1, 1], "1110011"):
        with pytest.raises(
            ConfigError,
            match=r"field `drawn` must be a list of 7 zeros and ones \(one value per token of `tokens`\)",
        ):
            open_demonstrations(data({**record, "drawn": wrong}), plain, 1)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (
            [4, 5],
            (
                "`chosen_tokens` and `chosen` differ: this model's tokenizer .* set"
                " data.generated_tokens=false"
            ),
        ),
        ([10**6], "field `chosen_tokens` must be a non-empty list of token ids from 0 to"),
        ([], "field `chosen_tokens` must be a non-empty list of token ids from 0 to"),
        ("2", "field `chosen_tokens` must be a non-empty list of token ids from 0 to"),
    ],
)
def test_invalid_recorded_tokens_are_refused(plain, data, tokens, message):
    record = {"prompt": "1+1=", "chosen": "it is 2", "rejected": "3", "chosen_tokens": tokens}
    with pytest.raises(ConfigError, match=rf"records\.jsonl:1: {message}"):
        open_preferences(data(record), plain, 1)


def test_text_ends_with_eos_token_of_tokenizer_config(plain, data, tmp_path):
    directory = shutil.copytree(plain.directory, tmp_path / "model")
    shape = json.loads((directory / "config.json").read_text())
    end, other = shape["eos_token_id"], plain.encode("}").tolist()[0]
    record = {"prompt": "1+1=", "response": "2"}
    for listed, named, expected in (
        ([end, other], "}", other),
        ([end, other], "x", end),
        ([other, end], None, other),
    ):
        (directory / "config.json").write_text(json.dumps(shape | {"eos_token_id": listed}))
        settings = {} if named is None else {"eos_token": {"content": named}}
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
        (demonstration,) = open_demonstrations(data(record), Tokenizer(directory), 1).take(0, 1)
        assert int(demonstration.tokens[-1]) == expected


def test_prompt_cut_applies_to_every_kind_of_record(plain, data):
    cut = {"prompt_after": "Q:", "prompt_before": "!"}
    (demonstration,) = open_demonstrations(
        data({"prompt": "aQ:b!c", "response": "2"}, **cut), plain, 1
    ).take(0, 1)
    assert parts(plain, demonstration) == ("b", "2")
    (pair,) = open_preferences(
        data({"prompt": "aQ:b!c", "chosen": "2", "rejected": "3"}, **cut), plain, 1
    ).take(0, 1)
    assert [parts(plain, member) for member in (pair.chosen, pair.rejected)] == [
        ("b", "2"),
        ("b", "3"),
    ]
    (steps,) = open_labeled_steps(
        data({"prompt": "aQ:b!c", "steps": ["2"], "labels": [1]}, **cut), plain, 1
    ).take(0, 1)
    assert plain.decode(steps.tokens) == "b2"
    settings = Suite(None, EvaluationConfig(prompts=["aQ:b!c"]))
    (prompt,) = open_evaluation_prompts(settings, DataConfig(**cut), plain)
    assert prompt.text == "b" and plain.decode(prompt.tokens) == "b"
    with pytest.raises(
        ConfigError,
        match=r"evaluation.prompts\[0\]: the prompt does not contain data.prompt_before='\?'",
    ):
        open_evaluation_prompts(settings, DataConfig(prompt_before="?"), plain)
    with pytest.raises(
        ConfigError, match=r"records\.jsonl:1: the prompt does not contain data.prompt_after='\?'"
    ):
        open_demonstrations(data({"prompt": "aQ:b!c", "response": "2"}, prompt_after="?"), plain, 1)


def test_normalization_samples_are_not_cut_again(plain, data, tmp_path):
    samples = tmp_path / "samples.jsonl"
    samples.write_text('{"prompt": "b", "response": "2"}\n{"prompt": "b", "response": "3"}\n')
    settings = data(
        {"prompt": "aQ:b", "chosen": "2", "rejected": "3"},
        prompt_after="Q:",
        normalization=str(samples),
    )
    found = open_run_data(
        Config(data=settings, algorithm=AlgorithmConfig(trainer="reward_model")), plain
    )
    assert found.normalization_samples is not None
    assert [parts(plain, each) for each in found.normalization_samples] == [("b", "2"), ("b", "3")]
