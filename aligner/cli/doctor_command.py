"""`aligner doctor`: checks of this machine, and a remedy for each problem."""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from aligner.doctor.checkup import run_checks
from aligner.doctor.finding import ERROR, NOTE, WARNING, Finding
from aligner.errors import AlignerError
from aligner.terminal import print_text


def diagnose(parsed: argparse.Namespace) -> None:
    """Print what the checks of this machine have found.

    Raises:
        AlignerError: A finding is an error.
    """
    findings = run_checks(parsed.runs)
    if parsed.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        print_text("\n".join(_format_findings(findings)))
    counts = Counter(finding.level for finding in findings)
    summary = ", ".join(
        f"{counts[level]} {level}{'' if counts[level] == 1 else 's'}"
        for level in (ERROR, WARNING, NOTE)
    )
    if counts[ERROR]:
        raise AlignerError(f"{summary}; the remedies of the errors are above")
    if not parsed.json:
        print_text(summary)


def _format_findings(findings: Sequence[Finding]) -> list[str]:
    """Return the lines of the findings: level, subject and text, then the remedy."""
    width = max(len(finding.subject) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:7}  {finding.subject:{width}}  {finding.found}")
        if finding.remedy is not None:
            lines.append(f"{'':{9 + width}}  remedy: {finding.remedy}")
    return lines
