"""Fuzz the parsers of files and messages that someone else wrote.

    python -m benchmarks.fuzz                         # every parser, ten minutes each
    python -m benchmarks.fuzz --minutes 1 gguf config # some parsers
    python -m benchmarks.fuzz --list

Hypothesis changes valid files: it flips, removes, inserts and repeats bytes, and replaces values of
JSON by hostile ones, such as huge integers and deep lists. A parser may accept a file or refuse it
with an error of aligner. Any other exception is a finding, and so is a processor time of more than
ten seconds or an address space of more than 32 GiB. The files of a finding are written to
`--output`, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import gzip
import io
import json
import pickle
import random
import resource
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from aligner.errors import AlignerError

Files = Mapping[str, bytes]
"""Contents of the files of a directory, by name."""

MAX_SECONDS = 10.0
"""Maximum processor time of one call of a parser."""
MAX_ADDRESS_SPACE = 32 << 30
"""Maximum address space of the process in bytes. Imported libraries reserve a part of it."""
_ROUND_EXAMPLES = 2000
_HUGE = (0, 1, -1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
_DEPTH = 3000


@dataclass(frozen=True)
class Parser:
    """A parser, and the files that it is called with."""

    files: Callable[[], st.SearchStrategy[Files]]
    parse: Callable[[Path], object]
    """Function that parses the files of a directory."""


def run_parser(parser: Parser, directory: Path, files: Files) -> None:
    """Write files to a directory, and parse them.

    Raises:
        AssertionError: The parser raised an error that is not one of aligner, or took too long.
    """
    for old in directory.iterdir():
        old.unlink()
    for name, content in files.items():
        (directory / name).write_bytes(content)
    begin = time.process_time()
    try:
        parser.parse(directory)
    except AlignerError:
        pass
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise AssertionError(f"{type(error).__name__}: {error!s:.300}") from error
    seconds = time.process_time() - begin
    assert seconds < MAX_SECONDS, f"the parser took {seconds:.1f} s of processor time"


# ---------------------------------------------------------------------------- strategies


def mutate_bytes(content: bytes) -> st.SearchStrategy[bytes]:
    """Return changed forms of a valid file."""
    position = st.integers(0, max(0, len(content) - 1))
    number = st.sampled_from(_HUGE).map(lambda value: struct.pack("<Q", value % 2**64))
    insertion = st.one_of(
        st.binary(min_size=1, max_size=8), number, number.map(lambda each: each[:4])
    )
    change = st.tuples(
        st.sampled_from(("replace", "insert", "delete", "repeat", "cut")),
        position,
        insertion,
        st.integers(1, 64),
    )
    return st.lists(change, min_size=0, max_size=4).map(lambda changes: _apply(content, changes))


def _apply(content: bytes, changes: list[tuple[str, int, bytes, int]]) -> bytes:
    for action, position, inserted, count in changes:
        before, after = content[:position], content[position:]
        if action == "replace":
            content = before + inserted + after[len(inserted) :]
        elif action == "insert":
            content = before + inserted + after
        elif action == "delete":
            content = before + after[count:]
        elif action == "repeat":
            content = before + after[:count] * 3 + after[count:]
        else:
            content = before
    return content


_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([*_HUGE, 10**400, -(10**400)]),
    st.integers(-5, 200),
    st.sampled_from([1e308, -0.0, 0.5, float("inf"), float("-inf"), float("nan")]),
    st.text(max_size=8),
    st.sampled_from(["\ud800", "\x1b[31m", "../x", "", "a" * 5000, "x\x00"]),
)
VALUES = st.recursive(
    _SCALARS,
    lambda entries: (
        st.lists(entries, max_size=4) | st.dictionaries(st.text(max_size=6), entries, max_size=4)
    ),
    max_leaves=8,
)


def mutate_json(value: Any) -> st.SearchStrategy[bytes]:
    """Return JSON texts in which entries of a valid value are replaced, added or removed."""
    paths = list(_paths(value))
    change = st.tuples(
        st.sampled_from(paths), st.sampled_from(("replace", "remove", "deep", "add")), VALUES
    )
    texts = st.lists(change, min_size=0, max_size=3).map(
        lambda changes: _change_json(value, changes)
    )
    return texts | mutate_bytes(json.dumps(value).encode())


def _paths(value: Any, prefix: tuple[Any, ...] = ()) -> Any:
    yield prefix
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, entry in items:
            yield from _paths(entry, (*prefix, key))


def _change_json(value: Any, changes: list[tuple[tuple[Any, ...], str, Any]]) -> bytes:
    root = [json.loads(json.dumps(value))]
    is_deep = False
    for path, action, new in changes:
        *parents, key = (0, *path)
        target: Any = root
        for parent in parents:
            try:
                target = target[parent]
            except (LookupError, TypeError):
                target = None
        try:
            if action == "remove":
                del target[key]
            elif action == "add" and isinstance(target[key], dict):
                target[key]["added"] = new
            elif action == "deep":
                target[key] = "DEEP"
                is_deep = True
            else:
                target[key] = new
        except (LookupError, TypeError):
            continue
    text = json.dumps(root[0] if root else None)
    if is_deep:
        text = text.replace('"DEEP"', "[" * _DEPTH + "]" * _DEPTH)
    return text.encode()


def one_file(name: str, contents: st.SearchStrategy[bytes]) -> st.SearchStrategy[Files]:
    return contents.map(lambda content: {name: content})


# ------------------------------------------------------------------------------- models


def _gguf_value(kind: int, value: Any) -> bytes:
    if kind == 8:
        text = value.encode()
        return struct.pack("<Q", len(text)) + text
    return struct.pack({4: "<I", 6: "<f", 10: "<Q"}[kind], value)


def valid_gguf() -> bytes:
    """Return a GGUF file with the header of a small Llama."""
    fields: list[tuple[str, int, Any]] = [
        ("general.architecture", 8, "llama"),
        ("llama.block_count", 4, 2),
        ("llama.embedding_length", 4, 16),
        ("llama.attention.head_count", 4, 2),
        ("llama.feed_forward_length", 4, 32),
        ("llama.vocab_size", 4, 8),
        ("llama.context_length", 4, 64),
        ("llama.attention.layer_norm_rms_epsilon", 6, 1e-5),
        ("tokenizer.ggml.eos_token_id", 4, 2),
    ]
    tokens = [("tokenizer.ggml.tokens", [f"t{index}" for index in range(8)])]
    content = b"GGUF" + struct.pack("<IQQ", 3, 1, len(fields) + len(tokens))
    for key, kind, value in fields:
        content += _gguf_value(8, key) + struct.pack("<I", kind) + _gguf_value(kind, value)
    for key, texts in tokens:
        content += _gguf_value(8, key) + struct.pack("<IIQ", 9, 8, len(texts))
        content += b"".join(_gguf_value(8, text) for text in texts)
    content += _gguf_value(8, "output.weight") + struct.pack("<IQQIQ", 2, 16, 8, 0, 0)
    return content + bytes(16 * 8 * 4)


@st.composite
def gguf_headers(draw: st.DrawFn) -> bytes:
    """Return GGUF headers with hostile counts, types and nesting."""
    count = st.sampled_from(_HUGE) | st.integers(0, 4)
    content = b"GGUF" + struct.pack("<I", draw(st.sampled_from((2, 3))))
    content += struct.pack("<QQ", draw(count) % 2**64, draw(count) % 2**64)
    for _ in range(draw(st.integers(0, 6))):
        part = draw(st.sampled_from(("string", "array", "type", "number")))
        if part == "string":
            text = draw(st.binary(max_size=12))
            length = draw(st.just(len(text)) | count)
            content += struct.pack("<Q", length % 2**64) + text
        elif part == "array":
            depth = draw(st.sampled_from((1, 2, 5, 4000)))
            content += struct.pack("<I", 9)
            content += struct.pack("<IQ", 9, 1) * (depth - 1)
            content += struct.pack("<IQ", draw(st.integers(0, 13)), draw(count) % 2**64)
        elif part == "type":
            content += struct.pack("<I", draw(st.integers(0, 14)))
        else:
            content += struct.pack("<Q", draw(count) % 2**64)
    return content + bytes(draw(st.integers(0, 64)))


def _parse_gguf(directory: Path) -> object:
    from aligner.models.gguf_header import gguf_shape

    return gguf_shape(directory / "model.gguf")


def _safetensors(header: Any, data: int = 64) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data)


_HEADER = {
    "__metadata__": {"format": "pt"},
    "model.norm.weight": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]},
    "lm_head.weight": {"dtype": "BF16", "shape": [4, 4], "data_offsets": [32, 64]},
}


def _safetensors_files() -> st.SearchStrategy[Files]:
    contents = mutate_json(_HEADER).map(_safetensors) | mutate_bytes(_safetensors(_HEADER))
    return one_file("model.safetensors", contents)


def _parse_weights(directory: Path) -> object:
    from aligner.data.model_directory import _open_safetensors
    from aligner.models.weight_headers import read_header, tensor_files

    files = tensor_files(directory)
    for file in dict.fromkeys(files.values()):
        read_header(file)
        with _open_safetensors(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118
                tensors.get_tensor(name)
    return files


def _index_files() -> st.SearchStrategy[Files]:
    index = {"metadata": {"total_size": 64}, "weight_map": {"a": "x", "b": "x"}}
    return mutate_json(index).map(
        lambda text: {"model.safetensors.index.json": text, "x": _safetensors(_HEADER)}
    )


_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
    "vocab_size": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "eos_token_id": [1, 2],
    "tie_word_embeddings": False,
}


@cache
def _published_configs() -> list[dict[str, Any]]:
    """Return one small config.json of each architecture."""
    from aligner.models.architectures import ARCHITECTURES_BY_CLASS

    configs = [_LLAMA]
    for name, architecture in ARCHITECTURES_BY_CLASS.items():
        entries: dict[str, Any] = {"architectures": [name], "model_type": architecture.model_type}
        for table in (
            architecture.entries,
            architecture.expert_entries,
            architecture.latent_entries,
            architecture.delta_net_entries,
        ):
            entries |= {entry.key: entry.default for entry in table.values()}
        entries |= {
            "layer_types": None,
            "mlp_only_layers": [0],
            "first_k_dense_replace": 1,
            "rope_scaling": None,
            "quantization_config": None,
            "num_nextn_predict_layers": 1,
            "sliding_window": 16,
        }
        configs.append(entries)
    return configs


def _config_files() -> st.SearchStrategy[Files]:
    configs = st.sampled_from(_published_configs()).flatmap(mutate_json)
    generation = st.none() | mutate_json({"eos_token_id": [1, 2]})
    return st.tuples(configs, generation).map(
        lambda pair: (
            {"config.json": pair[0]} | ({} if pair[1] is None else {GENERATION_CONFIG: pair[1]})
        )
    )


GENERATION_CONFIG = "generation_config.json"


def _parse_config(directory: Path) -> object:
    from aligner.data.checkpoint_files import derive_model_config
    from aligner.models.hugging_face import config_notes
    from aligner.models.model_source import directory_config, directory_shape, read_normalization
    from aligner.models.weight_slices import weight_table

    shape = directory_shape(directory, "model.path")
    config = directory_config(directory, "model.path")
    read_normalization(directory)
    derive_model_config(directory, "scalar", 1)
    return config_notes(config), weight_table(shape)


# ---------------------------------------------------------------- tokenizers and templates


@cache
def _valid_tokenizers() -> list[dict[str, Any]]:
    """Return the content of small tokenizer.json files of each model type."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    words = {chr(code): index for index, code in enumerate(range(32, 127))}
    bpe = Tokenizer(models.BPE(words | {"ab": 95}, [("a", "b")], byte_fallback=True))
    bpe.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "_")])
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(["<s>", "</s>"])
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("b", -2.0)], unk_id=0))
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    word_piece = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    word_level = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    return [json.loads(each.to_str()) for each in (bpe, unigram, word_piece, word_level)]


