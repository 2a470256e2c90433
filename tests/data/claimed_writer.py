"""Take a run, write to it, suspend itself inside or outside `writing`, then try to write again.

For each write that is refused, the process prints the error.
"""

from __future__ import annotations

import os
import signal
import sys

import numpy as np

from aligner.data.fencing import claim_run, fenced_write, set_writer_claim
from aligner.errors import AlignerError
from aligner.observability.metrics import MetricsWriter, RecordWriter
from aligner.paths import get_run_paths
from aligner.schema import Config, RunConfig
from aligner.servers.critic_client import UpdateJournal


def main(directory: str, where: str) -> None:
    config = Config(run=RunConfig(dir=directory))
    set_writer_claim(config, claim_run(config))
    paths = get_run_paths(config)
    metrics, samples, journal = (
        MetricsWriter(paths),
        RecordWriter(paths.samples),
        UpdateJournal(paths.journal),
    )
    metrics.write(1, {"a": 1.0})
    samples.write(1, [{"prompt": "a"}])
    journal.append(0, {"a": np.zeros(1)})
    if where == "writing":
        with fenced_write():
            os.kill(os.getpid(), signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)
    for write in (
        lambda: metrics.write(2, {"a": 2.0}),
        lambda: metrics.amend(1, {"b": 2.0}),
        lambda: metrics.truncate_after(0),
        lambda: samples.write(2, [{"prompt": "b"}]),
        lambda: samples.truncate_after(0),
        lambda: journal.append(1, {"a": np.ones(1)}),
        lambda: journal.prune(5, 6),
    ):
        try:
            write()
        except AlignerError as error:
            print(error, flush=True)


main(*sys.argv[1:])
