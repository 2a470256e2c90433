"""The header of a GGUF file: enough to know a model's shape without reading a weight.

The gguf package's reader wraps every one of the tokenizer's 150,000 strings in arrays, which takes
seconds; a configuration check may not, so the few fields wanted are read here.
"""

import functools
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from aligner.errors import ConfigError
from aligner.models.hugging_face import read_described_config
from aligner.models.shape import ModelShape

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_ARCHITECTURES = {"llama": "LlamaForCausalLM"}

_HF_NAMES = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "intermediate_size": "feed_forward_length",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "head_dim": "attention.key_length",
}


def _scalar(file: BinaryIO, code: str) -> Any:
    layout = struct.Struct("<" + code)
    return layout.unpack(file.read(layout.size))[0]


def _string(file: BinaryIO) -> str:
    return file.read(_scalar(file, "Q")).decode()


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(file)
    if kind != _ARRAY:
        return _scalar(file, _SCALARS[kind])
    element, count = _scalar(file, "I"), _scalar(file, "Q")
    if element in (_STRING, _ARRAY):
        return [_value(file, element) for _ in range(count)]
    layout = struct.Struct(f"<{count}{_SCALARS[element]}")
    return list(layout.unpack(file.read(layout.size)))


def _read(path: Path) -> tuple[Mapping[str, Any], set[str]]:
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise ConfigError(f"{path}: not a GGUF file")
        version = _scalar(file, "I")
        if version not in (2, 3):
            raise ConfigError(f"{path}: GGUF version {version} is not supported; supported: 2, 3")
        tensors, entries = _scalar(file, "Q"), _scalar(file, "Q")
        fields = {_string(file): _value(file, _scalar(file, "I")) for _ in range(entries)}
        names = set()
        for _ in range(tensors):
            names.add(_string(file))
            dimensions = _scalar(file, "I")
            file.seek(8 * dimensions + 4 + 8, 1)  # sizes, type, offset
    return fields, names


def gguf_shape(path: Path) -> ModelShape:
    """Return the shape of the model in a GGUF file.

    Raises:
        ConfigError: The file is damaged, or its architecture is not supported.
    """
    status = path.stat()
    return _shape_of_version(path, status.st_ino, status.st_size, status.st_mtime_ns)


@functools.lru_cache(32)
def _shape_of_version(path: Path, inode: int, size: int, modified_ns: int) -> ModelShape:
    """Return the shape in one version of a file, which `inode`, `size` and `modified_ns`
    identify.

    Several checks of one command need the shape, and the header contains the whole vocabulary.
    """
    try:
        fields, tensors = _read(path)
    except (struct.error, KeyError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: damaged GGUF header ({error})") from error
    family = fields.get("general.architecture", "<none>")
    found = {name: fields.get(f"{family}.{key}") for name, key in _HF_NAMES.items()}
    config = {name: value for name, value in found.items() if value is not None}
    config["architectures"] = [_ARCHITECTURES.get(family, family)]
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config["eos_token_id"] = fields.get("tokenizer.ggml.eos_token_id")
    config["pad_token_id"] = fields.get("tokenizer.ggml.padding_token_id")
    return read_described_config(config, str(path))
