"""`aligner launch cluster=kubernetes`: submit the JobSet of a run with kubectl."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aligner.errors import AlignerError, ConfigError
from aligner.launcher.cluster_commands import TIMEOUT_S, NoAnswerError, run_cluster_command
from aligner.launcher.job_system import JobSystem
from aligner.launcher.kubernetes.job_set import (
    JOB_SET_LABELS,
    RUN_DIRECTORY,
    get_job_set_name,
    render_job_set,
)
from aligner.paths import RunPaths, get_run_paths
from aligner.schema import Config

# Errors of kubectl for a cluster without the JobSet API, or with an older one.
_NO_JOB_SET = (
    'no matches for kind "JobSet"',
    "the server doesn't have a resource type",
    'unknown field "spec.failurePolicy',
)
# Kinds of errors in the messages of kubectl.
_NOT_FOUND = "(NotFound)"
_EXISTS = "(AlreadyExists)"
# Timeout of the submission in seconds: admission webhooks may take long.
_SUBMIT_TIMEOUT_S = 120.0
# Conditions of a JobSet that has ended.
_ENDED = ("Completed", "Failed")


class KubernetesJobs(JobSystem):
    """Runs as JobSets of a Kubernetes cluster. See `JobSystem`."""

    name = "Kubernetes"
    job_noun = "JobSet"

    def get_job_file(self, paths: RunPaths) -> Path:
        """See `JobSystem`."""
        return paths.job_set

    def render(self, config: Config) -> str:
        """See `JobSystem`."""
        return render_job_set(config)

    def test(self, config: Config, job_file: Path) -> None:
        """See `JobSystem`."""
        try:
            _kubectl(config, "create", "--dry-run=server", f"--filename={job_file}")
        except ConfigError as error:
            # The JobSet of an earlier launch may still exist, which `check_not_submitted` handles.
            if _EXISTS not in str(error):
                raise

    def check_not_submitted(self, config: Config) -> None:
        """See `JobSystem`."""
        job_set = _find_job_set(config)
        if job_set is None:
            return
        name = get_job_set_name(config)
        directory = job_set["metadata"].get("annotations", {}).get(RUN_DIRECTORY)
        delete = " ".join(["kubectl", *_get_options(config), "delete", "jobset", name])
        if directory != str(get_run_paths(config).root):
            owner = "is not a run of aligner" if directory is None else f"belongs to {directory}"
            raise ConfigError(
                f"run.name={config.run.name}: the JobSet {name} already exists and {owner}; choose"
                f" another run.name, or delete the JobSet with: {delete}"
            )
        if not has_ended(job_set):
            raise ConfigError(
                f"run.dir={directory}: already submitted as JobSet {name}; wait until the JobSet"
                f" ends, or stop the run with: {delete}"
            )

    def submit(self, config: Config, job_file: Path) -> str:
        """See `JobSystem`."""
        name = get_job_set_name(config)
        try:
            # A JobSet that has ended keeps its name until it is deleted.
            if _find_job_set(config) is not None:
                _kubectl(config, "delete", "jobset", name, "--wait", timeout_s=_SUBMIT_TIMEOUT_S)
            _kubectl(config, "create", f"--filename={job_file}", timeout_s=_SUBMIT_TIMEOUT_S)
        except (NoAnswerError, KeyboardInterrupt) as error:
            raise NoAnswerError(
                f"{str(error) or 'interrupted'}: it is unknown whether the JobSet was created."
                f" Check with `{self.get_queue_command(config, name)}`; if it does not exist,"
                " launch again with run.resume=auto"
            ) from error
        return name

    def get_own_job(self, config: Config) -> str:
        """See `JobSystem`."""
        return get_job_set_name(config)

    def describe_job(self, config: Config, job: str) -> Sequence[str]:
        """See `JobSystem`."""
        paths = get_run_paths(config)
        kubectl = " ".join(["kubectl", *_get_options(config)])
        pause = shlex.quote('{"spec":{"suspend":true}}')
        return [
            f"jobset.jobset.x-k8s.io/{job}",
            f"file:   {paths.job_set}",
            f"follow: {self.get_log_hint(config, job)}",
            f"status: {self.get_queue_command(config, job)}; aligner status {paths.root}",
            f"pause:  {kubectl} patch jobset {job} --type=merge --patch={pause}   # saves a"
            " checkpoint",
            f"stop:   {kubectl} delete jobset {job}   # saves a checkpoint; resume with"
            f" `{self.get_start_command(config)}`",
        ]

    def is_in_queue(self, config: Config, job: str, timeout_s: float) -> bool | None:
        """See `JobSystem`."""
        try:
            job_set = _find_job_set(config, timeout_s)
        except AlignerError:
            return None
        return job_set is not None and not has_ended(job_set)

    def get_queue_command(self, config: Config, job: str | None) -> str:
        """See `JobSystem`."""
        name = job or get_job_set_name(config)
        return " ".join(["kubectl", *_get_options(config), "get", "jobset", name])

    def get_log_hint(self, config: Config, job: str | None) -> str:
        """See `JobSystem`."""
        name = job or get_job_set_name(config)
        selector = ",".join(
            (
                f"{JOB_SET_LABELS}/jobset-name={name}",
                f"{JOB_SET_LABELS}/replicatedjob-name=trainer",
                "batch.kubernetes.io/job-completion-index=0",
            )
        )
        options = [*_get_options(config), "logs", "--follow", f"--selector={selector}"]
        return " ".join(["kubectl", *options])

    def get_start_command(self, config: Config) -> str:
        """See `JobSystem`."""
        file = shlex.quote(str(get_run_paths(config).job_set))
        return " ".join(["kubectl", *_get_options(config), "create", f"--filename={file}"])

    def get_stop_command(self, job: str) -> str:
        """See `JobSystem`."""
        return f"kubectl delete jobset {job}"


def has_ended(job_set: dict[str, Any]) -> bool:
    """Return whether a JobSet has completed or failed."""
    conditions = job_set.get("status", {}).get("conditions", [])
    return any(
        condition["type"] in _ENDED and condition["status"] == "True" for condition in conditions
    )


def _find_job_set(config: Config, timeout_s: float = TIMEOUT_S) -> dict[str, Any] | None:
    """Return the JobSet with the name of a run; None if there is none."""
    name = get_job_set_name(config)
    try:
        text = _kubectl(config, "get", "jobset", name, "--output=json", timeout_s=timeout_s)
    except ConfigError as error:
        if _NOT_FOUND in str(error):
            return None
        raise
    job_set: dict[str, Any] = json.loads(text)
    return job_set


def _get_options(config: Config) -> list[str]:
    """Return the options of kubectl that select the cluster and the namespace."""
    values = {
        "context": config.cluster.kubernetes.context,
        "namespace": config.cluster.kubernetes.namespace,
    }
    return [f"--{name}={value}" for name, value in values.items() if value is not None]


def _kubectl(config: Config, *arguments: str, timeout_s: float = TIMEOUT_S) -> str:
    """Run kubectl and return its standard output.

    Raises:
        ConfigError: Kubernetes rejected the request; the error contains its message.
        NoAnswerError: Kubernetes did not answer.
    """
    try:
        return run_cluster_command(
            ["kubectl", *_get_options(config), f"--request-timeout={timeout_s:g}s", *arguments],
            missing_text=(
                "cluster.kind=kubernetes: requires kubectl; install kubectl and select the cluster"
                " in your kubeconfig file, or print the JobSet with --dry-run"
            ),
            read_message=lambda text: "; ".join(line for line in text.splitlines() if line),
            timeout_s=timeout_s + 10,
        )
    except (ConfigError, NoAnswerError):
        raise
    except AlignerError as error:
        text = str(error)
        hint = ""
        if any(message in text for message in _NO_JOB_SET):
            hint = (
                "; install JobSet 0.10 or newer in the cluster"
                " (https://jobset.sigs.k8s.io/docs/installation/)"
            )
        raise ConfigError(
            f"cluster.kubernetes: Kubernetes rejected the run: {text}{hint}"
        ) from error