def _tokenizer_files() -> st.SearchStrategy[Files]:
    setting = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "special": True},
        "added_tokens_decoder": {"96": {"content": "<x>", "special": True}},
        "extra_special_tokens": ["<y>"],
        "clean_up_tokenization_spaces": True,
        "chat_template": "{{ messages }}",
        "extra_ids": 3,
    }
    classes = st.sampled_from(
        ("LlamaTokenizer", "GPT2Tokenizer", "T5Tokenizer", "BertTokenizer", "GemmaTokenizer")
    )
    contents = st.sampled_from(_valid_tokenizers()).flatmap(mutate_json)
    settings_texts = (
        st.just(b"{}")
        | mutate_json(setting)
        | classes.map(lambda name: json.dumps(setting | {"tokenizer_class": name}).encode())
    )
    return st.tuples(contents, settings_texts, mutate_json({"vocab_size": 99})).map(
        lambda parts: {
            "tokenizer.json": parts[0],
            "tokenizer_config.json": parts[1],
            "config.json": parts[2],
        }
    )


def _parse_tokenizer(directory: Path) -> object:
    from aligner.data.tokenizer_files import has_chat_template, read_tokenizer_files
    from aligner.models.vocabulary import read_vocabulary

    read_vocabulary(directory)
    has_chat_template(directory)
    return read_tokenizer_files(directory)


