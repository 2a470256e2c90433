"""Metadata of torch_dist checkpoints that would exhaust memory or change torch are refused."""

from __future__ import annotations

import pickle
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from aligner.errors import ConfigError
from aligner.megatron.torch_dist import _Checkpoint

METADATA = ".metadata"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    state = {"embedding.word_embeddings.weight": torch.ones(8, 4)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    return tmp_path


def class_changes() -> bytes:
    """Return a pickle that sets an attribute of the class Metadata."""
    return (
        b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n"
        b"N}\x8c\x07changed\x8c\x01xs\x86b."
    )


HOSTILE = {
    # each of these opcodes names an index or a length of gigabytes
    "memo": b"\x80\x04]r" + struct.pack("<I", 2**31) + b".",
    "bytearray": b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b".",
    "bytes": b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b".",
    "frame": b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b".",
    "marks": b"\x80\x04" + b"(" * 100_000 + b".",
    "empty": b"",
    "list": pickle.dumps([1]),
    "class": class_changes(),
    "text": b"\x80\x04\x8c\x02\xff\xfe.",
    "set_item": b"\x80\x04NNNs.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_metadata_is_refused(checkpoint: Path, name: str) -> None:
    (checkpoint / METADATA).write_bytes(HOSTILE[name])
    tracemalloc.start()
    with pytest.raises(ConfigError, match=r"\.metadata: the metadata of the checkpoint cannot be"):
        _Checkpoint(checkpoint)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 20
    assert not hasattr(Metadata, "changed")


def change(checkpoint: Path, **attributes: Any) -> None:
    """Change attributes of the only tensor in the metadata."""
    metadata: Metadata = pickle.loads((checkpoint / METADATA).read_bytes())
    (stored,) = metadata.state_dict_metadata.values()
    assert isinstance(stored, TensorStorageMetadata)
    for name, value in attributes.items():
        setattr(stored, name, value)
    (checkpoint / METADATA).write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    "attributes", [{"size": 5}, {"properties": None}, {"chunks": 7}, {"properties": [1]}]
)
def test_incomplete_tensor_is_refused_by_name(checkpoint: Path, attributes: dict[str, Any]) -> None:
    change(checkpoint, **attributes)
    with pytest.raises(ConfigError, match=r"tensor embedding\.word_embeddings\.weight is not"):
        _Checkpoint(checkpoint)


def test_file_outside_of_the_checkpoint_is_refused(checkpoint: Path) -> None:
    metadata = pickle.loads((checkpoint / METADATA).read_bytes())
    for storage in metadata.storage_data.values():
        storage.relative_path = "../secret"
    (checkpoint / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(ConfigError, match=r"\.\./secret is not in the directory"):
        _Checkpoint(checkpoint)


def test_valid_metadata_are_read(checkpoint: Path) -> None:
    stored = _Checkpoint(checkpoint)
    region = stored.find("embedding.word_embeddings.weight")
    assert region is not None
    assert torch.equal(stored.read([region])[region], torch.ones(8, 4))
