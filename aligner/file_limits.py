"""Limits of files and messages that someone else wrote, and the readers that enforce them.

Models, tokenizers and data are downloaded, run directories may belong to other users, and servers
receive requests. Without limits, a damaged or malicious file of a few bytes can exhaust the memory
or the stack of the process that reads it. The limits are far above what published models and data
sets need: for example, a checkpoint of 500 GB has an index of about 10 MB.
"""

import json
import os
from pathlib import Path
from typing import Any

from aligner.errors import ConfigError

_MIB = 1 << 20
# Bytes of one read of a file without a size.
_BLOCK_BYTES = _MIB

MAX_JSON_DEPTH = 128
"""Maximum nesting of JSON. The tokenizers package has the same limit."""
MAX_JSON_VALUES = 1 << 24
"""Maximum number of values of a JSON text; they need at most 4 GB of memory."""
MAX_CONFIG_BYTES = 64 * _MIB
"""Maximum size of `config.json`, `tokenizer_config.json`, chat templates and similar files."""
MAX_TOKENIZER_BYTES = 512 * _MIB
"""Maximum size of `tokenizer.json`, `vocab.json` and `merges.txt`."""
MAX_INDEX_BYTES = 256 * _MIB
"""Maximum size of `model.safetensors.index.json`."""
MAX_SAFETENSORS_HEADER_BYTES = 100_000_000
"""Maximum size of the header of a safetensors file; the limit of the safetensors package."""
MAX_PICKLE_BYTES = 1024 * _MIB
"""Maximum size of the metadata of a torch_dist checkpoint."""

MAX_YAML_VALUES = 1_000_000
"""Maximum number of values of a YAML file, in which each alias counts as the value that it repeats.
"""

MAX_LAYERS = 4096
"""Maximum number of layers of a model."""
MAX_EXPERTS = 1 << 18
"""Maximum number of experts of all layers of a model together."""
MAX_DIMENSION = (1 << 31) - 1
"""Maximum of the other sizes of a model, such as its hidden size."""

MAX_GGUF_FIELDS = 1 << 16
"""Maximum number of metadata entries of a GGUF file."""
MAX_GGUF_ARRAY_ELEMENTS = 1 << 22
"""Maximum number of array elements of a GGUF file, all arrays together."""
MAX_GGUF_NESTING = 4
"""Maximum nesting of arrays in a GGUF file."""
MAX_GGUF_TENSORS = 1 << 20
"""Maximum number of tensors of a GGUF file."""
MAX_GGUF_STRING_BYTES = 16 * _MIB
"""Maximum size of a string in the header of a GGUF file, such as the chat template."""

MAX_RECORD_BYTES = 64 * _MIB
"""Maximum size of a record of a data file: a line, a CSV row, or an element of a JSON array."""
MAX_EXPANDED_BYTES = 1024 * _MIB
"""Size of the decompressed content of a file, above which `MAX_EXPANSION` applies."""
MAX_EXPANSION = 100
"""Maximum ratio of the decompressed to the compressed size of a file. Text has a ratio of 3 to
20."""
MAX_ROW_GROUP_BYTES = 16 * 1024 * _MIB
"""Maximum size of a row group of a Parquet file in memory, as its metadata state it."""

MAX_TEMPLATE_STEPS = 5_000_000
"""Maximum number of steps of a chat template that renders a conversation. An iteration of a loop is
one step, a call of a macro, function or filter five."""
MAX_TEMPLATE_CHARACTERS = 64 * _MIB
"""Maximum length of a text or list that a chat template computes, and of the rendered text."""


def read_limited_bytes(file: Path, max_bytes: int) -> bytes:
    """Return the content of a file.

    Raises:
        ConfigError: The file has more than `max_bytes` bytes.
        OSError: The file cannot be read.
    """
    with file.open("rb") as stream:
        # A read of a number of bytes allocates them all, so that only the file's size is read.
        size = min(max_bytes, os.fstat(stream.fileno()).st_size)
        content = stream.read(size + 1)
        # A device or a pipe has no size.
        while size < len(content) <= max_bytes and (block := stream.read(_BLOCK_BYTES)):
            content += block
    if len(content) > max_bytes:
        raise ConfigError(f"{file}: has more than {max_bytes} bytes, the maximum for this file")
    return content


def parse_json(content: bytes | bytearray | str) -> Any:
    """Return the value of a JSON text within the limits.

    Raises:
        ValueError: The text is not valid JSON, is nested too deeply or has too many values.
    """
    if isinstance(content, str):
        containers = content.count("[") + content.count("{")
        values = 1 + containers + content.count(",")
    else:
        containers = content.count(b"[") + content.count(b"{")
        values = 1 + containers + content.count(b",")
    # Commas in texts count too, so the number is an upper bound.
    if values > MAX_JSON_VALUES:
        raise ValueError(f"has up to {values} values, allowed: {MAX_JSON_VALUES}")
    try:
        value = json.loads(content)
    except RecursionError as error:
        raise ValueError(_describe_depth()) from error
    # Few brackets cannot be nested deeply, so most texts need no search.
    if containers > MAX_JSON_DEPTH:
        check_depth(value)
    return value


def check_depth(value: Any) -> None:
    """Raise ValueError if lists and dicts are nested in each other more than `MAX_JSON_DEPTH`
    deep."""
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [
            entry
            for container in level
            if isinstance(container, dict | list)
            for entry in (container.values() if isinstance(container, dict) else container)
            if isinstance(entry, dict | list)
        ]
        if not level:
            return
    raise ValueError(_describe_depth())


def _describe_depth() -> str:
    return f"is nested more than {MAX_JSON_DEPTH} levels deep, allowed: {MAX_JSON_DEPTH}"


def read_json(file: Path, max_bytes: int = MAX_CONFIG_BYTES) -> Any:
    """Return the value of a JSON file.

    Raises:
        ConfigError: The file cannot be read, is too large, or `parse_json` refuses its content.
    """
    try:
        return parse_json(read_limited_bytes(file, max_bytes))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: not valid JSON ({error})") from error


def read_json_object(file: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """Return the object of a JSON file.

    Raises:
        ConfigError: The file contains another value, or `read_json` raises the error.
    """
    value = read_json(file, max_bytes)
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: expected a JSON object, got {type(value).__name__}")
    return value