_TEMPLATE = (
    "{% macro show(m) %}{{ m.role | upper }}: {{ m.content | trim }}{% endmacro %}"
    "{% set ns = namespace(x='') %}{% for m in messages %}{{ show(m) }}{% set ns.x = ns.x ~ '!' %}"
    "{% if loop.last and add_generation_prompt %}{{ ns.x * 2 }}{% endif %}{% endfor %}"
    "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}"
)
_FRAGMENTS = (
    "{% for i in range(99999) %}",
    "{% endfor %}",
    "{{ 'x' * 999999999999 }}",
    "{{ 'x'.center(9999999999) }}",
    "{{ 'x' | center(9999999999) }}",
    "{{ 2 ** 999999999 }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '{:999999999}'.format(1) }}",
    "{% set ns = namespace(x='aaaaaaaa', y=[]) %}",
    "{% set ns.x = ns.x + ns.x %}",
    "{% set ns.x = ns.x ~ ns.x %}",
    "{% set ns.y = [ns.y, ns.y] %}",
    "{{ ns.x }}",
    "{{ ns.y | tojson }}",
    "{{ ns.y }}",
    "{{ ns.x | replace('a', ns.x) }}",
    "{{ ns.x.replace('a', ns.x) }}",
    "{{ ns.x | indent(999999999) }}",
    "{{ [1] * 999999999999 }}",
    "{{ messages | tojson(indent=999999999) }}",
    "{{ range(99999) | join('xxxxxxxxxxxxxxxx') | length }}",
    "{% macro m(n) %}{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ lipsum(999999) }}",
    "{{ 1.5 | round(999999999) }}",
    "{{ range(99999) | batch(999999999) | list }}",
    "{{ strftime_now('%Y') }}",
    "{{ raise_exception('no') }}",
)


