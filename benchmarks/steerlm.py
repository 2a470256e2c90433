"""Measure how often the responses of a SteerLM policy have the requested attributes.

    python -m benchmarks.steerlm MODEL …

The policy answers held-out sums greedily, once with each pair of attributes: whether the answer is
right, and its number of superfluous zeros. The output has, for each pair, the share of responses
with the requested first attribute (`right`), second attribute (`zeros`), and both.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from aligner_examples.styled_sums import attributes_of, held_out
from benchmarks.runs import python_path


def followed(samples: Path) -> dict[str, dict[str, float]]:
    """Return the share of responses with the requested first attribute, second attribute, and both,
    by requested attributes."""
    counts: dict[str, Counter[str]] = {}
    for line in samples.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        wished, has = (
            record["metadata"]["attributes"],
            attributes_of(record["response"], record["metadata"]["total"]),
        )
        count = counts.setdefault(wished, Counter())
        count["all"] += 1
        for place, name in enumerate(("right", "zeros")):
            count[name] += has is not None and has[place] == wished[place]
        count["both"] += has == wished
    return {
        name: {each: count[each] / count["all"] for each in ("right", "zeros", "both")}
        for name, count in sorted(counts.items())
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models",
        nargs="+",
        type=Path,
        help="run, checkpoint or Hugging Face model directories, as for aligner generate",
    )
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        prompts, samples = Path(place) / "prompts.jsonl", Path(place) / "samples.jsonl"
        records = [
            {**each, "prompt": f"{each['attributes']}:{each['question']}"} for each in held_out()
        ]
        prompts.write_text(
            "".join(json.dumps(record) + "\n" for record in records), encoding="utf-8"
        )
        for model in parsed.models:
            command = (
                sys.executable,
                "-m",
                "aligner",
                "generate",
                str(model),
                "--prompts",
                str(prompts),
                "--greedy",
            )
            more = (
                "--max-new-tokens",
                "7",
                "--batch-size",
                "512",
                "--output",
                str(samples),
                "--overwrite",
            )
            environment = {**os.environ, "PYTHONPATH": python_path()}
            subprocess.run(
                (*command, *more), check=True, stdout=subprocess.DEVNULL, env=environment
            )
            print(json.dumps({"model": str(model), **followed(samples)}))


if __name__ == "__main__":
    main()
