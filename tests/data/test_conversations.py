"""Prompt and answer tokens of conversations, with tokenizers and chat templates of common kinds."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from aligner.config.compose import compose_config
from aligner.data.conversations import build_conversation
from aligner.data.examples import Demonstration, open_demonstrations, open_preferences
from aligner.data.model_directory import prepare_model
from aligner.data.prompts import open_evaluation_prompts, open_prompts, read_prompts, to_prompt
from aligner.data.tokenizer import Tokenizer, read_tokenizer
from aligner.data.types import Prompt, Sample, collate
from aligner.errors import ConfigError
from aligner.rewards.sources import CombinedReward, ModelSource
from aligner.schema import DataConfig, EvaluationConfig
from aligner.schema.evaluation_suites import Suite
from aligner.schema.reward_sources import ModelSource as ModelSettings
from aligner.servers.reward_server import RewardRank
from aligner.servers.validation import Limits
from aligner.training.offline import pad_demonstrations
from aligner.training.preference_sampling import build_preferences
from aligner.training.rollout_builder import RolloutBatch
from aligner.training.services import PendingRows
from tests.data.chat_models import chat_model

BOS, EOS, END, HEAD, HEAD_END = "<|begin|>", "<|end|>", "<|im_end|>", "<|im_start|>", "<|head_end|>"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}<|head_end|>\n\n"
    "{{ m.content | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant<|head_end|>\n\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation"
    " %}{{ m.content.split('</think>')[-1] }}INSIDE{% endgeneration %}OUTSIDE{% else %}{{ m.content"
    " }}<|im_end|>{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{%"
    " endif %}"
)
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = (
    "{% if tools is not none %}{{ tools | tojson(ensure_ascii=False) }}{% endif %}{% for m in"
    " messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls %}{% for call in m.tool_calls %}CALL"
    " {{ call.function | tojson }}{% endfor %}{% endif %}{% if m.content is not none %}{{ m.content"
    " }}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{%"
    " endif %}"
)
TURNS = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "one and one?"},
    {"role": "assistant", "content": "it is two"},
    {"role": "user", "content": "and two more?"},
    {"role": "assistant", "content": "four"},
]


def model(directory: Path, *, template: str = "", post: Any = None) -> Tokenizer:
    """Write a model with a byte-level BPE tokenizer; `post` is its post-processing template."""
    shape = compose_config(["experiment=tiny_ppo", f"run.dir={directory}"])
    made = prepare_model(shape)
    special = [EOS, BOS, END, HEAD, HEAD_END]
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["it is two and one more, be kind and four"] * 4, trainer)
    ids = [(token, tokenizer.token_to_id(token)) for token in special]
    byte_level = processors.ByteLevel(trim_offsets=False)
    if post is not None:
        adding = processors.TemplateProcessing(single=post, special_tokens=ids)
        tokenizer.post_processor = processors.Sequence([byte_level, adding])
    else:
        tokenizer.post_processor = byte_level
    tokenizer.save(str(made / "tokenizer.json"))
    config = json.loads((made / "config.json").read_text())
    ends = [dict(ids)[EOS], dict(ids)[END]]
    (made / "config.json").write_text(
        json.dumps(config | {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": ends})
    )
    settings = {"bos_token": BOS, "eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast"}
    (made / "tokenizer_config.json").write_text(json.dumps(settings))
    if template:
        (made / "chat_template.jinja").write_text(template)
    return Tokenizer(made)


def records(directory: Path, *rows: dict[str, Any], **settings: Any) -> DataConfig:
    path = directory / "records.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(
        path=str(path),
        shuffle=False,
        max_response_tokens=200,
        **({"max_prompt_tokens": 200} | settings),
    )


def texts(tokenizer: Tokenizer, tokens: torch.Tensor) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=False)


def learned(tokenizer: Tokenizer, demonstration: Demonstration) -> list[str]:
    """Return the text of each contiguous run of tokens that the loss counts."""
    rows = pad_demonstrations([demonstration], pad_token_id=0)
    targets = [0, *torch.nonzero(rows.mask[0]).flatten().add(1).tolist()]
    runs: list[list[int]] = []
    for before, place in itertools.pairwise(targets):
        if place != before + 1 or not runs:
            runs.append([])
        runs[-1].append(int(demonstration.tokens[place]))
    return [texts(tokenizer, torch.tensor(run)) for run in runs]


@pytest.mark.promise("plain-prompt-special-tokens-once")
@pytest.mark.parametrize("post", [f"{BOS} $A", f"{BOS} $A {EOS}", f"$A {EOS}", None])
def test_plain_prompt_starts_like_tokenizer_encoding(tmp_path: Path, post: str | None) -> None:
    from transformers import AutoTokenizer

    tokenizer = model(tmp_path, post=post)
    own = AutoTokenizer.from_pretrained(tokenizer.directory)("one and two")["input_ids"]
    expected = own[:-1] if post and post.endswith(EOS) else own
    assert (expected[0] == tokenizer.encode(BOS)[0]) == (post is not None and post.startswith(BOS))
    found = [
        open_prompts(DataConfig(prompts=["one and two"]), tokenizer, 1).take(0, 1)[0].tokens,
        open_evaluation_prompts(
            Suite(None, EvaluationConfig(prompts=["one and two"])), DataConfig(), tokenizer
        )[0].tokens,
    ]
    row = {
        "prompt": "one and two",
        "response": "four",
        "chosen": "four",
        "rejected": "it",
        "chosen_tokens": None,
    }
    (demonstration,) = open_demonstrations(records(tmp_path, row), tokenizer, 1).take(0, 1)
    (pair,) = open_preferences(records(tmp_path, row), tokenizer, 1).take(0, 1)
    for each in (demonstration, pair.chosen, pair.rejected):
        found.append(each.tokens[: each.prompt_length])
        assert texts(tokenizer, each.tokens[each.prompt_length :]) in (f"four{EOS}", f"it{EOS}")
    (record,) = read_prompts(Path(records(tmp_path, row).path or ""), "--prompts ")
    found.append(to_prompt(record, tokenizer, DataConfig(max_prompt_tokens=200), "200").tokens)
    assert [tokens.tolist() for tokens in found] == [expected] * 6


@pytest.mark.promise("plain-prompt-special-tokens-once")
def test_prompt_has_special_tokens_once(tmp_path: Path) -> None:
    tokenizer = model(tmp_path, template=LLAMA3, post=f"{BOS} $A")
    (worded,) = open_prompts(records(tmp_path, {"prompt": TURNS[:2]}), tokenizer, 1).take(0, 1)
    assert worded.tokens.tolist().count(
        int(tokenizer.encode(BOS)[0])
    ) == 1 and worded.text.startswith(BOS)
    (again,) = open_prompts(
        DataConfig(prompts=[worded.text], max_prompt_tokens=200), tokenizer, 1
    ).take(0, 1)
    # The prompts in a run's files are rendered, and can be read again.
    assert torch.equal(again.tokens, worded.tokens)
    without = model(tmp_path / "chatml", template=CHATML, post=f"{BOS} $A")
    (prompt,) = open_prompts(records(tmp_path, {"prompt": TURNS[:2]}), without, 1).take(0, 1)
    assert texts(without, prompt.tokens).startswith(HEAD)


def test_scored_sentence_starts_like_plain_prompt(
    tmp_path: Path,
) -> None:
    tokenizer = model(tmp_path, post=f"{BOS} $A {EOS}")
    limits = Limits(
        vocab_size=tokenizer.vocab_size, max_sequence_length=200, max_request_tokens=200
    )
    judge = ModelSource("judge", None)  # type: ignore[arg-type]
    settings = ModelSettings(key="reward", name="judge", path="judge")
    scoring = RewardRank(
        CombinedReward([(settings, judge)]), read_tokenizer(tokenizer.directory), limits
    )
    scored: list[torch.Tensor] = []

    def call(op: str, tensors: dict[str, torch.Tensor], **others: Any) -> dict[str, torch.Tensor]:
        scored.append(tensors["tokens"])
        return {"rewards": torch.zeros(2)}

    sentences = np.array([[b"one and two"], [f"{BOS}one and two".encode()]], dtype=object)
    (serve,) = scoring.create_endpoints(call).values()  # type: ignore[arg-type]
    serve({"sentences": sentences})
    assert scored[0].tolist() == [tokenizer.encode(f"{BOS}one and two").tolist()] * 2


@pytest.mark.parametrize(
    ("template", "settings"),
    [(CHATML, {}), (LLAMA3, {}), ("", {"long_prompts": "cut_end", "max_prompt_tokens": 5})],
)
def test_rollout_pairs_keep_their_prompt_tokens(
    tmp_path: Path, template: str, settings: dict[str, Any]
) -> None:
    tokenizer = model(tmp_path, template=template, post=f"{BOS} $A")
    row = {"prompt": TURNS[:2] if template else "one, it is one and two more"}
    (prompt,) = open_prompts(records(tmp_path, row, **settings), tokenizer, 1).take(0, 1)
    samples = []
    for index, text in enumerate(("two", "four")):
        response = tokenizer.encode(text)
        length, tokens = response.numel(), torch.cat([prompt.tokens, response])
        zeros = torch.zeros(length)
        samples.append(
            Sample(0, index, tokens, prompt.tokens.numel(), zeros, zeros.long(), "length")
        )
    pending = PendingRows(())
    rollout = RolloutBatch([prompt] * 2, samples, collate(samples, 0), pending, pending)
    pairs, _ = build_preferences(rollout, torch.tensor([1.0, 0.0]), 2, tokenizer)
    (pair,) = open_preferences(records(tmp_path, *pairs), tokenizer, 1).take(0, 1)
    for member, sample in zip((pair.chosen, pair.rejected), samples, strict=True):
        assert member.prompt_length == sample.prompt_length and torch.equal(
            member.tokens, sample.tokens
        )
    wrong = pairs[0] | {"prompt_tokens": tokenizer.encode("four").tolist()}
    with pytest.raises(
        ConfigError,
        match="`prompt_tokens` and `prompt` differ: this model's tokenizer",
    ):
        open_preferences(records(tmp_path, wrong), tokenizer, 1)


def test_long_prompt_is_refused_dropped_or_cut(tmp_path: Path) -> None:
    tokenizer = model(tmp_path, post=f"{BOS} $A {EOS}")
    long, short = "one and two more and four", "two"
    own = tokenizer.encode(long)

    def read(how: str, limit: int = 4) -> list[Any]:
        data = records(
            tmp_path, {"prompt": long}, {"prompt": short}, long_prompts=how, max_prompt_tokens=limit
        )
        prompts = open_prompts(data, tokenizer, 1)
        return prompts.take(0, len(prompts))

    with pytest.raises(
        ConfigError,
        match=rf"records\.jsonl:1: the prompt has {len(own) + 1} tokens, allowed: 1 to data.max_pr",
    ):
        read("error")
    assert [prompt.text for prompt in read("drop")] == [short]
    beginning = tokenizer.encode(BOS)
    for how, kept in (("cut_start", own[-3:]), ("cut_end", own[:3])):
        cut, whole = read(how)
        assert torch.equal(cut.tokens, torch.cat([beginning, kept])) and whole.text == short
        assert cut.text == tokenizer.decode(kept) and cut.text in long
        with pytest.raises(
            ConfigError,
            match=r"records\.jsonl:1: the prompt has .* allowed: 1 to data.max_prompt_tokens=1",
        ):
            read(how, limit=1)


def test_dropping_long_prompts_still_refuses_bad_records(
    tmp_path: Path,
) -> None:
    tokenizer = model(tmp_path)
    rows = [{"prompt": "one and two and more", "response": "a"}, {"prompt": "two", "response": "b"}]
    stream = open_demonstrations(
        records(tmp_path, *rows, long_prompts="drop", max_prompt_tokens=3), tokenizer, 1
    )
    assert len(stream) == 1 and "skipped 1 of 2 records; first problem:" in stream.notices[0]
    with pytest.raises(ConfigError, match="record lacks field `response`"):
        open_demonstrations(
            records(tmp_path, *rows, {"prompt": "two"}, long_prompts="drop"), tokenizer, 1
        )


@pytest.mark.parametrize("how", ["cut_start", "cut_end"])
def test_cutting_a_chat_prompt_is_refused(tmp_path: Path, how: str) -> None:
    tokenizer = model(tmp_path, template=CHATML)
    with pytest.raises(
        ConfigError,
        match=rf"data.max_prompt_tokens=9.*; data.long_prompts={how} is not supported with chat",
    ):
        open_prompts(
            records(tmp_path, {"prompt": TURNS[:2]}, long_prompts=how, max_prompt_tokens=9),
            tokenizer,
            1,
        )


@pytest.mark.promise("sft-trains-each-answer-and-its-end")
@pytest.mark.parametrize(
    ("template", "answers"),
    [
        (CHATML, [f"it is two{END}", f"four{END}"]),
        (LLAMA3, [f"it is two{END}", f"four{END}"]),
        (MARKED.replace("INSIDE", END).replace("OUTSIDE", ""), [f"it is two{END}", f"four{END}"]),
        (MARKED.replace("INSIDE", "").replace("OUTSIDE", END), [f"it is two{END}", f"four{END}"]),
        (CHATML.replace(END, ""), ["it is two\n", f"four\n{EOS}"]),
    ],
)
def test_each_answer_is_learned_with_its_end_token(
    tmp_path: Path, template: str, answers: list[str]
) -> None:
    tokenizer = model(tmp_path, template=template, post=f"{BOS} $A")
    data = records(tmp_path, {"messages": TURNS}, learned_turns="all")
    (all_turns,) = open_demonstrations(data, tokenizer, 1).take(0, 1)
    (last,) = open_demonstrations(records(tmp_path, {"messages": TURNS}), tokenizer, 1).take(0, 1)
    assert learned(tokenizer, all_turns) == answers and learned(tokenizer, last) == answers[-1:]
    assert torch.equal(all_turns.tokens, last.tokens)
    whole = tokenizer.encode(tokenizer.chat_template.render(TURNS, add_generation_prompt=False))
    assert torch.equal(all_turns.tokens, tokenizer.append_end_token(whole))
    assert texts(tokenizer, all_turns.tokens[: all_turns.prompt_length]).endswith(
        ("assistant\n", f"assistant{HEAD_END}\n\n")
    )


@pytest.mark.promise("sft-trains-each-answer-and-its-end")
def test_template_generation_mask_equals_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = model(tmp_path, template=MARKED.replace("INSIDE", END).replace("OUTSIDE", ""))
    said = [*TURNS[:2], {"role": "assistant", "content": "so</think>it is two"}, *TURNS[3:]]
    theirs = AutoTokenizer.from_pretrained(tokenizer.directory).apply_chat_template(
        said, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    (found,) = open_demonstrations(
        records(tmp_path, {"messages": said}, learned_turns="all"), tokenizer, 1
    ).take(0, 1)
    assert found.response_mask is not None
    length = found.tokens.numel()
    assert found.tokens.tolist() == theirs["input_ids"][:length]
    assert found.response_mask.int().tolist() == theirs["assistant_masks"][:length] and not any(
        theirs["assistant_masks"][length:]
    )


@pytest.mark.promise("sft-trains-each-answer-and-its-end")
def test_lost_reasoning_is_refused_for_all_turns(
    tmp_path: Path,
) -> None:
    tokenizer = model(tmp_path, template=THINKING)
    said = [*TURNS[:2], {"role": "assistant", "content": "one</think>it is two"}, *TURNS[3:]]
    with pytest.raises(
        ConfigError,
        match=(
            r"records\.jsonl:1: messages: .* earlier turns differently .* data.learned_turns=last"
        ),
    ):
        open_demonstrations(
            records(tmp_path, {"messages": said}, learned_turns="all"), tokenizer, 1
        )
    (last,) = open_demonstrations(records(tmp_path, {"messages": said}), tokenizer, 1).take(0, 1)
    assert learned(tokenizer, last) == [f"four{END}"]
    (same,) = open_demonstrations(
        records(tmp_path, {"messages": TURNS}, learned_turns="all"), tokenizer, 1
    ).take(0, 1)
    assert learned(tokenizer, same) == [f"it is two{END}", f"four{END}"]


def test_turns_after_first_prompt_share_response_limit(
    tmp_path: Path,
) -> None:
    tokenizer = model(tmp_path, template=CHATML)
    data = records(tmp_path, {"messages": TURNS}, learned_turns="all")
    (found,) = open_demonstrations(data, tokenizer, 1).take(0, 1)
    data.max_prompt_tokens = found.prompt_length
    data.max_response_tokens = found.tokens.numel() - found.prompt_length
    assert len(open_demonstrations(data, tokenizer, 1)) == 1
    data.max_response_tokens -= 1
    with pytest.raises(
        ConfigError,
        match=(
            r"allowed: 1 to data\.max_response_tokens=.*, shared by all turns after the first prompt"
        ),
    ):
        open_demonstrations(data, tokenizer, 1)


def test_plain_and_recorded_responses_are_learned_alone(tmp_path: Path) -> None:
    tokenizer = model(tmp_path, template=CHATML)
    drawn = {
        "prompt": TURNS[:4],
        "response": "four",
        "response_tokens": tokenizer.encode("four").tolist(),
    }
    rows = [{"prompt": "one", "response": "two"}, drawn]
    found = open_demonstrations(records(tmp_path, *rows, learned_turns="all"), tokenizer, 1).take(
        0, 2
    )
    assert [learned(tokenizer, each) for each in found] == [[f"two{EOS}"], ["four"]]


CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"é": 1}}}],
}
RESULT = {"role": "tool", "content": "2", "name": "add"}
FUNCTIONS = [{"type": "function", "function": {"name": "add", "description": "Grüße"}}]


def test_tool_calls_and_tools_render_like_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = model(tmp_path, template=TOOLS)
    said = [TURNS[1], CALL, RESULT, {"role": "assistant", "content": "two"}]
    row = {"messages": said, "tools": FUNCTIONS}
    theirs = AutoTokenizer.from_pretrained(tokenizer.directory).apply_chat_template
    (prompt,) = open_prompts(records(tmp_path, row), tokenizer, 1).take(0, 1)
    assert prompt.text == theirs(
        said[:-1], tools=FUNCTIONS, tokenize=False, add_generation_prompt=True
    )
    assert "Grüße" in prompt.text and prompt.metadata == {"tools": FUNCTIONS}
    call = f'CALL {{"name": "add", "arguments": {{"é": 1}}}}{END}'
    data = records(tmp_path, row, {"messages": said[:2]}, learned_turns="all")
    both, only_call = open_demonstrations(data, tokenizer, 1).take(0, 2)
    assert texts(tokenizer, both.tokens) + "\n" == theirs(said, tools=FUNCTIONS, tokenize=False)
    assert learned(tokenizer, both) == [call, f"two{END}"] and learned(tokenizer, only_call) == [
        call
    ]
    preference = {
        "chosen": said,
        "rejected": [*said[:-1], {"role": "assistant", "content": "four"}],
        "tools": FUNCTIONS,
    }
    (pair,) = open_preferences(records(tmp_path, preference), tokenizer, 1).take(0, 1)
    assert texts(tokenizer, pair.rejected.tokens).endswith(f"four{END}") and "Grüße" in texts(
        tokenizer, pair.chosen.tokens
    )


LOOK = {
    "id": "000000001",
    "type": "function",
    "function": {"name": "look", "arguments": {"at": "1"}},
}
EPISODE = [
    {"role": "user", "content": "why?"},
    {"role": "assistant", "content": "", "tool_calls": [LOOK]},
    {"role": "tool", "name": "look", "tool_call_id": "000000001", "content": "there"},
    {"role": "assistant", "content": "so"},
    {"role": "user", "content": "yes?"},
    {"role": "assistant", "content": "no"},
]
HERMES = '<tool_call>\n{"name": "look", "arguments": {"at": "1"}}\n</tool_call>'


@pytest.mark.promise("sft-trains-generated-tokens-only")
@pytest.mark.parametrize(
    ("template", "said"),
    [
        # This tokenizer merges the last line break of the prompt with the first text of the answer.
        ("qwen", [f"\n{HERMES}<|end|>", "so<|end|>", "no<|end|>"]),
        ("reasons_apart", [f"\n\n</think>\n\n{text}<|end|>" for text in (HERMES, "so", "no")]),
        ("llama", ['{"name": "look", "parameters": {"at": "1"}}<|end|>', "so<|end|>", "no<|end|>"]),
        (
            "mistral",
            [
                '[TOOL_CALLS] [{"name": "look", "arguments": {"at": "1"}, "id": "000000001"}]</s>',
                " so</s>",
                " no</s>",
            ],
        ),
        ("phi", ["so<|end|>", "no<|end|>\n</s>"]),
        ("glm", ["so<|user|>", "no</s>"]),
    ],
)
def test_sft_learns_every_turn_with_calls_and_end(
    tmp_path: Path, template: str, said: list[str]
) -> None:
    tokenizer = chat_model("bytes", template)
    has_calls, tools = (
        len(said) == 3,
        [{"type": "function", "function": {"name": "look", "parameters": {}}}],
    )
    row: dict[str, Any] = (
        {"messages": EPISODE, "tools": tools}
        if has_calls
        else {"messages": [EPISODE[0], *EPISODE[3:]]}
    )
    data = records(tmp_path, row, learned_turns="all")
    (found,) = open_demonstrations(data, tokenizer, 1).take(0, 1)
    text = tokenizer.chat_template.render(
        row["messages"], row.get("tools"), add_generation_prompt=False
    )
    whole = texts(tokenizer, found.tokens)
    assert text.startswith((whole, whole.removesuffix("</s>")))
    assert learned(tokenizer, found) == said


def test_tool_call_that_template_drops_is_refused(tmp_path: Path) -> None:
    data = records(tmp_path, {"messages": EPISODE}, learned_turns="all")
    with pytest.raises(
        ConfigError,
        match="the model's chat template does not render the call of tool 'look'",
    ):
        open_demonstrations(data, chat_model("bytes", "chatml"), 1)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"messages": [TURNS[1], CALL | {"tool_calls": []}]},
            r"messages\[1\]: a message must have .* or `role` and `tool_calls`",
        ),
        (
            {"messages": [TURNS[1] | {"content": None}, TURNS[2]]},
            r"messages\[0\]: a message must have",
        ),
        ({"messages": TURNS[1:3], "tools": "{}"}, "`tools` must be a list of JSON objects"),
        ({"messages": TURNS[1:3], "tools": ["add"]}, "`tools` must be a list of JSON objects"),
    ],
)
def test_empty_message_and_invalid_tools_are_refused(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    tokenizer = model(tmp_path, template=TOOLS)
    with pytest.raises(ConfigError, match=rf"records\.jsonl:1: .*{message}"):
        open_demonstrations(records(tmp_path, row), tokenizer, 1)


def test_records_with_tools_use_tool_use_template(
    tmp_path: Path,
) -> None:
    tokenizer = model(tmp_path)
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools[0].function.name }}"},
    ]
    (tokenizer.directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    data = records(tmp_path, {"messages": TURNS[:2]}, {"messages": TURNS[:2], "tools": FUNCTIONS})
    assert [prompt.text for prompt in open_prompts(data, tokenizer, 1).take(0, 2)] == [
        "plain",
        "add",
    ]


class _Turns:
    """A chat format whose turns are rendered as their first token."""

    def begin(self, *_: object) -> None:
        """Start a conversation."""

    def parse_turn(self, conversation: None, turn: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(messages=[{"role": "assistant", "content": f"turn {int(turn[0])}"}])


@pytest.mark.parametrize("reset_answer", ["", []], ids=["empty text", "no messages"])
def test_environment_messages_follow_the_turn_they_answer(reset_answer: object) -> None:
    question = {"role": "user", "content": "question"}
    answer = {"role": "user", "content": "answer"}
    sample = Sample(
        prompt_id=0,
        sample_index=0,
        tokens=torch.tensor([5, 1, 9, 2]),
        prompt_length=1,
        engine_logprobs=torch.zeros(3),
        weight_versions=torch.ones(3, dtype=torch.int64),
        finish_reason="stop",
        generated_mask=torch.tensor([True, False, True]),
    )
    prompt = Prompt(0, "question", torch.tensor([5]), {"messages": [question]})
    answers: list[Any] = [reset_answer, [answer], []]
    record = build_conversation(sample, prompt, answers, None, _Turns)  # type: ignore[arg-type]
    assert [message["content"] for message in record["messages"]] == [
        "question",
        "turn 1",
        "answer",
        "turn 2",
    ]