def _template_files() -> st.SearchStrategy[Files]:
    programs = st.lists(
        st.sampled_from(_FRAGMENTS) | st.sampled_from([_TEMPLATE, "{% endfor %}" * 2]), max_size=8
    )
    texts = programs.map("".join).map(str.encode) | mutate_bytes(_TEMPLATE.encode())
    return texts.map(lambda text: {"chat_template.jinja": text})


def _parse_template(directory: Path) -> object:
    from aligner.data.chat_template import ChatTemplate

    messages = [{"role": "user", "content": "Hi \x1b"}, {"role": "assistant", "content": "Hello"}]
    template = ChatTemplate(directory)
    return template.render(messages, add_generation_prompt=True)


# ----------------------------------------------------------------------------------- data


_RECORD = {
    "prompt": [{"role": "user", "content": "2+2?"}],
    "answer": "4",
    "fields": {"a": [1, 2.5, None, True], "b": {"c": "d"}},
}


@cache
def _parquet() -> bytes:
    import pyarrow as pa
    from pyarrow import parquet

    table = pa.table({"prompt": ["a", "b", "a"], "n": [1, 2, 3], "l": [[1], [2, 3], None]})
    buffer = io.BytesIO()
    parquet.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()


def _lines() -> st.SearchStrategy[bytes]:
    line = mutate_json(_RECORD)
    return st.lists(line, max_size=4).map(b"\n".join)


