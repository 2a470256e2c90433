"""`aligner.generate`: generate responses of a stored model.

The generation runs in a separate process, as the command `aligner generate`.
"""

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from aligner.api.arguments import ChildCommand, to_json_lines
from aligner.api.run_handle import Run


def generate(
    source: str | os.PathLike[str] | Run,
    prompts: "str | os.PathLike[str] | Sequence[str | Mapping[str, Any]]",
    *,
    overrides: Sequence[str] = (),
    **options: Any,
) -> list[dict[str, Any]]:
    """Generate responses, like the command `aligner generate`.

    A separate process loads the model. It exits when this function returns or is interrupted.

    Args:
        source: A run, a run directory, a checkpoint, or a Hugging Face directory.
        prompts: Prompt texts, records with the field `prompt`, or the path of a file with texts or
            records.
        overrides: Settings of an environment (`environment.KEY=VALUE`), to generate episodes.
        options: Options of the command, with `_` instead of `-`: for example `samples=4`,
            `max_new_tokens=64`, `temperature=0.7` or `greedy=True`.

    Returns:
        The records that the command writes, in the order of the prompts. `docs/generate.md`
        describes their fields.

    Raises:
        ConfigError: An argument is invalid, or `source` is not a model.
        AlignerError: The generation failed.

    Example:
        ::

            records = aligner.generate(run, ["3+4=", "9+9="], samples=2, max_new_tokens=4)
    """
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "samples.jsonl"
        if isinstance(prompts, (str, os.PathLike)):
            file = Path(prompts)
        else:
            file = Path(directory) / "prompts.jsonl"
            records = [
                {"prompt": prompt} if isinstance(prompt, str) else prompt for prompt in prompts
            ]
            file.write_text(to_json_lines(records), encoding="utf-8")
        model = source.directory if isinstance(source, Run) else source
        arguments = [
            os.fspath(model),
            "--prompts",
            str(file),
            "--output",
            str(output),
            *_flags(options),
            *overrides,
        ]
        ChildCommand(["generate", *arguments]).finish()
        return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]


def _flags(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the options as flags of the command line.

    For example, `top_k=5` becomes `--top-k=5`, `greedy=True` becomes `--greedy`, and `greedy=False`
    becomes `--no-greedy`.
    """
    for name, value in options.items():
        flag = name.replace("_", "-")
        yield (
            (f"--{flag}" if value else f"--no-{flag}")
            if isinstance(value, bool)
            else f"--{flag}={value}"
        )
