"""Raw records of files of every supported type, in chunks that other processes can read."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from aligner.data import record_sources
from aligner.data.record_sources import RawRecord, open_record_source
from aligner.errors import ConfigError

RECORDS = [{"prompt": f"{index}\u2028é", "n": index, "list": [1.5, None]} for index in range(3000)]


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(records), path, row_group_size=700)
    elif path.suffix == ".json":
        path.write_text(json.dumps(records, indent=1, ensure_ascii=False))
    else:
        lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        path.write_bytes("".join(lines).encode())
    return path


def fields(record: RawRecord) -> Any:
    return json.loads(record.content) if isinstance(record.content, bytes) else record.content


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_chunks_contain_all_records_in_order(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(record_sources, "_CHUNK_BYTES", 1000)
    monkeypatch.setattr(record_sources, "_CHUNK_RECORDS", 300)
    path = write(tmp_path / f"records.{suffix}", RECORDS)
    source = open_record_source(path, "data.path=")
    chunks = [pickle.loads(pickle.dumps(chunk)) for chunk in source.scan()]
    records = [record for chunk in chunks for record in chunk.read()]

    assert len(chunks) >= 10 and sum(chunk.size for chunk in chunks) <= source.size
    assert [fields(record) for record in records] == RECORDS
    assert records == list(source.read())
    last_origin = f"{path}:3000" if suffix == "jsonl" else f"{path}[2999]"
    assert records[-1].origin == last_origin


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), min_size=1),
    st.integers(1, 60),
    st.booleans(),
)
def test_line_chunks_do_not_depend_on_their_size(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], size: int, has_mark: bool
) -> None:
    path = tmp_path_factory.mktemp("lines") / "records.jsonl"
    content = "".join(json.dumps({"prompt": text}, ensure_ascii=False) + "\r\n" for text in texts)
    path.write_bytes(b"\xef\xbb\xbf" * has_mark + content.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_sources, "_CHUNK_BYTES", size)
        source = open_record_source(path, "data.path=")
        records = [record for chunk in source.scan() for record in chunk.read()]
    assert [fields(record)["prompt"] for record in records] == texts
    assert [record.origin for record in records] == [
        f"{path}:{line}" for line in range(1, len(texts) + 1)
    ]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_file_that_changes_between_scan_and_read_is_refused(tmp_path, suffix):
    path = write(tmp_path / f"records.{suffix}", RECORDS)
    chunks = list(open_record_source(path, "data.path=").scan())
    write(path, [{**record, "n": 7} for record in RECORDS])
    with pytest.raises(ConfigError, match=rf"records\.{suffix}: the file changed while"):
        [record for chunk in chunks for record in chunk.read()]


def test_json_array_that_changes_while_it_is_read_is_refused(tmp_path):
    path = write(tmp_path / "records.json", RECORDS)
    chunks = open_record_source(path, "data.path=").scan()
    next(chunks)
    with path.open("a") as file:
        file.write(" ")
    with pytest.raises(ConfigError, match=r"records\.json: the file changed while"):
        list(chunks)


def test_json_file_may_have_one_object_per_line(tmp_path):
    lines = write(tmp_path / "records.jsonl", RECORDS[:5])
    path = lines.rename(tmp_path / "records.json")
    records = list(open_record_source(path, "data.path=").read())
    assert [fields(record) for record in records] == RECORDS[:5]


def test_json_array_has_the_values_of_json_lines(tmp_path):
    path = tmp_path / "records.json"
    path.write_text(r'[{"prompt": "x\ud83dy", "n": 18446744073709551616}]')
    (record,) = open_record_source(path, "data.path=").read()
    assert record.content == {"prompt": "x\ud83dy", "n": 2**64}


def test_absent_fields_of_parquet_rows_are_missing(tmp_path):
    path = write(tmp_path / "records.parquet", [{"a": 1, "b": None}, {"a": None, "b": 2}])
    records = list(open_record_source(path, "data.path=").read())
    assert [fields(record) for record in records] == [{"a": 1}, {"b": 2}]


def test_parquet_file_with_invalid_column_names_is_refused(tmp_path):
    path = write(tmp_path / "records.parquet", [{"prompt": "a"}])
    path.write_bytes(path.read_bytes().replace(b"prompt", b"\xffrompt"))
    source = open_record_source(path, "data.path=")
    assert source.size == 0
    with pytest.raises(ConfigError, match=r"data\.path=.*records\.parquet cannot be read: 'utf-8'"):
        list(source.read())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", '[{"prompt": "a"}, {"prompt": }]', r"a\.json\[1\]: not valid JSON"),
        ("a.json", '[{"prompt": "a"}', r"a\.json\[1\]: not valid JSON"),
        ("a.json", "[]", r"a\.json: the array is empty"),
        ("a.json", "", r"a\.json: the file is empty"),
        ("a.jsonl", "\n", r"a\.jsonl: the file is empty"),
        ("a.parquet", "no parquet", r"a\.parquet cannot be read"),
        ("a.tsv", "a", r"unsupported file type '\.tsv'; allowed: \.jsonl, \.json, "),
        ("a.jsonl.gz", "no gzip", r"a\.jsonl\.gz cannot be read"),
        ("a.csv", "prompt,answer\n", r"a\.csv: the file has no records"),
        ("a.csv", "prompt,prompt\na,b\n", r"a\.csv:1: .*names of the fields, each once"),
        ("a.csv", 'prompt,answer\n"a\nb",c\nd\n', r"a\.csv:4: the row has 1 fields"),
        ("a.csv", 'prompt,answer\n"a"b,c\n', r"a\.csv:2: not valid CSV"),
    ],
)
def test_unreadable_file_is_refused_with_its_name(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        list(open_record_source(path, "data.path=").read())


@pytest.mark.parametrize("suffix", ["jsonl.gz", "json.gz"])
def test_compressed_file_has_the_records_and_origins_of_the_plain_file(
    tmp_path, monkeypatch, suffix
):
    monkeypatch.setattr(record_sources, "_CHUNK_BYTES", 1000)
    monkeypatch.setattr(record_sources, "_CHUNK_RECORDS", 300)
    plain = write(tmp_path / f"records.{suffix.removesuffix('.gz')}", RECORDS)
    path = tmp_path / f"records.{suffix}"
    path.write_bytes(gzip.compress(plain.read_bytes()))
    source = open_record_source(path, "data.path=")
    chunks = [pickle.loads(pickle.dumps(chunk)) for chunk in source.scan()]
    records = [record for chunk in chunks for record in chunk.read()]

    assert len(chunks) >= 10 and sum(chunk.size for chunk in chunks) <= source.size
    expected = list(open_record_source(plain, "data.path=").read())
    assert [record.content for record in records] == [record.content for record in expected]
    assert [record.origin for record in records] == [
        record.origin.replace(str(plain), str(path)) for record in expected
    ]


def test_truncated_compressed_file_is_refused(tmp_path):
    path = tmp_path / "records.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "a"}\n' * 1000)[:-10])
    with pytest.raises(ConfigError, match=r"records\.jsonl\.gz cannot be read"):
        list(open_record_source(path, "data.path=").read())


def test_csv_rows_have_the_names_of_the_first_line(tmp_path):
    path = tmp_path / "records.csv"
    path.write_bytes('\ufeffprompt,answer\r\n"a, ""b""\nc",1\r\n\r\nd,\r\n'.encode())
    records = list(open_record_source(path, "data.path=").read())
    assert [record.content for record in records] == [
        {"prompt": 'a, "b"\nc', "answer": "1"},
        {"prompt": "d", "answer": ""},
    ]
    assert [record.origin for record in records] == [f"{path}:2", f"{path}:5"]