def _csv() -> bytes:
    text = io.StringIO()
    csv.writer(text).writerows([["prompt", "answer"], ["a,b", 'c"d'], ["e\nf", "g"]])
    return text.getvalue().encode()


def _record_files() -> st.SearchStrategy[Files]:
    arrays = mutate_json([_RECORD, _RECORD])
    return st.one_of(
        one_file("data.jsonl", _lines()),
        one_file("data.json", arrays),
        one_file("data.jsonl.gz", _lines().map(gzip.compress)),
        one_file("data.json.gz", arrays.map(gzip.compress)),
        one_file("data.jsonl.gz", mutate_bytes(gzip.compress(json.dumps(_RECORD).encode()))),
        one_file("data.csv", mutate_bytes(_csv())),
        one_file("data.txt", mutate_bytes(b"one\ntwo\n")),
    )


def _parquet_files() -> st.SearchStrategy[Files]:
    return one_file("data.parquet", mutate_bytes(_parquet()))


def _parse_records(directory: Path) -> object:
    from aligner.data.data_statistics import choose_record_fields
    from aligner.data.record_sources import hash_raw_record, is_blank, open_record_source
    from aligner.data.records import choose_fields, has_content, to_record

    (file,) = directory.iterdir()
    records = []
    for raw in open_record_source(file, "data.path=").read():
        hash_raw_record(raw)
        if not is_blank(raw):
            records.append(to_record(raw, {}).values)
    if records:
        choose_fields(records, "ppo", generates=True)
        has_content(records[0])
    return choose_record_fields


# ---------------------------------------------------------------------------- checkpoints


@cache
def _torch_dist() -> dict[str, bytes]:
    import torch.distributed.checkpoint as dcp

    with tempfile.TemporaryDirectory() as place:
        state = {"embedding.word_embeddings.weight": torch.zeros(8, 4)}
        dcp.save(state, checkpoint_id=place, no_dist=True)
        return {file.name: file.read_bytes() for file in Path(place).iterdir()}


class _Call:
    def __reduce__(self) -> Any:
        return (print, ("executed",))


@st.composite
def _pickles(draw: st.DrawFn) -> bytes:
    """Return pickles of opcodes with hostile arguments."""
    huge = st.sampled_from(_HUGE).map(lambda value: struct.pack("<Q", value % 2**64))
    parts = [b"\x80\x04"]
    names = ("torch\nSize", "torch.distributed.checkpoint.metadata\nMetadata", "os\nsystem")
    for _ in range(draw(st.integers(1, 8))):
        parts.append(
            draw(
                st.one_of(
                    huge.map(lambda size: b"\x96" + size + b"x"),
                    huge.map(lambda size: b"\x8e" + size + b"x"),
                    huge.map(lambda size: b"]r" + size[:4]),
                    huge.map(lambda size: b"\x8b" + size[:4] + b"x"),
                    st.sampled_from(names).map(lambda name: b"c" + name.encode() + b"\n"),
                    st.sampled_from(
                        [b"(", b"t", b"R", b"}", b"b", b"]", b"l", b"a", b"e", b"\x81"]
                    ),
                    st.sampled_from([b"(" * 5000, b"](" * 2000 + b"e" * 2000, b"2" * 50]),
                )
            )
        )
    return b"".join(parts) + b"."


