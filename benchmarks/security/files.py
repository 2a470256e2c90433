"""Files that exhaust the memory, the stack or the time of the process that reads them, and texts
that control the terminal of the person who looks at a run.

Each file is read in a process of its own, with 4 GiB of memory beyond its imports and a deadline.
"""

from __future__ import annotations

import gzip
import json
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.security.registry import HELD, Outcome, Probe, add_probe, finding, probe

_TIMEOUT_S = 120.0
_REFUSED = "REFUSED"

_READER = """
import resource, sys
from pathlib import Path
directory = Path(sys.argv[1])
{imports}
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30), resource.RLIM_INFINITY))
from aligner.errors import AlignerError
try:
    {call}
except AlignerError as error:
    print("REFUSED", str(error).replace("\\n", " ")[:300])
else:
    print("ACCEPTED")
"""
_GGUF = (
    "from aligner.models.gguf_header import gguf_shape",
    'gguf_shape(directory / "model.gguf")',
)
_WEIGHTS = (
    "from aligner.models.weight_headers import tensor_files",
    "tensor_files(directory)",
)
_CONFIG = (
    "from aligner.models.model_source import directory_shape",
    'directory_shape(directory, "model.path")',
)
_TOKENIZER = (
    "from aligner.data.tokenizer_files import read_tokenizer_files",
    "read_tokenizer_files(directory)",
)
_TEMPLATE = (
    "from aligner.data.chat_template import ChatTemplate",
    "ChatTemplate(directory).render([{'role': 'user', 'content': 'Hi'}],"
    " add_generation_prompt=True)",
)
_RECORDS = (
    "from aligner.data.record_sources import open_record_source\n"
    "from aligner.data.records import to_record",
    "[to_record(raw, {}) for raw in"
    ' open_record_source(next(directory.iterdir()), "data.path=").read()]',
)
_TORCH_DIST = (
    "from aligner.megatron.torch_dist import _Checkpoint",
    "_Checkpoint(directory)",
)

_DEEP = "[" * 100_000 + "]" * 100_000
_CONFIG_TEXT = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 10**9,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 8,
}


def _gguf(content: bytes, tensors: int = 0, fields: int = 1) -> dict[str, bytes]:
    return {"model.gguf": b"GGUF" + struct.pack("<IQQ", 3, tensors, fields) + content}


def _nested_arrays() -> bytes:
    key = struct.pack("<Q", 1) + b"k" + struct.pack("<I", 9)
    return key + struct.pack("<IQ", 9, 1) * 100_000


# By name: the content of the files, and the imports and the call that read them.
_FILES: Mapping[str, tuple[Callable[[], Mapping[str, bytes]], tuple[str, str]]] = {
    "gguf_fields": (lambda: _gguf(b"", fields=2**62), _GGUF),
    "gguf_tensors": (lambda: _gguf(b"", tensors=2**62, fields=0), _GGUF),
    "gguf_string": (lambda: _gguf(struct.pack("<Q", 2**63 - 1)), _GGUF),
    "gguf_array": (
        lambda: _gguf(struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 4, 2**62)),
        _GGUF,
    ),
    "gguf_nesting": (lambda: _gguf(_nested_arrays()), _GGUF),
    "safetensors_infinity": (
        lambda: {
            "model.safetensors": struct.pack("<Q", 60)
            + b'{"w":{"dtype":"F32","shape":[1e400],"data_offsets":[0,4]}}'.ljust(60)
            + bytes(8)
        },
        _WEIGHTS,
    ),
    "safetensors_nesting": (
        lambda: {"model.safetensors": struct.pack("<Q", len(_DEEP)) + _DEEP.encode()},
        _WEIGHTS,
    ),
    "index_nesting": (lambda: {"model.safetensors.index.json": _DEEP.encode()}, _WEIGHTS),
    "config_layers": (lambda: {"config.json": json.dumps(_CONFIG_TEXT).encode()}, _CONFIG),
    "config_nesting": (lambda: {"config.json": _DEEP.encode()}, _CONFIG),
    "tokenizer_nesting": (lambda: {"tokenizer.json": _DEEP.encode()}, _TOKENIZER),
    "template_loops": (
        lambda: {
            "chat_template.jinja": b"{% for i in range(99999) %}{% for j in range(99999) %}"
            b"{% endfor %}{% endfor %}"
        },
        _TEMPLATE,
    ),
    "template_product": (
        lambda: {"chat_template.jinja": b"{{ 'x' * 999999999999 }}"},
        _TEMPLATE,
    ),
    "template_doubling": (
        lambda: {
            "chat_template.jinja": b"{% set ns = namespace(x=['a']) %}{% for i in range(60) %}"
            b"{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | tojson }}"
        },
        _TEMPLATE,
    ),
    "record_nesting": (
        lambda: {"data.json": b'[{"prompt": ' + _DEEP.encode() + b"}]"},
        _RECORDS,
    ),
    "record_digits": (lambda: {"data.json": b'[{"prompt": ' + b"9" * 10_000 + b"}]"}, _RECORDS),
    "record_length": (lambda: {"data.jsonl": b"x" * (80 << 20)}, _RECORDS),
    "record_bomb": (lambda: {"data.jsonl.gz": _zip_bomb()}, _RECORDS),
    "pickle_memo": (lambda: {".metadata": b"\x80\x04]r\xff\xff\xff\x7f."}, _TORCH_DIST),
    "pickle_bytearray": (
        lambda: {".metadata": b"\x80\x05\x96" + struct.pack("<Q", 2**36) + b"."},
        _TORCH_DIST,
    ),
    "pickle_call": (lambda: {".metadata": b"cos\nsystem\n(S'true'\ntR."}, _TORCH_DIST),
}


