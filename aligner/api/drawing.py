"""`aligner.generate`: responses of a stored model, drawn by the command in a process of its own."""

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from aligner.api.arguments import ChildCommand, json_lines
from aligner.api.run_handle import Run


def generate(
    source: str | os.PathLike[str] | Run,
    prompts: "str | os.PathLike[str] | Sequence[str | Mapping[str, Any]]",
    *,
    overrides: Sequence[str] = (),
    **options: Any,
) -> list[dict[str, Any]]:
    """Draw responses as `aligner generate` does; returns its records, in the prompts' order.

    `source` is a run, its directory, a checkpoint, or a Hugging Face directory. `prompts` are
    texts, records with a `prompt`, or a file of either. `options` are the command's, such as
    `samples=4`, `max_new_tokens=64`, `temperature=0.7`, `greedy=True`; `overrides` draw episodes in
    an environment (`environment.KEY=VALUE`). Raises ConfigError and AlignerError.
    """
    with tempfile.TemporaryDirectory() as place:
        output = Path(place) / "samples.jsonl"
        if isinstance(prompts, (str, os.PathLike)):
            file = Path(prompts)
        else:
            file = Path(place) / "prompts.jsonl"
            records = [
                {"prompt": prompt} if isinstance(prompt, str) else prompt for prompt in prompts
            ]
            file.write_text(json_lines(records), encoding="utf-8")
        model = source.directory if isinstance(source, Run) else source
        asked = [
            os.fspath(model),
            "--prompts",
            str(file),
            "--output",
            str(output),
            *_flags(options),
            *overrides,
        ]
        ChildCommand(["generate", *asked]).finish()
        return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]


def _flags(options: Mapping[str, Any]) -> Iterator[str]:
    """Options as the command line has them: `top_k=5` is `--top-k=5`, `greedy=True` is `--greedy`,
    False `--no-…`."""
    for name, value in options.items():
        flag = name.replace("_", "-")
        yield (
            (f"--{flag}" if value else f"--no-{flag}")
            if isinstance(value, bool)
            else f"--{flag}={value}"
        )