def _torch_dist_files() -> st.SearchStrategy[Files]:
    valid = _torch_dist()
    metadata = (mutate_bytes(valid[".metadata"]) | _pickles() | st.just(pickle.dumps(_Call()))).map(
        lambda content: valid | {".metadata": content}
    )
    (data_name,) = [name for name in valid if name != ".metadata"]
    data = mutate_bytes(valid[data_name]).map(lambda content: valid | {data_name: content})
    return metadata | data


def _parse_torch_dist(directory: Path) -> object:
    from aligner.megatron.torch_dist import _Checkpoint, _Region

    checkpoint = _Checkpoint(directory)
    region = checkpoint.find("embedding.word_embeddings.weight")
    # `read_checkpoint` compares the shape before it reads.
    if isinstance(region, _Region) and checkpoint.shape(region) == (8, 4):
        checkpoint.read([region])
    return checkpoint.tensors


def _seal(content: bytes) -> bytes:
    from aligner.data.checksums import seal

    text = content.decode(errors="replace")
    try:
        return seal(text if text.startswith("{") else '{"x": ' + text + "}").encode()
    except UnicodeError:
        return content


def _manifest_files() -> st.SearchStrategy[Files]:
    manifest = {
        "aligner": "1",
        "model": _LLAMA,
        "head": "vocabulary",
        "source": "x",
        "optimizer": {},
        "lora": None,
        "updates": 1,
        "adam_steps": 1,
        "schedule_steps": 1,
        "files": {"rank_0.safetensors": [len(_safetensors(_HEADER)), "0"]},
        "index": {"model.norm.weight": [[8], True, [[0, None, 0, 0]]]},
        "format": 4,
    }
    from aligner.data.checkpoint_files import FORMAT

    manifest["format"] = FORMAT
    return mutate_json(manifest).map(
        lambda text: {"manifest.json": _seal(text), "rank_0.safetensors": _safetensors(_HEADER)}
    )


def _parse_manifest(directory: Path) -> object:
    from aligner.data.checkpoint_files import find_damaged_files, read_manifest

    manifest = read_manifest(directory)
    find_damaged_files(directory, manifest.files)
    return manifest.shape


# ------------------------------------------------------------------------------- messages


def _request_files() -> st.SearchStrategy[Files]:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": []}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    chat = {"model": "m", "messages": messages, "tools": tools, "max_tokens": 5, "n": 1, "seed": 1}
    anthropic = {"model": "m", "max_tokens": 5, "system": "s", "messages": messages[:1]}
    responses = {"model": "m", "input": [{"role": "user", "content": "Hi"}], "tools": []}
    completion = {"model": "m", "prompt": [1, 2], "max_tokens": 3, "logprobs": 2, "stop": ["x"]}
    return st.one_of(
        one_file("chat", mutate_json(chat | {"response_format": {"type": "json_object"}})),
        one_file("anthropic", mutate_json(anthropic)),
        one_file("responses", mutate_json(responses)),
        one_file("completions", mutate_json(completion)),
    )


def _parse_request(directory: Path) -> object:
    from aligner.agents.protocols.anthropic_messages import ANTHROPIC_MESSAGES
    from aligner.agents.protocols.chat_completions import CHAT_COMPLETIONS
    from aligner.agents.protocols.response_store import ResponseStore
    from aligner.agents.protocols.responses_api import RESPONSES
    from aligner.agents.protocols.text_completions import TEXT_COMPLETIONS
    from aligner.agents.protocols.wire_format import RequestContext

    formats = {
        "chat": CHAT_COMPLETIONS,
        "anthropic": ANTHROPIC_MESSAGES,
        "responses": RESPONSES,
        "completions": TEXT_COMPLETIONS,
    }
    (file,) = directory.iterdir()
    context = RequestContext("id", ResponseStore())
    return formats[file.name].parse(file.read_bytes(), context)


