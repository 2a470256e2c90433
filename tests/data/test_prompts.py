"""Prompt streams from files, functions and inline prompts."""

from __future__ import annotations

import codecs
import json

import pytest

from aligner.config.compose import compose_config
from aligner.data.model_directory import prepare_model
from aligner.data.prompts import PromptStream, open_prompts, read_prompts, to_prompt
from aligner.data.tokenizer import Tokenizer
from aligner.errors import ConfigError
from aligner.schema import DataConfig

TEXTS = ["one", "two", "three", "four", "five"]
FUNCTIONS = "tests.data.record_functions"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    run = tmp_path_factory.mktemp("run")
    return Tokenizer(prepare_model(compose_config(["experiment=tiny_ppo", f"run.dir={run}"])))


def stream(tokenizer, *, seed=1, shuffle=True, limit=16, texts=TEXTS) -> PromptStream:
    return open_prompts(
        DataConfig(prompts=texts, shuffle=shuffle, max_prompt_tokens=limit), tokenizer, seed
    )


def texts(prompts):
    return [prompt.text for prompt in prompts]


def read_texts(path):
    return [record.get_text("prompt") for record in read_prompts(path, "data.path=")]


def test_prompt_ids_are_stream_positions(tokenizer, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "".join(
            json.dumps({"prompt": text, "index": index}) + "\n" for index, text in enumerate(TEXTS)
        )
    )
    prompts = open_prompts(DataConfig(path=str(path)), tokenizer, seed=1).take(6, 3)
    assert [prompt.id for prompt in prompts] == [6, 7, 8]
    for prompt in prompts:
        assert tokenizer.decode(prompt.tokens) == prompt.text == TEXTS[prompt.metadata["index"]]


def test_prompts_do_not_depend_on_earlier_takes(tokenizer):
    used = stream(tokenizer)
    for start in range(0, 12, 3):
        used.take(start, 3)
    assert texts(used.take(12, 3)) == texts(stream(tokenizer).take(12, 3))


def test_prompts_do_not_depend_on_batch_size(tokenizer):
    prompts = stream(tokenizer)
    assert texts(prompts.take(0, 12)) == [
        text for start in range(0, 12, 3) for text in texts(prompts.take(start, 3))
    ]


def test_each_pass_has_all_prompts_in_a_new_order(tokenizer):
    passes = [tuple(texts(stream(tokenizer).take(start, len(TEXTS)))) for start in range(0, 40, 5)]
    assert all(sorted(order) == sorted(TEXTS) for order in passes)
    assert len(set(passes)) > 4


def test_prompt_order_depends_on_seed(tokenizer):
    assert texts(stream(tokenizer, seed=1).take(0, 20)) != texts(
        stream(tokenizer, seed=2).take(0, 20)
    )


def test_unshuffled_passes_keep_the_given_order(tokenizer):
    assert texts(stream(tokenizer, shuffle=False).take(0, 7)) == [*TEXTS, "one", "two"]


def test_prompt_over_token_limit_is_refused(tokenizer):
    with pytest.raises(
        ConfigError, match=r"data\.prompts\[2\].* 5 tokens.*max_prompt_tokens=4: 'three'"
    ):
        stream(tokenizer, limit=4)


def test_prompt_outside_vocabulary_is_refused(tokenizer):
    with pytest.raises(
        ConfigError, match=r"data\.prompts\[1\]: 'Hi é'.*lacks the characters \['H', 'é'\]"
    ):
        stream(tokenizer, texts=["hi", "Hi é"])


def test_jsonl_keeps_other_fields_as_metadata(tmp_path, tokenizer):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "2+2=", "answer": "4"}\n{"prompt": "a\\u2028b"}\n')
    first, second = read_prompts(path, "data.path=")
    prompt = to_prompt(first, tokenizer, DataConfig(max_prompt_tokens=16), "16")
    assert (prompt.text, prompt.metadata, first.origin) == ("2+2=", {"answer": "4"}, f"{path}:1")
    assert second.values == {"prompt": "a\u2028b"}