_COMPONENTS = {
    "gguf": "model.source=gguf",
    "safetensors": "model.safetensors",
    "index": "model.safetensors.index.json",
    "config": "config.json",
    "tokenizer": "tokenizer.json",
    "template": "chat_template.jinja",
    "record": "data.path",
    "pickle": "aligner convert",
}
"""Files and keys of the attempts, by the beginning of their names."""


def _zip_bomb() -> bytes:
    """Return 2 GiB of a record, compressed a thousand times, in a few members of 64 MiB."""
    line = json.dumps({"prompt": "0" * (1 << 20)}).encode() + b"\n"
    return gzip.compress(line * 64) * 32


def _read(name: str) -> Outcome:
    """Let aligner read a file in a process, and return whether it refused the file."""
    build, (imports, call) = _FILES[name]
    with tempfile.TemporaryDirectory(prefix="aligner-files-") as directory:
        for file, content in build().items():
            Path(directory, file).write_bytes(content)
        program = _READER.format(imports=imports, call=call)
        command = [sys.executable, "-c", program, directory]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            return finding(f"aligner read the file for more than {_TIMEOUT_S:.0f} s")
    if _REFUSED in done.stdout:
        return HELD
    lines = (done.stdout + done.stderr).strip().splitlines() or ["no output"]
    return finding(f"exit code {done.returncode}: {lines[-1][:200]}")


def _add_probes() -> None:
    def build_probe(name: str) -> Probe:
        return Probe(
            "files",
            name,
            f"let aligner read a hostile {name.partition('_')[0]} file",
            "aligner refuses the file with an error that names it",
            _COMPONENTS[name.partition("_")[0]],
            lambda: _read(name),
        )

    for name in _FILES:
        add_probe(build_probe(name))


_add_probes()

_HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202eowned\r"
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")


@probe(
    "files",
    attempt="change the terminal of the person who looks at a prompt",
    expected="aligner data prints control characters as escapes",
    component="aligner data",
)
def terminal_escapes() -> Outcome:
    with tempfile.TemporaryDirectory(prefix="aligner-files-") as directory:
        file = Path(directory, "data.jsonl")
        file.write_text(json.dumps({"prompt": _HOSTILE, "answer": _HOSTILE, _HOSTILE: "x"}) + "\n")
        printed = ""
        for arguments in (["data", str(file)], ["data", str(file), "--json"], ["status", _HOSTILE]):
            command = [sys.executable, "-m", "aligner", *arguments]
            done = subprocess.run(command, capture_output=True, text=True, errors="replace")
            printed += done.stdout + done.stderr
    if "owned" not in printed:
        return finding("the commands printed no text of the file")
    match = _CONTROLS.search(printed)
    return HELD if match is None else finding(f"the output contains {match[0]!r}")
