"""`aligner prove`: compare a model with transformers on a small random model."""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from aligner.errors import AlignerError
from aligner.models.model_source import directory_config

_HEADER = ("check", "largest error", "tolerance", "", "largest in")


def prove_model(parsed: argparse.Namespace) -> None:
    """Prove a model at one or more layouts, and print a table or JSON.

    Raises:
        ConfigError: The directory, the model or a layout is not supported.
        AlignerError: A check has failed.
    """
    config = directory_config(parsed.model, "MODEL_DIRECTORY")
    # The ranks of a proof share the cores of this machine. Set before torch is imported.
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", TOKENIZERS_PARALLELISM="false")
    from aligner.proof import gloo_worlds

    gloo_worlds.preload()
    from aligner.proof.run_proof import Proof, parse_layout, prove

    def report(phase: str) -> None:
        if sys.stderr.isatty():
            print(f"running {phase}", file=sys.stderr)

    layouts = [parse_layout(text) for text in parsed.layout]
    with tempfile.TemporaryDirectory(prefix="aligner-prove-") as workspace:
        proof: Proof = prove(config, str(parsed.model), layouts, Path(workspace), report=report)
    print(json.dumps(proof.to_json(), indent=2) if parsed.json else _format(proof))
    if not proof.passed:
        wrong = [each.layout for each in proof.layouts if not each.passed]
        raise AlignerError(
            f"{parsed.model}: differs from transformers at {len(wrong)} of {len(layouts)} layouts:"
            f" {'; '.join(wrong)}"
        )


def _format(proof: "Proof") -> str:  # type: ignore[name-defined]  # noqa: F821
    """Return the table of a proof, one block for each layout."""
    blocks = []
    for layout in proof.layouts:
        rows = [
            _HEADER,
            *(
                (
                    check.name,
                    f"{check.error:.1e}",
                    f"{check.tolerance:.0e}" if check.tolerance else "0",
                    "ok" if check.passed else "FAILED",
                    check.worst,
                )
                for check in layout.checks
            ),
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  "
            + "  ".join(
                cell.rjust(width) if index in (1, 2) else cell.ljust(width)
                for index, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        verdict = "equals transformers" if layout.passed else "DIFFERS FROM TRANSFORMERS"
        title = f"{layout.layout}: {verdict} ({layout.seconds:.0f} s)"
        causes = [f"  deviates first: {cause}" for cause in layout.causes]
        blocks.append("\n".join([title, *lines, *causes]))
    return "\n\n".join(blocks)