def test_txt_file_has_one_prompt_per_line(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes("first \nzweité\r\nlast".encode())
    assert read_texts(path) == ["first ", "zweité", "last"]


def test_file_takes_precedence_over_inline_prompts(tokenizer, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("from the file\n")
    for data, expected in [
        (DataConfig(path=str(path), prompts=["in place"]), "from the file"),
        (DataConfig(prompts=["in place"]), "in place"),
    ]:
        assert texts(open_prompts(data, tokenizer, seed=1).take(0, 1)) == [expected]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", "", "the file is empty"),
        ("p.jsonl", "", "the file is empty"),
        ("p.txt", "a\n\nb\n", r"p\.txt:2: field `prompt` is empty"),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": " "}\n', r"p\.jsonl:2: field `prompt` is empty"),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": \n', r"p\.jsonl:2: not valid JSON"),
        ("p.jsonl", "[1]\n", r"p\.jsonl:1: expected a JSON object, got list"),
        (
            "p.jsonl",
            '{"question": "a"}\n',
            r"p\.jsonl:1: record lacks field `prompt` \(a string\); fields of the record: question",
        ),
        ("p.jsonl", '{"prompt": 7}\n', r"p\.jsonl:1: field `prompt` must be a string, got int"),
        (
            "p.jsonl",
            '{"prompt": "a"}\n{"prompt": "b", "answer": ["\\ud83d"]}\n',
            r"p\.jsonl:2: field `answer` cannot be sent to the reward",
        ),
        (
            "p.jsonl",
            '{"prompt": "a", "\\ud83d": 1}\n',
            r"p\.jsonl:1: field `.*` cannot be sent to the reward",
        ),
        (
            "p.tsv",
            "a\n",
            r"unsupported file type '\.tsv'; allowed: \.jsonl, \.json, ",
        ),
    ],
)
def test_invalid_prompt_file_is_refused(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_prompts(path, "data.path=")


def test_function_supplies_records(tokenizer):
    (prompt,) = open_prompts(DataConfig(path=f"function:{FUNCTIONS}:good"), tokenizer, seed=1).take(
        0, 1
    )
    assert (prompt.text, prompt.metadata) == ("a", {"answer": 1})


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("missing", r"has no attribute 'missing'; expected function:MODULE:CALLABLE"),
        ("nothing", r":nothing: the function yielded no records"),
        (
            "failing",
            r":failing: the function raised KeyError in record_functions\.py:\d+: 'answers\.csv'",
        ),
        ("leaving", r":leaving: the function raised SystemExit in record_functions\.py:\d+: 3"),
        ("bare", r":bare\[0\]: expected a mapping of field names to values, got str"),
        (
            "binary",
            (
                r":binary\[1\]: field `answer` cannot be sent to the reward as JSON: .*bytes is not JSON"
                r" serializable"
            ),
        ),
    ],
)
def test_function_without_valid_records_is_refused(tokenizer, function, message):
    with pytest.raises(ConfigError, match=message):
        open_prompts(DataConfig(path=f"function:{FUNCTIONS}:{function}"), tokenizer, seed=1)


def test_function_with_failing_import_is_refused(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "broken_data.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"function:broken_data:f: importing broken_data failed with SystemExit in broken_data.py:1: 3; expected",
    ):
        open_prompts(DataConfig(path="function:broken_data:f"), tokenizer, seed=1)


def test_missing_or_binary_prompt_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.txt cannot be read"):
        read_prompts(tmp_path / "absent.txt", "data.path=")
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"binary\.txt:1: not valid UTF-8"):
        read_prompts(binary, "data.path=")


def test_missing_and_empty_inline_prompts_are_refused(tokenizer):
    with pytest.raises(ConfigError, match="no prompts"):
        open_prompts(DataConfig(), tokenizer, seed=1)
    with pytest.raises(ConfigError, match=r"data\.prompts\[1\]: field `prompt` is empty"):
        open_prompts(DataConfig(prompts=["a", ""]), tokenizer, seed=1)


def test_prompt_is_cut_between_configured_markers(tokenizer):
    def cut(text, **settings):
        return open_prompts(DataConfig(prompts=[text], **settings), tokenizer, 1).take(0, 1)[0].text

    text = "one. two three. four"
    assert cut(text, prompt_after=".") == " two three. four"
    assert cut(text, prompt_before=".") == "one. two three"
    assert cut(text, prompt_after=".", prompt_before=".") == " two three"
    with pytest.raises(
        ConfigError, match=r"data.prompts\[0\]: the prompt does not contain data.prompt_after='!'"
    ):
        cut(text, prompt_after="!")
    with pytest.raises(
        ConfigError, match=r"does not contain data.prompt_before='.' after data.prompt_after="
    ):
        cut("one. two", prompt_after=".", prompt_before=".")
    with pytest.raises(ConfigError, match="the prompt is empty between"):
        cut("one..", prompt_after=".", prompt_before=".")


def test_byte_order_mark_is_ignored(tokenizer, tmp_path):
    for name, content in (
        ("prompts.txt", "abc\nde\n"),
        ("prompts.jsonl", '{"prompt": "abc"}\n{"prompt": "de"}\n'),
    ):
        (tmp_path / name).write_bytes(codecs.BOM_UTF8 + content.encode())
        prompts = open_prompts(
            DataConfig(path=str(tmp_path / name), shuffle=False), tokenizer, seed=1
        ).take(0, 2)
        assert [prompt.text for prompt in prompts] == ["abc", "de"]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("hangs", "the function returned no result within 0.5 s and was killed"),
        ("is_killed", "the function was killed by SIGKILL: exit code"),
    ],
)
def test_hanging_or_killed_record_function_is_refused(tokenizer, function, message):
    given = DataConfig(path=f"function:{FUNCTIONS}:{function}", function_timeout_s=0.5)
    with pytest.raises(ConfigError, match=f"data.path=function:{FUNCTIONS}:{function}: {message}"):
        open_prompts(given, tokenizer, seed=1)
