"""Tests of JobSets: the pods of each role, secrets, probes, restarts, and the submission."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from aligner.checks.cluster import find_problems
from aligner.config.compose import compose_config
from aligner.config.prerequisites import plan_run
from aligner.errors import FAILED, REFUSED, RESUMABLE, AlignerError, ConfigError
from aligner.launcher.job_submission import render_preview, submit
from aligner.launcher.kubernetes import submit_job_set
from aligner.launcher.kubernetes.job_set import build_job_set, get_job_set_name, render_job_set
from aligner.launcher.nodes.node_list import FIRST_NODE, NODE_INDEX, NODES, read_node_list
from aligner.launcher.status import read_status
from aligner.paths import RunPaths
from aligner.placement.job_layout import compute_job_layout
from aligner.schema import Config
from tests.kubernetes_api import KubernetesApi
from tests.kubernetes_api import find_problems as find_api_problems

# The CRD of JobSet, config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml of its repository,
# which contains the schemas of Jobs and pods, too.
CRD = os.environ.get("ALIGNER_JOBSET_CRD")
needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl")
EVERYTHING = (
    "actor.parallel.data=16",
    "cluster.kubernetes.namespace=team",
    "cluster.kubernetes.cpus=12.5",
    "cluster.kubernetes.memory_gib=900.5",
    "cluster.kubernetes.shared_memory_gib=64",
    "+cluster.kubernetes.resources={rdma/ib: 8}",
    "cluster.kubernetes.queue=training",
    "cluster.kubernetes.priority_class=low",
    "+cluster.kubernetes.node_selector={gpu: h100}",
    "cluster.kubernetes.tolerations=[{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]",
    "cluster.kubernetes.service_account=trainer",
    "cluster.kubernetes.image_pull_secrets=[registry]",
    "cluster.kubernetes.user=1000",
    "+cluster.kubernetes.labels={team: alignment}",
    "+cluster.kubernetes.annotations={cost-center: '17'}",
    "+cluster.kubernetes.secrets={WANDB_API_KEY: wandb/api-key, TOKEN: tokens/mine}",
    "+cluster.kubernetes.environment={NCCL_DEBUG: INFO, HF_TOKEN: '${oc.env:TOKEN}'}",
    "cluster.kubernetes.setup=['ulimit -l unlimited']",
    "cluster.kubernetes.grace_s=900",
    "cluster.kubernetes.roles.critic.image=other:2",
    "+cluster.kubernetes.roles.critic.node_selector={gpu: a100}",
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIGNER_CACHE", f"{tmp_path}/cache")
    monkeypatch.setenv("TOKEN", "hunter2")


def arguments(tmp_path: Path, *overrides: str) -> list[str]:
    return [
        "experiment=tiny_ppo",
        "cluster=kubernetes",
        "cluster.kubernetes.image=image:1",
        f"cluster.kubernetes.volumes=['shared:{tmp_path}']",
        f"run.dir={tmp_path}/run",
        *overrides,
    ]


def config(tmp_path: Path, *overrides: str) -> Config:
    return compose_config(arguments(tmp_path, *overrides))


def jobs(job_set: dict[str, Any]) -> dict[str, Any]:
    return {job["name"]: job["template"]["spec"] for job in job_set["spec"]["replicatedJobs"]}


def container(job: dict[str, Any]) -> dict[str, Any]:
    (only,) = job["template"]["spec"]["containers"]
    return only


def test_each_role_has_one_pod_per_node(tmp_path: Path) -> None:
    found = jobs(build_job_set(config(tmp_path, "actor.parallel.data=16")))
    counts = {role: (job["completions"], job["parallelism"]) for role, job in found.items()}
    assert counts == {"trainer": (2, 2), "critic": (1, 1), "reward": (1, 1)}
    limits = {role: container(job)["resources"].get("limits") for role, job in found.items()}
    # The reward is a function and needs no GPU.
    assert limits == {
        "trainer": {"nvidia.com/gpu": "8"},
        "critic": {"nvidia.com/gpu": "1"},
        "reward": None,
    }


def test_generator_and_teacher_have_pods(tmp_path: Path) -> None:
    found = jobs(
        build_job_set(
            config(
                tmp_path,
                "engine.placement=server",
                "engine.parallel.data=2",
                "teacher.path=experiment:tiny_sft",
                "cluster.kubernetes.roles.reward.shares_nodes_with=trainer",
            )
        )
    )
    assert [*found] == ["trainer", "generator", "critic", "teacher"]
    assert container(found["generator"])["resources"]["limits"] == {"nvidia.com/gpu": "2"}


def test_pods_find_their_node_in_the_layout(tmp_path: Path) -> None:
    made = config(tmp_path, "actor.parallel.data=16", "run.name=mine")
    layout = compute_job_layout(made)
    seen = []
    for job in jobs(build_job_set(made)).values():
        variables = {entry["name"]: entry.get("value") for entry in container(job)["env"]}
        for index in range(job["completions"]):
            environment = {NODES: variables[NODES], FIRST_NODE: variables[FIRST_NODE]}
            nodes = read_node_list(layout, environment | {NODE_INDEX: str(index)})
            seen.append(nodes.index)
    assert seen == [0, 1, 2, 3]
    assert nodes.addresses == (
        "mine-trainer-0-0.mine",
        "mine-trainer-0-1.mine",
        "mine-critic-0-0.mine",
        "mine-reward-0-0.mine",
    )


def test_configured_values_reach_the_pods(tmp_path: Path) -> None:
    job_set = build_job_set(config(tmp_path, *EVERYTHING))
    metadata = job_set["metadata"]
    assert metadata["namespace"] == "team"
    assert metadata["labels"]["kueue.x-k8s.io/queue-name"] == "training"
    assert metadata["labels"]["team"] == "alignment"
    assert metadata["annotations"]["aligner/run-directory"] == f"{tmp_path}/run"
    trainer, critic, reward = jobs(job_set).values()
    pod = trainer["template"]["spec"]
    assert pod["nodeSelector"] == {"gpu": "h100"}
    assert critic["template"]["spec"]["nodeSelector"] == {"gpu": "a100"}
    assert pod["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    ]
    assert pod["securityContext"] == {"runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000}
    assert (pod["priorityClassName"], pod["serviceAccountName"]) == ("low", "trainer")
    assert pod["terminationGracePeriodSeconds"] == 900
    assert container(trainer)["resources"] == {
        "requests": {
            "cpu": "12.5",
            "memory": "922112Mi",
            "nvidia.com/gpu": "8",
            "rdma/ib": "8",
        },
        "limits": {"memory": "922112Mi", "nvidia.com/gpu": "8", "rdma/ib": "8"},
    }
    assert "rdma/ib" not in container(reward)["resources"]["limits"]
    assert (container(trainer)["image"], container(critic)["image"]) == ("image:1", "other:2")
    shell = ["sh", "-ec", f"ulimit -l unlimited\nexec aligner supervise {tmp_path}/run"]
    assert container(trainer)["command"] == shell
    shared_memory, volume = pod["volumes"]
    assert shared_memory["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}
    assert volume["persistentVolumeClaim"] == {"claimName": "shared"}


def test_job_set_refers_to_secrets_and_has_no_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret-of-the-shell")
    text = render_job_set(config(tmp_path, *EVERYTHING))
    assert "hunter2" not in text and "secret-of-the-shell" not in text
    for job in jobs(yaml.safe_load(text)).values():
        references = [entry for entry in container(job)["env"] if entry["name"] == "WANDB_API_KEY"]
        assert references == [
            {
                "name": "WANDB_API_KEY",
                "valueFrom": {"secretKeyRef": {"name": "wandb", "key": "api-key"}},
            }
        ]


def test_pods_without_service_account_get_no_token(tmp_path: Path) -> None:
    for job in jobs(build_job_set(config(tmp_path))).values():
        assert job["template"]["spec"]["automountServiceAccountToken"] is False


@pytest.mark.parametrize("probe", ["startupProbe", "livenessProbe", "readinessProbe"])
def test_probes_follow_the_files_of_the_agent(tmp_path: Path, probe: str) -> None:
    job = jobs(build_job_set(config(tmp_path)))["critic"]
    shell = container(job)[probe]["exec"]["command"]
    (file,) = re.findall(r"/tmp/aligner-node/(\w+)", shell[-1])
    assert file == ("ready" if probe == "readinessProbe" else "live")
    shell[-1] = shell[-1].replace("/tmp/aligner-node", str(tmp_path))

    def passes() -> bool:
        return subprocess.run(shell, check=False, stderr=subprocess.DEVNULL).returncode == 0

    assert not passes()
    (tmp_path / file).touch()
    assert passes()
    old = time.time() - 300
    os.utime(tmp_path / file, (old, old))
    assert not passes()


# Messages of the Job controller of Kubernetes 1.33 about a pod failure policy.
EXITED = "Container aligner for pod ml/run-trainer-0-0-x failed with exit code {} matching FailJob"
DISRUPTED = (
    "Pod ml/run-trainer-0-0-x has condition DisruptionTarget matching FailJob rule at index 0"
)


@pytest.mark.parametrize(
    ("message", "action"),
    [
        (EXITED.format(RESUMABLE) + " rule at index 1", "RestartJobSetAndIgnoreMaxRestarts"),
        (DISRUPTED, "RestartJobSetAndIgnoreMaxRestarts"),
        (EXITED.format(FAILED) + " rule at index 1", "FailJobSet"),
        (EXITED.format(REFUSED) + " rule at index 1", "FailJobSet"),
        # Without a matching rule, JobSet restarts up to maxRestarts times.
        (EXITED.format(137) + " rule at index 1", None),
        (EXITED.format(12) + " rule at index 1", None),
    ],
)
def test_failure_policy_depends_on_exit_code(
    tmp_path: Path, message: str, action: str | None
) -> None:
    policy = build_job_set(config(tmp_path))["spec"]["failurePolicy"]
    found = [
        rule["action"]
        for rule in policy["rules"]
        if any(re.search(pattern, message) for pattern in rule["onJobFailureMessagePatterns"])
    ]
    assert (policy["maxRestarts"], found) == (10, [action] if action else [])


def test_without_requeue_no_failure_restarts(tmp_path: Path) -> None:
    policy = build_job_set(config(tmp_path, "cluster.kubernetes.requeue=false"))["spec"][
        "failurePolicy"
    ]
    assert policy["maxRestarts"] == 0
    assert [rule["action"] for rule in policy["rules"]] == ["FailJobSet"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mine", "mine"),
        ("tiny-ppo-7", "tiny-ppo-7"),
        ("My_Run", r"my-run-[0-9a-f]{6}"),
        ("7", r"run-7-[0-9a-f]{6}"),
        ("x" * 60, r"x{33}-[0-9a-f]{6}"),
        ("ä", r"run-[0-9a-f]{6}"),
    ],
)
def test_job_set_name_is_a_label(tmp_path: Path, name: str, expected: str) -> None:
    made = config(tmp_path, f"run.name='{name}'")
    assert re.fullmatch(expected, get_job_set_name(made))
    assert find_api_problems(build_job_set(made)) == []


@pytest.mark.skipif(CRD is None, reason="ALIGNER_JOBSET_CRD: not set to the CRD of JobSet")
@pytest.mark.parametrize("overrides", [(), EVERYTHING, ("cluster.kubernetes.requeue=false",)])
def test_job_set_matches_the_schema_of_its_crd(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    versions = yaml.safe_load(Path(str(CRD)).read_text())["spec"]["versions"]
    (schema,) = [
        version["schema"]["openAPIV3Schema"]
        for version in versions
        if version["name"] == "v1alpha2"
    ]
    forbid_unknown_fields(schema)
    schema["properties"]["metadata"] = {"type": "object"}
    job_set = yaml.safe_load(render_job_set(config(tmp_path, *overrides)))
    jsonschema.Draft202012Validator(schema).validate(job_set)
    jobs(job_set)["trainer"]["template"]["spec"]["containers"][0]["imagePolicy"] = "x"
    with pytest.raises(jsonschema.ValidationError, match="imagePolicy"):
        jsonschema.Draft202012Validator(schema).validate(job_set)


def forbid_unknown_fields(schema: Any) -> None:
    """Let a schema refuse unknown fields, as the API server does with strict validation."""
    if isinstance(schema, dict):
        if "properties" in schema and "x-kubernetes-preserve-unknown-fields" not in schema:
            schema.setdefault("additionalProperties", False)
        for value in schema.values():
            forbid_unknown_fields(value)
    elif isinstance(schema, list):
        for value in schema:
            forbid_unknown_fields(value)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["cluster.kubernetes.image=null"],
            "cluster.kubernetes.image=null: must be a container image",
        ),
        (
            ["cluster.kubernetes.volumes=[]"],
            "is not on a volume of the job; add the volume to cluster.kubernetes.volumes",
        ),
        (
            ["cluster.kubernetes.volumes=[shared]"],
            "cluster.kubernetes.volumes: shared: must be CLAIM:PATH or CLAIM:PATH:ro",
        ),
        (
            ["cluster.kubernetes.memory_gib=16"],
            "cluster.kubernetes.memory_gib=16: must be above cluster.kubernetes.shared_memory_gib",
        ),
        (
            ["cluster.kubernetes.queue=Team_A"],
            "cluster.kubernetes.queue=Team_A: must be the name of a Kubernetes object",
        ),
        (
            ["+cluster.kubernetes.labels={a b: c}"],
            "cluster.kubernetes.labels: a b: c: must be a valid label",
        ),
        (
            ["cluster.kubernetes.tolerations=[gpu]"],
            "cluster.kubernetes.tolerations: gpu: must be a mapping",
        ),
        (["server.interface=127.0.0.1"], "must be 0.0.0.0 with cluster=kubernetes"),
        (
            ["cluster.kubernetes.roles.critic.shares_nodes_with=critic"],
            "cluster.kubernetes.roles.critic.shares_nodes_with=critic: must be another role",
        ),
        (
            ["+cluster.kubernetes.environment={HF_TOKEN: '${oc.env:TOKEN}'}"],
            "cluster.kubernetes.secrets: lacks TOKEN, which the configuration reads",
        ),
        (["checkpoint.every_minutes=0"], "cluster.kubernetes.requeue=true: with checkpoint.every"),
    ],
)
def test_invalid_kubernetes_setting_is_refused(
    tmp_path: Path, overrides: list[str], problem: str
) -> None:
    assert problem in "\n".join(find_problems(config(tmp_path, *overrides), None, {}))


def test_secret_value_is_refused_without_repeating_it(tmp_path: Path) -> None:
    made = config(tmp_path, "+cluster.kubernetes.secrets={WANDB_API_KEY: hunter2}")
    text = "\n".join(find_problems(made, None, {}))
    assert "cluster.kubernetes.secrets.WANDB_API_KEY: must be SECRET/KEY" in text
    assert "hunter2" not in text


def test_dry_launch_prints_the_job_set(tmp_path: Path) -> None:
    plan = plan_run(config(tmp_path))
    assert yaml.safe_load(render_preview(plan)) == build_job_set(plan.config)
    assert not (tmp_path / "run").exists()


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesApi]:
    with KubernetesApi(tmp_path) as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig))
        monkeypatch.setenv("HOME", str(tmp_path))  # kubectl caches what it discovers
        yield server


@needs_kubectl
def test_launch_creates_the_job_set(tmp_path: Path, api: KubernetesApi) -> None:
    command = [sys.executable, "-m", "aligner", "launch", *arguments(tmp_path, "run.name=mine")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    paths = RunPaths(tmp_path / "run")
    created = api.job_sets["ml", "mine"]
    written = yaml.safe_load(paths.job_set.read_text())
    assert created["spec"] == written["spec"]
    lines = ended.stdout.splitlines()
    assert lines[:2] == [f"run directory: {paths.root}", "jobset.jobset.x-k8s.io/mine"]
    assert any(line.startswith("stop:   kubectl delete jobset mine ") for line in lines)
    assert paths.config.is_file() and paths.access_key.is_file()
    status = read_status(paths.root)
    assert status.state == "queued"
    assert "the run's JobSet is waiting to start: kubectl get jobset mine" in str(status.note)


@needs_kubectl
def test_second_launch_of_an_active_run_is_refused(tmp_path: Path, api: KubernetesApi) -> None:
    submit(plan_run(config(tmp_path)))
    again = plan_run(config(tmp_path, "run.resume=auto"))
    with pytest.raises(ConfigError, match="already submitted as JobSet run; wait until the JobSet"):
        submit(again)
    # A JobSet that has ended is replaced.
    condition = {"type": "Failed", "status": "True"}
    api.job_sets["ml", "run"]["status"] = {"conditions": [condition]}
    submit(again)
    assert "status" not in api.job_sets["ml", "run"]


@needs_kubectl
def test_job_set_of_another_run_is_not_touched(tmp_path: Path, api: KubernetesApi) -> None:
    annotations = {"aligner/run-directory": "/other"}
    other = {"kind": "JobSet", "metadata": {"name": "run", "annotations": annotations}}
    api.job_sets["ml", "run"] = other
    with pytest.raises(ConfigError, match="JobSet run already exists and belongs to /other"):
        submit(plan_run(config(tmp_path)))
    assert api.job_sets["ml", "run"] is other
    assert not (tmp_path / "run").exists()


@needs_kubectl
def test_rejected_job_set_leaves_no_run_directory(tmp_path: Path, api: KubernetesApi) -> None:
    api.denied = 'User "me" cannot create resource "jobsets" in the namespace "ml"'
    message = r'Kubernetes rejected the run: .*\(Forbidden\).*User "me" cannot create resource'
    with pytest.raises(ConfigError, match=message):
        submit(plan_run(config(tmp_path)))
    assert not (tmp_path / "run").exists()


@needs_kubectl
def test_conflict_between_check_and_creation_is_reported(
    tmp_path: Path, api: KubernetesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit_job_set, "_find_job_set", lambda *_: None)
    api.job_sets["ml", "run"] = {"metadata": {"name": "run"}}
    with pytest.raises(ConfigError, match=r"\(AlreadyExists\).*already exists"):
        submit(plan_run(config(tmp_path)))
    assert not (tmp_path / "run").exists()


@needs_kubectl
@pytest.mark.parametrize("is_old", [False, True])
def test_cluster_without_new_job_set_is_reported(
    tmp_path: Path, api: KubernetesApi, is_old: bool
) -> None:
    if is_old:
        api.unknown_field = "spec.failurePolicy.rules[0].onJobFailureMessagePatterns"
    else:
        api.has_job_sets = False
    with pytest.raises(ConfigError, match=r"install JobSet 0\.10 or newer in the cluster"):
        submit(plan_run(config(tmp_path)))


@needs_kubectl
def test_unanswered_creation_keeps_the_run_directory(
    tmp_path: Path, api: KubernetesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit_job_set, "_SUBMIT_TIMEOUT_S", 1.0)
    api.is_hanging = True
    with pytest.raises(AlignerError, match="it is unknown whether the JobSet was created"):
        submit(plan_run(config(tmp_path)))
    assert RunPaths(tmp_path / "run").config.is_file()


def test_missing_kubectl_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"cluster\.kind=kubernetes: requires kubectl"):
        submit(plan_run(config(tmp_path)))


@needs_kubectl
def test_kubectl_accepts_the_written_file(tmp_path: Path, api: KubernetesApi) -> None:
    file = tmp_path / "jobset.yaml"
    file.write_text(render_job_set(config(tmp_path, *EVERYTHING)))
    options = ["--dry-run=server", "--output=json", f"--filename={file}", "--validate=false"]
    ended = subprocess.run(["kubectl", "create", *options], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["metadata"]["namespace"] == "team"
