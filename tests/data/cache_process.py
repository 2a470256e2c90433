"""Builds the table of a data set in another process: python -m tests.data.cache_process JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from aligner.data import example_cache
from aligner.data.example_cache import ExampleCache
from aligner.data.prompts import open_prompts
from aligner.data.tokenizer import Tokenizer
from aligner.paths import RunPaths
from aligner.schema import DataConfig


def main(settings: dict[str, Any]) -> None:
    """Open the prompts of `path`, and print the number of parsed records and of prompts.

    Parsing waits until the file `go` exists, if it is given.
    """
    parsed = 0
    parse = example_cache._TableBuild.parse

    def count(build: Any, chunk: Any) -> Any:
        nonlocal parsed
        print("parsing", flush=True)
        while "go" in settings and not Path(settings["go"]).exists():
            time.sleep(0.05)
        result = parse(build, chunk)
        parsed += result.counts.records
        return result

    if settings["processes"] == 1:
        example_cache._TableBuild.parse = count  # type: ignore[method-assign]
    else:
        example_cache._SMALL_SOURCE = 0

    cache = ExampleCache(
        Path(os.environ["ALIGNER_CACHE"]),
        RunPaths(Path(settings["run"])),
        is_prepared=False,
        processes=settings["processes"],
        report=lambda text: print(text, flush=True),
    )
    data = DataConfig(path=settings["path"])
    prompts = open_prompts(data, Tokenizer(Path(settings["model"])), 1, cache=cache)
    print(json.dumps({"parsed": parsed, "prompts": len(prompts)}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
