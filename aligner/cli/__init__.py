"""The `aligner` command. Nothing heavy is imported before it is known to be needed."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from aligner.cli.errors import print_error
from aligner.cli.ranks import add_ranks
from aligner.cli.runs import add_launch, add_report, add_supervise, add_validate
from aligner.cli.stored_models import add_convert, add_evaluate, add_generate
from aligner.errors import AlignerError
from aligner.files import full_disk
from aligner.launch.status import add_status
from aligner.launch.task import adopt_task
from aligner.observability.logs import log_failure
from aligner.planner.command import add_plan


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with its code."""
    parser = _parser()
    parsed, rest = parser.parse_known_args(arguments)
    # argparse gives up on positionals that follow an option.
    if flags := [text for text in rest if text.startswith("-")]:
        parser.error(f"unknown option {flags[0]}")
    if rest and not hasattr(parsed, "overrides"):
        parser.error(f"unexpected argument {rest[0]}")
    if rest:
        parsed.overrides += rest
    code = 0
    try:
        adopt_task()
        code = parsed.run(parsed) or 0
    except AlignerError as error:
        if not log_failure(error, str(error)):
            print_error(str(error))
        code = error.exit_code
    except KeyboardInterrupt:
        print_error("interrupted")
        code = 128 + signal.SIGINT
    except Exception as error:
        code, told = 1, full_disk(error)
        if not log_failure(error, told):
            if told is None:
                traceback.print_exc()
            else:
                print_error(told)
    if code and "RANK" in os.environ:
        # A failed rank must be seen to fail: interpreter shutdown can wait forever for a peer or a server's threads.
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # the log's disk may be full
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="aligner", description="A Megatron-native alignment pipeline (RLHF and RLVR).")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_launch(commands)
    add_validate(commands)
    add_status(commands)
    add_report(commands)
    add_plan(commands)
    add_generate(commands)
    add_evaluate(commands)
    add_convert(commands)
    add_supervise(commands)
    add_ranks(commands)
    return parser
