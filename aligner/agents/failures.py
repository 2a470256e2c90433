"""Kinds of failures of agents and environments: how an exception or an exit is classified."""

import os

from aligner.data.episode_reports import FailureKind
from aligner.user_code import is_connection_error

INFRASTRUCTURE_EXIT_CODE = os.EX_TEMPFAIL
"""Exit code (75, `EX_TEMPFAIL` of sysexits.h) with which the command of an agent reports an
infrastructure failure."""


class InfrastructureError(Exception):
    """Failure that the policy has not caused, such as a sandbox that does not start.

    Agents, environments and tools may raise it: the episode is retried, and never scored with
    `environment.failure_reward`.
    """


def classify_error(error: BaseException) -> FailureKind:
    """Return the kind of an exception that an agent or environment has raised.

    An exception whose cause is a connection that failed or timed out is an infrastructure failure.
    """
    if isinstance(error, InfrastructureError) or is_connection_error(error):
        return FailureKind.INFRASTRUCTURE
    return FailureKind.ERROR
