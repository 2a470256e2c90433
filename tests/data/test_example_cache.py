"""The cache of tokenized examples: what is built, reused, refused and built again."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.config.compose import compose_config
from aligner.data import example_cache, record_sources
from aligner.data.checksums import combine_crc32
from aligner.data.example_cache import ExampleCache
from aligner.data.example_table import ROWS_FILE, ExampleTable
from aligner.data.examples import open_demonstrations
from aligner.data.model_directory import prepare_model
from aligner.data.prompts import PromptStream, open_prompts
from aligner.data.run_inputs import compute_input_checksums
from aligner.data.tokenizer import Tokenizer
from aligner.errors import ConfigError
from aligner.paths import RunPaths
from aligner.schema import DataConfig
from tests.data.test_examples import TEMPLATE

RECORDS = [{"prompt": f"{index}+1", "answer": str(index + 1)} for index in range(1000)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    run = tmp_path_factory.mktemp("run")
    return Tokenizer(prepare_model(compose_config(["experiment=tiny_ppo", f"run.dir={run}"])))


@pytest.fixture
def data(tmp_path, monkeypatch) -> DataConfig:
    monkeypatch.setenv("ALIGNER_CACHE", str(tmp_path / "cache"))
    write(tmp_path / "records.jsonl", RECORDS)
    return DataConfig(path=str(tmp_path / "records.jsonl"))


def write(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def cache_of(tmp_path: Path, *, is_prepared: bool = False, processes: int = 1) -> ExampleCache:
    (tmp_path / "run").mkdir(exist_ok=True)
    return ExampleCache(
        tmp_path / "cache",
        RunPaths(tmp_path / "run"),
        is_prepared=is_prepared,
        processes=processes,
    )


def open_in(
    tmp_path: Path, data: DataConfig, tokenizer: Tokenizer, **arguments: Any
) -> PromptStream:
    return open_prompts(data, tokenizer, 1, cache=cache_of(tmp_path), **arguments)


def tables(tmp_path: Path) -> list[Path]:
    return sorted(path for path in (tmp_path / "cache" / "data").iterdir() if path.is_dir())


def prompts_of(stream: PromptStream) -> list[str]:
    """Return all prompts in the order of an epoch, with all of their fields."""
    return [
        f"{prompt.id} {prompt.text!r} {prompt.tokens.tolist()} {prompt.metadata} {prompt.origin}"
        for prompt in stream.take(0, len(stream))
    ]


@pytest.fixture
def parsed_chunks(monkeypatch) -> list[Any]:
    """The chunks that this process parses."""
    chunks = []
    parse = example_cache._TableBuild.parse

    def record(build: Any, chunk: Any) -> Any:
        chunks.append(chunk)
        return parse(build, chunk)

    monkeypatch.setattr(example_cache._TableBuild, "parse", record)
    return chunks


@pytest.mark.promise("tokenized-data-are-reused")
def test_later_starts_and_ranks_parse_no_record(tmp_path, data, tokenizer, parsed_chunks):
    cache = cache_of(tmp_path)
    expected = prompts_of(open_prompts(data, tokenizer, 1, cache=cache))
    cache.write_index()
    assert len(parsed_chunks) == 1

    assert prompts_of(open_in(tmp_path, data, tokenizer)) == expected
    # A rank does not even read the file.
    Path(str(data.path)).unlink()
    rank = cache_of(tmp_path, is_prepared=True)
    assert prompts_of(open_prompts(data, tokenizer, 1, cache=rank)) == expected
    assert len(parsed_chunks) == 1


def test_prompts_in_the_configuration_have_no_table(tmp_path, data, tokenizer):
    data = DataConfig(prompts=["1+1", "2+2"], shuffle=False)
    cache = cache_of(tmp_path)
    expected = prompts_of(open_prompts(data, tokenizer, 1, cache=cache))
    cache.write_index()
    rank = cache_of(tmp_path, is_prepared=True)
    assert prompts_of(open_prompts(data, tokenizer, 1, cache=rank)) == expected
    assert len(expected) == 2 and rank.tables == []


@pytest.mark.parametrize("shuffle", [True, False])
def test_table_contains_the_same_examples_as_memory(tmp_path, data, tokenizer, shuffle):
    data = replace(data, shuffle=shuffle)
    stream, memory = open_in(tmp_path, data, tokenizer), open_prompts(data, tokenizer, 1)
    assert prompts_of(stream) == prompts_of(memory)
    assert stream.compute_checksum() == memory.compute_checksum()
    assert list(stream.iterate_fields()) == list(memory.iterate_fields())
    held_out, memory_held_out = stream.hold_out(7)[1], memory.hold_out(7)[1]
    assert [prompt.text for prompt in held_out] == [prompt.text for prompt in memory_held_out]


@pytest.mark.parametrize("sort_by", ["n", "-n"])
def test_sorted_table_has_the_order_of_memory(tmp_path, data, tokenizer, sort_by):
    write(Path(str(data.path)), [{"prompt": str(n), "n": n % 7} for n in range(100)])
    data = replace(data, sort_by=sort_by, shuffle=False)
    assert prompts_of(open_in(tmp_path, data, tokenizer)) == prompts_of(
        open_prompts(data, tokenizer, 1)
    )


def test_several_processes_build_the_same_table(tmp_path, data, tokenizer, monkeypatch):
    single = (tables(open_and_get_root(tmp_path, data, tokenizer))[0] / ROWS_FILE).read_bytes()
    shutil.rmtree(tmp_path / "cache")
    monkeypatch.setattr(example_cache, "_SMALL_SOURCE", 0)
    cache = cache_of(tmp_path, processes=2)
    open_prompts(data, tokenizer, 1, cache=cache)
    assert (tables(tmp_path)[0] / ROWS_FILE).read_bytes() == single


def open_and_get_root(tmp_path: Path, data: DataConfig, tokenizer: Tokenizer) -> Path:
    open_in(tmp_path, data, tokenizer)
    return tmp_path


def test_changed_file_tokenizer_template_or_setting_gets_another_table(tmp_path, data, tokenizer):
    open_in(tmp_path, data, tokenizer)
    open_in(tmp_path, replace(data, shuffle=False, batch_size=7, held_out=3), tokenizer)
    assert len(tables(tmp_path)) == 1  # these settings do not change the examples

    open_in(tmp_path, replace(data, max_prompt_tokens=65), tokenizer)
    open_in(tmp_path, replace(data, fields={"prompt": "answer"}), tokenizer)
    open_in(tmp_path, data, tokenizer, include_messages=True)
    assert len(tables(tmp_path)) == 4

    chat = shutil.copytree(tokenizer.directory, tmp_path / "chat")
    (chat / "chat_template.jinja").write_text(TEMPLATE)
    open_in(tmp_path, data, Tokenizer(chat))
    (chat / "chat_template.jinja").write_text(TEMPLATE.replace("user", "human") + " ")
    open_in(tmp_path, data, Tokenizer(chat))
    assert len(tables(tmp_path)) == 6

    write(Path(str(data.path)), RECORDS[1:])
    assert len(open_in(tmp_path, data, tokenizer)) == 999
    assert len(tables(tmp_path)) == 7


def test_date_matters_only_to_templates_that_use_it(tmp_path, tokenizer):
    chat = shutil.copytree(tokenizer.directory, tmp_path / "chat")
    (chat / "chat_template.jinja").write_text(TEMPLATE)
    dates = ("2026-01-01", "2026-01-02")
    assert len({str(Tokenizer(chat, date).identity) for date in dates}) == 1
    (chat / "chat_template.jinja").write_text("{{ strftime_now('%Y') }}" + TEMPLATE)
    assert len({str(Tokenizer(chat, date).identity) for date in dates}) == 2


@pytest.mark.parametrize("processes", [1, 2])
def test_first_bad_record_is_named_by_file_and_line(
    tmp_path, data, tokenizer, monkeypatch, processes
):
    monkeypatch.setattr(example_cache, "_SMALL_SOURCE", 0)
    monkeypatch.setattr(record_sources, "_CHUNK_BYTES", 1000)
    records = [*RECORDS]
    records[700] = records[300] = {"prompt": ""}
    write(Path(str(data.path)), records)
    with pytest.raises(ConfigError, match=r"records\.jsonl:301: field `prompt` is empty"):
        open_prompts(data, tokenizer, 1, cache=cache_of(tmp_path, processes=processes))
    assert tables(tmp_path) == []

    stream = open_in(tmp_path, replace(data, skip_bad_records=True), tokenizer)
    assert len(stream) == 998
    assert "skipped 2 of 1000 records; first problem: " in stream.notices[0]


def test_duplicates_and_empty_lines_are_counted_at_every_start(tmp_path, data, tokenizer):
    path = Path(str(data.path))
    write(path, [*RECORDS, *RECORDS[:3]])
    path.write_text(path.read_text().replace("\n", "\n\n", 2))
    for _ in range(2):
        assert open_in(tmp_path, data, tokenizer).notices == (
            f"data.path={path}: skipped 2 empty lines",
            f"data.path={path}: 3 of 1003 records are exact copies of earlier records",
        )


def test_warnings_of_the_chat_template_are_logged_at_every_start(tmp_path, data, tokenizer, caplog):
    chat = shutil.copytree(tokenizer.directory, tmp_path / "chat")
    (chat / "chat_template.jinja").write_text(TEMPLATE)
    records = [
        {
            "messages": [
                {"role": "user", "content": "1"},
                {"role": "assistant", "content": "2", "reasoning_content": "3"},
            ]
        }
    ]
    write(Path(str(data.path)), records)
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "aligner"):
            open_demonstrations(data, Tokenizer(chat), 1, cache=cache_of(tmp_path))
        assert len(caplog.messages) == 1 and "does not render the reasoning" in caplog.text


@pytest.mark.promise("damaged-data-are-never-trained-on")
def test_damaged_table_is_built_again(tmp_path, data, tokenizer):
    expected = prompts_of(open_in(tmp_path, data, tokenizer))
    (table,) = tables(tmp_path)
    content = bytearray((table / ROWS_FILE).read_bytes())
    content[len(content) // 2] ^= 1
    (table / ROWS_FILE).write_bytes(content)
    with pytest.raises(Exception, match="do not match their checksum"):
        prompts_of(open_in(tmp_path, data, tokenizer))
    assert prompts_of(open_in(tmp_path, data, tokenizer)) == expected


def test_file_that_changes_while_it_is_read_is_refused(tmp_path, data, tokenizer, monkeypatch):
    parse = example_cache._TableBuild.parse

    def change_file(build: Any, chunk: Any) -> Any:
        result = parse(build, chunk)
        write(Path(str(data.path)), RECORDS[1:])
        return result

    with monkeypatch.context() as patch:
        patch.setattr(example_cache._TableBuild, "parse", change_file)
        with pytest.raises(ConfigError, match="the data changed while they were read"):
            open_in(tmp_path, data, tokenizer)
    assert tables(tmp_path) == []


def test_full_disk_is_named_with_the_remedy(tmp_path, data, tokenizer, monkeypatch):
    def fail(*_: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(example_cache, "write_table", fail)
    with pytest.raises(
        ConfigError,
        match=r"cannot be written to .*No space left.*aligner cache prune.*ALIGNER_CACHE",
    ):
        open_in(tmp_path, data, tokenizer)
    assert tables(tmp_path) == []


def test_missing_permission_is_not_answered_with_disk_space(tmp_path, data, tokenizer, monkeypatch):
    def fail(*_: Any) -> None:
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr(example_cache, "write_table", fail)
    with pytest.raises(ConfigError, match=r"Permission denied\. Make the directory writable, or"):
        open_in(tmp_path, data, tokenizer)


def test_notices_name_the_key_that_uses_the_file_now(tmp_path, data, tokenizer):
    write(Path(str(data.path)), [*RECORDS, RECORDS[0]])
    open_in(tmp_path, data, tokenizer)
    (table,) = tables(tmp_path)
    other = replace(data, path=None, sources={"sums": {"path": data.path}})
    (notice,) = open_in(tmp_path, other, tokenizer).notices
    assert notice.startswith(f"data.sources.sums.path={data.path}: 1 of 1001 records")
    assert tables(tmp_path) == [table]


@pytest.mark.parametrize("name", ["deep.json", "deep.jsonl"])
def test_deeply_nested_values_are_named_by_record(tmp_path, data, tokenizer, name):
    record = '{"prompt": "1", "x": ' + "[" * 5000 + "]" * 5000 + "}"
    path = tmp_path / name
    path.write_text(f"[{record}]" if name == "deep.json" else record)
    with pytest.raises(ConfigError, match=r"deep\.json(\[0\]|l:1): "):
        open_in(tmp_path, replace(data, path=str(path)), tokenizer)


def test_cache_that_is_a_file_is_named_with_the_remedy(tmp_path, data, tokenizer):
    (tmp_path / "cache").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written to .*ALIGNER_CACHE"):
        open_in(tmp_path, data, tokenizer)


def test_known_files_are_not_hashed_again(tmp_path, data, tokenizer, monkeypatch):
    long_ago = time.time() - 3600
    os.utime(str(data.path), (long_ago, long_ago))
    monkeypatch.setattr(example_cache, "_SETTLED_NS", -1)  # the inode changed just now
    cache = cache_of(tmp_path)
    open_prompts(data, tokenizer, 1, cache=cache)
    monkeypatch.setattr(example_cache, "compute_file_record", None)
    again = cache_of(tmp_path)
    open_prompts(data, tokenizer, 1, cache=again)
    assert again.get_file_records() == cache.get_file_records()


def test_checkpoints_record_the_checksums_of_prepared_data(tmp_path, data, tokenizer):
    config = compose_config(
        ["experiment=tiny_ppo", f"data.path={data.path}", f"run.dir={tmp_path / 'run'}"]
    )
    prepare_model(config)
    expected = compute_input_checksums(config)
    cache = cache_of(tmp_path)
    open_prompts(data, tokenizer, 1, cache=cache)
    Path(str(data.path)).unlink()  # the file is not read again
    assert compute_input_checksums(config, cache.get_file_records()) == expected


def test_checks_of_unchanged_data_run_once(tmp_path, data, tokenizer):
    calls = []

    def check() -> list[str]:
        calls.append(1)
        return ["notice"]

    for _ in range(2):
        cache = cache_of(tmp_path)
        open_prompts(data, tokenizer, 1, cache=cache)
        assert cache.remember({"reward": "math"}, check) == ["notice"]
    assert cache.remember({"reward": "gsm8k"}, check) == ["notice"]
    assert len(calls) == 2


@settings(deadline=None)
@given(st.lists(st.binary(max_size=50), max_size=5))
def test_combined_crc32_is_that_of_the_whole_text(parts: list[bytes]) -> None:
    checksum = 0
    for part in parts:
        checksum = combine_crc32(checksum, zlib.crc32(part), len(part))
    assert checksum == zlib.crc32(b"".join(parts))


def test_scored_demonstrations_keep_their_tokens(tmp_path, data, tokenizer):
    records = [{"prompt": f"{n}+1=", "response": f" {n + 1}"} for n in range(300)]
    write(Path(str(data.path)), records)
    table = open_demonstrations(data, tokenizer, 1, cache=cache_of(tmp_path))
    memory = open_demonstrations(data, tokenizer, 1)
    for found, expected in zip(table.take(0, 600), memory.take(0, 600), strict=True):
        assert torch.equal(found.tokens, expected.tokens)
        assert torch.equal(found.loss_mask, expected.loss_mask)
    ranges = zip(table.get_range(250, 300), memory.get_range(250, 300), strict=True)
    assert all(torch.equal(found.tokens, expected.tokens) for found, expected in ranges)


def start(
    tmp_path: Path, data: DataConfig, tokenizer: Tokenizer, **settings: Any
) -> subprocess.Popen[str]:
    arguments = {
        "path": str(data.path),
        "run": str(tmp_path / "run"),
        "model": str(tokenizer.directory),
        "processes": 1,
        **settings,
    }
    (tmp_path / "run").mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-m", "tests.data.cache_process", json.dumps(arguments)],
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"the process ended without {text!r}")


def finish(process: subprocess.Popen[str]) -> dict[str, int]:
    out, _ = process.communicate(timeout=60)
    result: dict[str, int] = json.loads(out.splitlines()[-1])
    return result


def test_one_of_two_processes_builds_and_the_other_waits(tmp_path, data, tokenizer):
    go = tmp_path / "go"
    first = start(tmp_path, data, tokenizer, go=str(go))
    wait_for(first, "parsing")
    second = start(tmp_path, data, tokenizer)
    wait_for(second, f"waiting until process {first.pid} on")
    go.touch()
    assert finish(first) == {"parsed": 1000, "prompts": 1000}
    assert finish(second) == {"parsed": 0, "prompts": 1000}


@pytest.fixture
def killed_build(tmp_path, data, tokenizer) -> Iterator[None]:
    process = start(tmp_path, data, tokenizer, go=str(tmp_path / "go"))
    wait_for(process, "parsing")
    process.send_signal(signal.SIGKILL)
    process.wait()
    yield
    process.communicate()


@pytest.mark.promise("damaged-data-are-never-trained-on")
def test_killed_build_leaves_no_table_and_is_repeated(
    tmp_path, data, tokenizer, killed_build, parsed_chunks
):
    assert len(open_in(tmp_path, data, tokenizer)) == 1000
    assert len(parsed_chunks) == 1
    # Nothing of the killed build remains.
    assert [path.name for path in tables(tmp_path)] == [
        table.directory.name for table in opened_tables(tmp_path, data, tokenizer)
    ]


def opened_tables(
    tmp_path: Path, data: DataConfig, tokenizer: Tokenizer
) -> list[ExampleTable[Any]]:
    cache = cache_of(tmp_path)
    open_prompts(data, tokenizer, 1, cache=cache)
    return cache.tables


@pytest.mark.slow
def test_processes_of_a_killed_build_end(tmp_path, data, tokenizer):
    write(Path(str(data.path)), RECORDS * 300)
    process = start(tmp_path, data, tokenizer, processes=2)
    wait_for(process, "records/s")
    children = psutil.Process(process.pid).children(recursive=True)
    workers = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
    process.send_signal(signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(workers, timeout=10)
    for child in alive:
        child.kill()
    process.communicate()
    assert len(workers) == 2 and not alive
