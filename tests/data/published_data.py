"""A few records of published data sets, in the columns, types and files in which they are published.

The records were written for the tests. The columns follow the data sets' pages on the Hugging Face
Hub.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

GSM8K = [
    {
        "question": "Ann sold 48 clips in April, and half as many in May. How many did she sell?",
        "answer": "She sold 48/2 = <<48/2=24>>24 clips in May.\n"
        "She sold 48+24 = <<48+24=72>>72 clips.\n#### 72",
    },
    {
        "question": "A pen costs $3, and a book costs 4 times as much. What do both cost?",
        "answer": "The book costs 4*3 = $<<4*3=12>>12.\nBoth cost 12+3 = $<<12+3=15>>15.\n#### 15",
    },
]
"""Records of openai/gsm8k."""

_MESSAGE = pyarrow.struct([("content", pyarrow.string()), ("role", pyarrow.string())])
DAPO_SCHEMA = pyarrow.schema(
    [
        ("data_source", pyarrow.string()),
        ("prompt", pyarrow.list_(_MESSAGE)),
        ("ability", pyarrow.string()),
        (
            "reward_model",
            pyarrow.struct([("ground_truth", pyarrow.string()), ("style", pyarrow.string())]),
        ),
        ("extra_info", pyarrow.struct([("index", pyarrow.string())])),
    ]
)
"""Columns of BytedTsinghua-SIA/DAPO-Math-17k."""


def _dapo_record(problem: str, answer: str, index: str) -> dict[str, Any]:
    question = (
        "Solve the following math problem step by step. The last line of your response should be"
        " of the form Answer: $Answer (without quotes) where $Answer is the answer to the"
        f' problem.\n\n{problem}\n\nRemember to put your answer on its own line after "Answer:".'
    )
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": question, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


DAPO = [
    _dapo_record("How many integers $n$ satisfy $n^2 < 10$?", "7", "9a9b6eb4"),
    _dapo_record("Find the sum of the roots of $x^2 - 34x + 1 = 0$.", "34", "b426d104"),
]
"""Records of BytedTsinghua-SIA/DAPO-Math-17k, which has verl's columns."""

ULTRAFEEDBACK_SCHEMA = pyarrow.schema(
    [
        ("prompt", pyarrow.string()),
        ("prompt_id", pyarrow.string()),
        ("chosen", pyarrow.list_(_MESSAGE)),
        ("rejected", pyarrow.list_(_MESSAGE)),
        ("messages", pyarrow.list_(_MESSAGE)),
        ("score_chosen", pyarrow.float64()),
        ("score_rejected", pyarrow.float64()),
    ]
)
"""Columns of HuggingFaceH4/ultrafeedback_binarized."""


def _ultrafeedback_record(prompt: str, chosen: str, rejected: str) -> dict[str, Any]:
    question = {"content": prompt, "role": "user"}
    conversations = [
        [question, {"content": answer, "role": "assistant"}] for answer in (chosen, rejected)
    ]
    return {
        "prompt": prompt,
        "prompt_id": f"{len(prompt):064x}",
        "chosen": conversations[0],
        "rejected": conversations[1],
        "messages": conversations[0],
        "score_chosen": 8.5,
        "score_rejected": 6.0,
    }


ULTRAFEEDBACK = [
    _ultrafeedback_record(
        "Name a river in Egypt.", "The Nile is a river in Egypt.", "I like rivers."
    ),
    _ultrafeedback_record("Is water wet?", "It makes other things wet.", "Who knows?"),
]
"""Records of HuggingFaceH4/ultrafeedback_binarized (split train_prefs)."""

HH_RLHF = [
    {
        "chosen": "\n\nHuman: How do I boil an egg?\n\nAssistant: In water. How soft do you like it?"
        "\n\nHuman: Very soft.\n\nAssistant: Boil it for four minutes.",
        "rejected": "\n\nHuman: How do I boil an egg?\n\nAssistant: In water. How soft do you like"
        " it?\n\nHuman: Very soft.\n\nAssistant: Eggs come from hens.",
    },
    {
        "chosen": "\n\nHuman: What is a good name for a cat?\n\nAssistant: Minka is a good name.",
        "rejected": "\n\nHuman: What is a good name for a cat?\n\nAssistant: No.",
    },
]
"""Records of Anthropic/hh-rlhf."""

_ALPACA_START = "Below is an instruction that describes a task"
_ALPACA_END = "Write a response that appropriately completes the request."


def _alpaca_record(instruction: str, input: str, output: str) -> dict[str, str]:
    with_input = ", paired with an input that provides further context" if input else ""
    input_text = f"### Input:\n{input}\n\n" if input else ""
    return {
        "instruction": instruction,
        "input": input,
        "output": output,
        "text": f"{_ALPACA_START}{with_input}. {_ALPACA_END}\n\n### Instruction:\n{instruction}\n\n"
        f"{input_text}### Response:\n{output}",
    }


ALPACA = [
    _alpaca_record("Give one tip for staying healthy.", "", "Sleep well."),
    _alpaca_record("Name the color of the object.", "A ripe banana", "Yellow"),
]
"""Records of tatsu-lab/alpaca; the file of Stanford's repository has no column `text`."""


def _write_parquet(
    records: list[Mapping[str, Any]], schema: pyarrow.Schema | None = None
) -> Callable[[Path], None]:
    table = pyarrow.Table.from_pylist(records, schema=schema)
    return lambda path: parquet.write_table(table, path)


def _write_lines(records: list[dict[str, str]]) -> Callable[[Path], None]:
    return lambda path: path.write_text("".join(json.dumps(record) + "\n" for record in records))


def _write_compressed_lines(path: Path) -> None:
    with gzip.open(path, "wt", encoding="utf-8") as stream:
        stream.writelines(json.dumps(record) + "\n" for record in HH_RLHF)


def _write_alpaca_array(path: Path) -> None:
    names = ("instruction", "input", "output")
    records = [{name: record[name] for name in names} for record in ALPACA]
    path.write_text(json.dumps(records, indent=4))


_WRITERS: dict[str, Callable[[Path], Any]] = {
    "gsm8k.parquet": _write_parquet(GSM8K * 2),
    "gsm8k.jsonl": _write_lines(GSM8K * 2),
    "dapo-math-17k.parquet": _write_parquet(DAPO * 2, DAPO_SCHEMA),
    "ultrafeedback.parquet": _write_parquet(ULTRAFEEDBACK * 2, ULTRAFEEDBACK_SCHEMA),
    "hh_rlhf.jsonl.gz": _write_compressed_lines,
    "alpaca.parquet": _write_parquet(ALPACA * 2),
    "alpaca_data.json": _write_alpaca_array,
}


def write_published_data(directory: Path) -> None:
    """Write all files; each contains a few records."""
    for name, write in _WRITERS.items():
        write(directory / name)
