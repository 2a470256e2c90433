"""Export of model directories (tests/megatron/test_export.py covers checkpoints)."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from aligner.data.checksums import compute_file_record
from aligner.data.export import export, find_source, parse_size
from aligner.data.model_directory import (
    TensorEntry,
    check_model_directory,
    prepare_model,
    write_safetensors,
)
from aligner.errors import ConfigError
from aligner.schema import Config, ModelConfig, RunConfig
from tests.small_disk import small_disk

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    return prepare_model(
        Config(run=RunConfig(dir=str(directory)), model=ModelConfig(source="random", config=CONFIG))
    )


def tensors(directory):
    return {
        name: tensor
        for file in directory.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def test_export_splits_weights_into_shards(model, tmp_path):
    progress_reports = []
    notices = export(
        find_source(model),
        tmp_path / "out",
        max_shard_bytes=20_000,
        progress=lambda *bytes_done: progress_reports.append(bytes_done),
    )
    assert notices == []
    assert check_model_directory(tmp_path / "out") == check_model_directory(model)
    whole, cut = tensors(model), tensors(tmp_path / "out")
    assert cut.keys() == whole.keys() and all(torch.equal(cut[name], whole[name]) for name in whole)
    sizes = [file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors")]
    assert len(sizes) > 2 and max(sizes) < 20_000 + 2_000  # the header adds to the limit
    total = sum(tensor.nbytes for tensor in whole.values())
    assert progress_reports[-1] == (total, total) and len(progress_reports) == len(whole)
    # A sharded directory can be exported again.
    export(find_source(tmp_path / "out"), tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").stat().st_size > total


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_export_converts_weights_and_config_to_dtype(model, tmp_path, dtype):
    export(find_source(model), tmp_path / "out", dtype=dtype)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype
    for name, tensor in tensors(model).items():
        assert torch.equal(tensors(tmp_path / "out")[name], tensor.to(getattr(torch, dtype)))


def test_failed_export_overwrites_nothing_and_leaves_no_files(model, tmp_path):
    source = find_source(model)
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="out: already exists"):
        export(source, tmp_path / "out")

    def fail(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(source, tmp_path / "other", progress=fail)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_unwritable_destination_leaves_no_files(model, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/out: cannot be written: Not a directory"):
        export(find_source(model), tmp_path / "file" / "out")
    with small_disk(tmp_path / "disk", "64k") as disk:
        with pytest.raises(
            ConfigError, match=r"disk/out: cannot be written: No space left on device$"
        ):
            export(find_source(model), disk.directory / "out")
        assert not [*disk.directory.iterdir()]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda path: path.rmdir(), "no such directory"),
        (lambda path: None, "expected a run directory"),
        (lambda path: (path / "checkpoints").mkdir(), "the run has no complete checkpoint yet"),
        (
            lambda path: (path / "policy").mkdir(),
            "incomplete checkpoint: manifest.json, which is written last, is missing",
        ),
        (
            lambda path: (path / "rank_0.safetensors").touch(),
            "not a complete checkpoint: manifest.json, which is written last, is missing",
        ),
        (
            lambda path: (path / "manifest.json").write_text("{"),
            "manifest.json: damaged: the content",
        ),
        (
            lambda path: (path / "config.json").write_text("[]"),
            "config.json must be a JSON object, got list",
        ),
        (
            lambda path: (path / "config.json").write_bytes(b'{"a": "\xff"}'),
            "config.json is not valid JSON",
        ),
        (
            lambda path: (path / "config.json").write_text("{}"),
            "architecture <none> is not supported",
        ),
        (
            lambda path: (path / "config.json").write_text(json.dumps(CONFIG)),
            "neither model.safetensors nor",
        ),
    ],
)
def test_invalid_export_source_is_refused(tmp_path, make, told):
    path = tmp_path / "source"
    path.mkdir()
    make(path)
    with pytest.raises(ConfigError, match=told):
        find_source(path)


def test_shard_size_is_parsed_with_unit():
    assert [parse_size(text) for text in ("5GB", "1.5 MiB", "7kb", "12")] == [
        5 * 10**9,
        3 << 19,
        7000,
        12,
    ]
    for text in ("GB", "5 parsecs", "-1GB", "0GB", ""):
        with pytest.raises(ConfigError, match="--max-shard-size"):
            parse_size(text)


def test_written_tensors_are_readable_by_safetensors(tmp_path):
    written = {
        "flags": torch.tensor([True, False, True]),
        "half": torch.randn(3, 5).to(torch.bfloat16),
        "number": torch.tensor(4),
        "none": torch.empty(0, 4),
        "cut": torch.randn(6, 4).T,
    }
    entries = [
        TensorEntry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in written.items()
    ]
    assert write_safetensors(
        tmp_path / "ours", entries, written.__getitem__
    ) == compute_file_record(tmp_path / "ours")
    read = load_file(tmp_path / "ours")
    assert read.keys() == written.keys()
    assert all(
        read[name].dtype == tensor.dtype and torch.equal(read[name], tensor)
        for name, tensor in written.items()
    )
    save_file(
        {name: tensor.contiguous() for name, tensor in written.items()},
        tmp_path / "theirs",
        {"format": "pt"},
    )
    with safe_open(tmp_path / "ours", "pt") as ours, safe_open(tmp_path / "theirs", "pt") as theirs:
        assert ours.metadata() == theirs.metadata()
    with pytest.raises(
        ValueError,
        match=r"half: expected torch.float32 \(3, 5\), got torch.bfloat16 \(3, 5\)",
    ):
        write_safetensors(
            tmp_path / "bad", [TensorEntry("half", torch.float32, (3, 5))], written.__getitem__
        )
