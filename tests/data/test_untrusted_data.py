"""Data files, tokenizers and chat templates that would exhaust memory or time are refused with an
error that names the file."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest

from aligner.data import record_sources, template_sandbox
from aligner.data.chat_template import ChatTemplate
from aligner.data.record_sources import open_record_source
from aligner.data.records import BadRecord, to_record
from aligner.data.tokenizer_files import read_tokenizer_files
from aligner.errors import AlignerError, ConfigError
from tests.rounds import typical

DEEP = "[" * 100_000 + "]" * 100_000
UNIGRAM = {"type": "Unigram", "unk_id": 0, "vocab": [["u", 0.0], ["a", -1.0]]}
MESSAGES = [{"role": "user", "content": "Hi"}]


def read(file: Path) -> list[Any]:
    return [to_record(raw, {}).values for raw in open_record_source(file, "data.path=").read()]


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_sources, "_CHUNK_BYTES", 1000)
    monkeypatch.setattr(record_sources, "MAX_RECORD_BYTES", 100_000)
    monkeypatch.setattr(record_sources, "MAX_EXPANDED_BYTES", 500_000)


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("name", ["data.jsonl", "data.jsonl.gz", "data.txt", "data.csv"])
def test_huge_line_is_refused_with_its_number(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    lines = ["prompt"] if name == "data.csv" else ['{"prompt": "a"}']
    content = "\n".join([*lines, "x" * 200_000, ""]).encode()
    file.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    with pytest.raises(ConfigError, match=rf"{name}:2: the record has more than 100000 bytes"):
        list(open_record_source(file, "data.path=").read())


@pytest.mark.usefixtures("small_limits")
def test_huge_element_of_an_array_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "data.json"
    file.write_text(json.dumps([{"prompt": "a"}, {"prompt": "x" * 400_000}]))
    with pytest.raises(
        ConfigError, match=r"data\.json\[\d\]: the record has more than 100000 bytes"
    ):
        read(file)


@pytest.mark.usefixtures("small_limits")
def test_valid_records_below_the_limits_are_read(tmp_path: Path) -> None:
    records = [{"prompt": "word " * 100, "n": index} for index in range(200)]
    lines = "".join(json.dumps(record) + "\n" for record in records).encode()
    (tmp_path / "data.jsonl").write_bytes(lines)
    (tmp_path / "data.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "data.json").write_text(json.dumps(records))
    for file in tmp_path.iterdir():
        assert read(file) == records


@pytest.mark.parametrize("name", ["data.jsonl.gz", "data.json.gz"])
def test_compressed_bomb_is_refused(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_sources, "MAX_EXPANDED_BYTES", 1 << 20)
    file = tmp_path / name
    record = json.dumps({"prompt": "0" * 5000})
    content = "\n".join([record] * 5000) if "jsonl" in name else f"[{','.join([record] * 5000)}]"
    file.write_bytes(gzip.compress(content.encode()))
    with pytest.raises(ConfigError, match=rf"{name}: \d+ compressed bytes contain more than"):
        list(open_record_source(file, "data.path=").read())


@pytest.mark.parametrize("name", ["data.jsonl", "data.json"])
def test_deep_record_is_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    text = '{"prompt": ' + DEEP + "}"
    file.write_text(text if name == "data.jsonl" else f"[{text}]")
    with pytest.raises(ConfigError, match=rf"{name}(:1|\[0\]): .*nested more than 128 levels deep"):
        read(file)


def test_element_of_an_array_that_is_no_object_is_a_bad_record(tmp_path: Path) -> None:
    file = tmp_path / "data.json"
    for element, kind in (("[[1], {}]", "list"), ('"x"', "str"), ("[]", "list"), ("null", "None")):
        file.write_text(f'[{{"prompt": "a"}}, {element}]')
        with pytest.raises(
            BadRecord, match=rf"data\.json\[1\]: expected a JSON object, got {kind}"
        ):
            read(file)


@pytest.mark.parametrize("name", ["data.jsonl", "data.json"])
def test_number_with_thousands_of_digits_names_the_file(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_text(f'[{{"prompt": {"9" * 10_000}}}]'.strip("[]" if name == "data.jsonl" else ""))
    with pytest.raises(ConfigError, match=rf"{name}(:1|\[0\]): not valid JSON"):
        read(file)


def test_large_row_group_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    file = tmp_path / "data.parquet"
    parquet.write_table(pa.table({"prompt": [str(number) for number in range(1000)]}), file)
    assert len(read(file)) == 1000
    monkeypatch.setattr(record_sources, "MAX_ROW_GROUP_BYTES", 1000)
    with pytest.raises(
        ConfigError, match=r"data\.parquet: row group 0 has \d+ bytes, allowed: 1000"
    ):
        read(file)


def write_tokenizer(directory: Path, **changes: Any) -> Path:
    from tokenizers import Tokenizer, models

    content = json.loads(Tokenizer(models.WordLevel({"a": 0, "u": 1}, unk_token="u")).to_str())
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | changes.pop("settings", {})
    text = json.dumps(content | changes).replace('"DEEP"', DEEP)
    (directory / "tokenizer.json").write_text(text)
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"normalizer": "DEEP"}, "tokenizer.json: .*nested more than 128"),
        ({"model": []}, "tokenizer"),
        ({"added_tokens": [5]}, "tokenizer"),
        ({"added_tokens": [{"content": "x"}]}, "tokenizer"),
        ({"added_tokens": [{"id": 10**30, "content": "x", "special": True}]}, "tokenizer"),
        ({"settings": {"added_tokens_decoder": {"9" * 5000: {"content": "x"}}}}, "tokenizer"),
        (
            {
                "model": UNIGRAM,
                "settings": {"tokenizer_class": "T5Tokenizer", "extra_ids": 10**9},
            },
            "extra_ids=1000000000: must be at most",
        ),
        (
            {"model": UNIGRAM, "settings": {"tokenizer_class": "T5Tokenizer", "extra_ids": "x"}},
            "tokenizer",
        ),
        ({"settings": {"extra_special_tokens": 5}}, "tokenizer"),
    ],
)
def test_hostile_tokenizer_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    directory = write_tokenizer(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message) as raised:
        read_tokenizer_files(directory)
    assert str(tmp_path) in str(raised.value) or "tokenizer_config.json" in str(raised.value)


def test_large_tokenizer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from aligner.data import tokenizer_files

    write_tokenizer(tmp_path)
    assert read_tokenizer_files(tmp_path).tokenizer.get_vocab_size() == 2
    monkeypatch.setattr(tokenizer_files, "MAX_TOKENIZER_BYTES", 50)
    with pytest.raises(ConfigError, match=r"tokenizer\.json: has more than 50 bytes"):
        read_tokenizer_files(tmp_path)


def render(directory: Path, template: str) -> str:
    (directory / "chat_template.jinja").write_text(template)
    return ChatTemplate(directory).render(MESSAGES, add_generation_prompt=True)


DOUBLING = (
    "{%% set ns = namespace(x='aaaaaaaa') %%}{%% for i in range(60) %%}%s{%% endfor %%}{{ ns.x }}"
)
BOMBS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "output": "{% for i in range(99999) %}{{ 'x' * 100000 }}{% endfor %}",
    "filter_of_loops": "{% for i in range(99999) %}{{ range(99999) | map('upper') | list | length }}"
    "{% endfor %}",
    "membership": "{% set x = range(99999) | list %}{% for i in range(99999) %}{{ -1 in x }}"
    "{% endfor %}",
    "product": "{{ 'x' * 999999999999 }}",
    "constant_filter": "{{ 'x' | center(99999999999) }}",
    "method": "{{ messages[0].content.center(99999999999) }}",
    "list": "{{ [1] * 999999999999 }}",
    "power": "{{ 2 ** 999999999999 }}",
    "squares": "{% set ns = namespace(n=3) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}"
    "{% endfor %}",
    "percent": "{{ '%999999999999d' % 1 }}",
    "percent_variable": "{{ '%*d' % (999999999999, 1) }}",
    "format": "{{ '{:999999999999}'.format(1) }}",
    "format_variable": "{{ '{:{}}'.format(1, 999999999999) }}",
    "format_filter": "{{ '%999999999999d' | format(1) }}",
    "sum": DOUBLING % "{% set ns.x = ns.x + ns.x %}",
    "concatenation": DOUBLING % "{% set ns.x = ns.x ~ ns.x %}",
    "block": DOUBLING % "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}",
    "replacement": DOUBLING % "{% set ns.x = ns.x | replace('a', ns.x) %}",
    "replacing_method": DOUBLING % "{% set ns.x = ns.x.replace('a', ns.x) %}",
    "join": DOUBLING % "{% set ns.x = [ns.x, ns.x] | join(ns.x) %}",
    "shared_lists": DOUBLING % "{% set ns.x = [ns.x, ns.x] %}",
    "shared_lists_as_json": (DOUBLING % "{% set ns.x = [ns.x, ns.x] %}").replace(
        "{{ ns.x }}", "{{ ns.x | tojson }}"
    ),
    "indented_json": "{{ messages | tojson(indent=99999999999) }}",
    "indentation": "{{ 'a\\nb' | indent(99999999999) }}",
    "batch": "{{ [1] | batch(99999999999, 0) | list }}",
    "rounding": "{{ 1.5 | round(99999999999, 'ceil') }}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "recursive_loop": "{% for x in [1, 2] recursive %}{{ loop([x, x]) }}{% endfor %}",
    "translation": "{{ 'aaaa'.translate({97: 'x' * 99999}) }}",
    "bytes": "{{ (5).to_bytes(99999999999, 'big') }}",
    "nesting": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
}


LONG_BOMBS = {"filter_of_loops", "macros", "membership"}


@pytest.mark.parametrize("name", typical(BOMBS, BOMBS.keys() - LONG_BOMBS))
def test_template_bomb_is_refused(tmp_path: Path, name: str) -> None:
    begin = time.process_time()
    with pytest.raises(AlignerError, match="template"):
        render(tmp_path, BOMBS[name])
    assert time.process_time() - begin < 60


def test_template_of_a_long_conversation_is_rendered(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if loop.first %}<s>{% endif %}<{{ m.role }}>"
        "{{ m['content'] | trim ~ '</s>' }}{% if 'x' in m.content and not loop.last %}."
        "{% endif %}{{ '%s-%d' % (loop.length, loop.index) }}{% endfor %}"
    )
    messages = [{"role": "user", "content": f"x{index} " * 100} for index in range(5000)]
    text = ChatTemplate(tmp_path).render(messages, add_generation_prompt=True)
    assert text.startswith("<s><user>x0 ") and text.endswith("</s>5000-5000")


def test_steps_are_counted_for_each_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_TEMPLATE_STEPS", 100)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    template = ChatTemplate(tmp_path)
    for _ in range(100):
        assert template.render(MESSAGES * 5, add_generation_prompt=True) == "Hi" * 5
    with pytest.raises(AlignerError, match="more than 100 steps"):
        template.render(MESSAGES * 101, add_generation_prompt=True)