def _wire_files() -> st.SearchStrategy[Files]:
    from safetensors.numpy import save

    branches = save({"responses": np.zeros((1, 2), np.int64)})
    return st.one_of(
        one_file("control", mutate_json({"op": "health"})),
        one_file("metadata", mutate_json({"answer": "4"})),
        one_file("options", mutate_json({"temperature": 1.0, "max_tokens": 5})),
        one_file("reports", mutate_json([{"turns": 1}])),
        one_file("grammars", mutate_json([[1, 2, "g", [0]]])),
        one_file("branches", mutate_bytes(branches)),
    )


def _parse_wire(directory: Path) -> object:
    from aligner.servers import validation
    from aligner.servers.generator_server import _parse_options
    from aligner.servers.wire_protocol import decode_text, parse_metadata

    (file,) = directory.iterdir()
    content = file.read_bytes()
    limits = validation.Limits(vocab_size=8, max_sequence_length=16)
    raw = np.frombuffer(content, np.uint8)
    if file.name in ("control", "metadata", "options"):
        text = decode_text(np.array([content], dtype=object))
        if file.name == "control":
            return validation.parse_control_request(text, {})
        return parse_metadata([text]) if file.name == "metadata" else _parse_options(text)
    if file.name == "reports":
        return validation._check_reports({"reports": raw, "responses": np.zeros((1, 1))})
    if file.name == "grammars":
        column = np.array([[content]], dtype=object)
        arrays = {"grammars": column, "sequence_lengths": np.array([[4]])}
        return validation._check_row_grammars(arrays, limits)
    arrays = {"branches": raw, "branch_counts": np.zeros((1, 1), np.int64)}
    return validation._check_branches(arrays, limits)


def _run_files() -> st.SearchStrategy[Files]:
    status = {
        "pid": 1,
        "pid_start": 2,
        "host": "h",
        "started": 1.0,
        "roles": {"trainer": {"ranks": 1, "healthy": True, "restarts": 0, "silent": False}},
        "exit_code": 1,
        "ended": 2.0,
        "reason": "\x1b[2J",
    }
    metrics = {"step": 1, "time/step": 0.5, "reward/mean": 0.1, "eval/\x1b[31m/score": 1.0}
    span = {"start": 1, "us": 5, "name": "generate", "step": 1}
    opened = {"opened": 1, "clock_offset_us": 3}
    config = b"run: {name: x, steps: 3}\nmodel: &m {source: random}\nother: [*m, *m]\n"
    return st.one_of(
        one_file("status.json", mutate_json(status)),
        one_file("metrics.jsonl", mutate_json(metrics).map(lambda line: line + b"\n")),
        one_file("notes.json", mutate_json({"note": "n", "tags": ["a"]})),
        one_file("endpoints.json", mutate_json({"reward": {"host": "h", "http": 1, "grpc": 2}})),
        one_file(
            "trainer-0.jsonl",
            mutate_json(span).map(lambda line: json.dumps(opened).encode() + b"\n" + line + b"\n"),
        ),
        one_file("config.yaml", mutate_bytes(config) | mutate_json({"run": {"steps": 3}})),
    )


def _parse_run(directory: Path) -> object:
    from types import SimpleNamespace

    from aligner.config.compose import load_config
    from aligner.launcher.run_directory import read_state
    from aligner.observability.console import Pace
    from aligner.observability.metrics import read_metrics
    from aligner.observability.trace import read_spans
    from aligner.placement.addresses import load_endpoints
    from aligner.view.run_curves import read_curves
    from aligner.view.run_notes import read_notes

    (file,) = directory.iterdir()
    if file.name == "status.json":
        state = read_state(file)
        return None if state is None else (state.is_gone(1.0), state.end_reason)
    if file.name == "metrics.jsonl":
        read_curves(file, ["reward/mean"])
        pace = Pace(3)
        for record in read_metrics(file):
            pace.add(record)
            pace.describe(record)
        return pace
    if file.name == "notes.json":
        return read_notes(file)
    if file.name == "endpoints.json":
        return load_endpoints(file)
    if file.name == "config.yaml":
        return load_config(file)
    return read_spans(SimpleNamespace(timeline=directory))  # type: ignore[arg-type]


PARSERS: Mapping[str, Parser] = {
    "gguf": Parser(
        lambda: one_file("model.gguf", mutate_bytes(valid_gguf()) | gguf_headers()), _parse_gguf
    ),
    "safetensors": Parser(_safetensors_files, _parse_weights),
    "index": Parser(_index_files, _parse_weights),
    "config": Parser(_config_files, _parse_config),
    "tokenizer": Parser(_tokenizer_files, _parse_tokenizer),
    "chat_template": Parser(_template_files, _parse_template),
    "records": Parser(_record_files, _parse_records),
    "parquet": Parser(_parquet_files, _parse_records),
    "torch_dist": Parser(_torch_dist_files, _parse_torch_dist),
    "checkpoint": Parser(_manifest_files, _parse_manifest),
    "requests": Parser(_request_files, _parse_request),
    "wire": Parser(_wire_files, _parse_wire),
    "run_directory": Parser(_run_files, _parse_run),
}
"""All parsers by name."""


# -------------------------------------------------------------------------------- command


class _RoundEnded(BaseException):
    """Ends a round of examples. Hypothesis does not catch it, because it is not an Exception."""


def fuzz(parser: Parser, seconds: float, seed: int) -> tuple[int, Files | None, str]:
    """Call a parser with changed files for some time, or until it fails.

    Returns:
        The number of calls, the first files that fail, None if there are none, and the failure.
    """
    calls = 0
    failing: Files | None = None
    problem = ""
    with tempfile.TemporaryDirectory(prefix="aligner-fuzz-") as place:
        directory = Path(place)
        strategy = parser.files()
        # The first call imports the modules of the parser, which takes part of a minute.
        with contextlib.suppress(Exception):
            parser.parse(directory)
        end = time.monotonic() + seconds

        def check(files: Files) -> None:
            nonlocal calls, failing, problem
            if time.monotonic() > end:
                raise _RoundEnded
            calls += 1
            try:
                run_parser(parser, directory, files)
            except AssertionError as error:
                failing, problem = files, str(error)
                raise _RoundEnded from error

        while time.monotonic() < end and failing is None:
            test = settings(
                max_examples=_ROUND_EXAMPLES,
                deadline=None,
                database=None,
                phases=[hypothesis.Phase.generate],
                suppress_health_check=list(HealthCheck),
            )(hypothesis.seed(seed)(hypothesis.given(strategy)(check)))
            seed += 1
            with contextlib.suppress(_RoundEnded):
                test()
    return calls, failing, problem


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parsers", nargs="*", metavar="PARSER", help=", ".join(PARSERS))
    parser.add_argument("--minutes", type=float, default=10.0, help="minutes for each parser")
    parser.add_argument("--seed", type=int, help="seed of the first round; default: random")
    parser.add_argument("--output", type=Path, help="directory for the files of findings")
    parser.add_argument("--list", action="store_true", help="print the names of the parsers")
    parsed = parser.parse_args()
    if unknown := [name for name in parsed.parsers if name not in PARSERS]:
        parser.error(f"{', '.join(unknown)}: no such parser; allowed: {', '.join(PARSERS)}")
    if parsed.list:
        print("\n".join(PARSERS))
        return 0

    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_SPACE, resource.RLIM_INFINITY))
    findings = 0
    for name in parsed.parsers or PARSERS:
        seed = random.randrange(2**32) if parsed.seed is None else parsed.seed
        begin = time.monotonic()
        calls, failing, problem = fuzz(PARSERS[name], 60 * parsed.minutes, seed)
        minutes = (time.monotonic() - begin) / 60
        print(f"{name}: {calls} files in {minutes:.1f} minutes, seed {seed}", flush=True)
        if failing is None:
            continue
        findings += 1
        print(f"  finding: {problem}")
        if parsed.output is not None:
            directory = parsed.output / name
            directory.mkdir(parents=True, exist_ok=True)
            for file_name, content in failing.items():
                (directory / file_name).write_bytes(content)
            print(f"  its files are in {directory}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
