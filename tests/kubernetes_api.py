"""A Kubernetes API server in this process that knows only JobSets, for kubectl.

The server answers discovery, and creates, returns and deletes JobSets. It checks what the JobSet
CRD and its webhook require, and returns errors in the form of the real API.
"""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, urlsplit

GROUP = "jobset.x-k8s.io"
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_RULE_NAME = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")
_ACTIONS = {
    "FailJobSet",
    "RestartJobSet",
    "RestartJobSetAndIgnoreMaxRestarts",
    "RestartJob",
    "RestartJobAndIgnoreMaxRestarts",
}


class KubernetesApi:
    """Use the server as a context manager; `kubeconfig` is the file for kubectl."""

    def __init__(self, directory: Path) -> None:
        self.job_sets: dict[tuple[str, str], dict[str, Any]] = {}
        """JobSets by namespace and name."""
        self.requests: list[str] = []
        """Method and path of each request."""
        self.denied: str | None = None
        """Reason for which all writes are forbidden; None to allow them."""
        self.has_job_sets = True
        """Whether the cluster has the JobSet API."""
        self.unknown_field: str | None = None
        """A field that the version of the API does not have."""
        self.is_hanging = False
        """Whether creations get no answer."""
        self._stopped = threading.Event()
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer("GET")

            def do_POST(self) -> None:
                self._answer("POST")

            def do_DELETE(self) -> None:
                self._answer("DELETE")

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def _answer(self, method: str) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else {}
                api.requests.append(f"{method} {self.path}")
                code, content = api.handle(method, self.path, body)
                text = json.dumps(content).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.kubeconfig = directory / "kubeconfig"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [
                {
                    "name": "test",
                    "cluster": {"server": f"http://127.0.0.1:{self._server.server_port}"},
                }
            ],
            "users": [{"name": "test", "user": {}}],
            "contexts": [
                {"name": "test", "context": {"cluster": "test", "user": "test", "namespace": "ml"}}
            ],
        }
        self.kubeconfig.write_text(json.dumps(config))

    def __enter__(self) -> KubernetesApi:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopped.set()
        self._server.shutdown()
        self._server.server_close()

    def handle(self, method: str, target: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return the status code and the content of the answer to a request."""
        url = urlsplit(target)
        if method == "GET" and (discovery := self._discover(url.path)) is not None:
            return 200, discovery
        match = re.fullmatch(
            rf"/apis/{GROUP}/v1alpha2/namespaces/([^/]+)/jobsets(?:/([^/]+))?", url.path
        )
        if match is None or not self.has_job_sets:
            return _fail(404, "NotFound", "the server could not find the requested resource")
        namespace, name = match[1], match[2] or body.get("metadata", {}).get("name", "")
        found = self.job_sets.get((namespace, name))
        quoted = f'jobsets.{GROUP} "{name}"'
        if method != "GET" and self.denied is not None:
            return _fail(403, "Forbidden", f"{quoted} is forbidden: {self.denied}")
        if method != "POST" and found is None:
            return _fail(404, "NotFound", f"{quoted} not found")
        if method == "GET":
            return 200, found or {}
        if method == "DELETE":
            del self.job_sets[namespace, name]
            return 200, {"kind": "Status", "apiVersion": "v1", "status": "Success"}
        return self._create(namespace, name, quoted, body, parse_qs(url.query))

    def _create(
        self, namespace: str, name: str, quoted: str, body: dict[str, Any], query: dict[str, Any]
    ) -> tuple[int, dict[str, Any]]:
        is_dry = "dryRun" in query
        if self.is_hanging and not is_dry:
            self._stopped.wait(60)
        if self.unknown_field is not None:
            message = f'strict decoding error: unknown field "{self.unknown_field}"'
            return _fail(400, "BadRequest", f"JobSet cannot be handled: {message}")
        if problems := find_problems(body):
            return _fail(422, "Invalid", f"JobSet.{GROUP} {quoted} is invalid: {problems}")
        if (namespace, name) in self.job_sets:
            return _fail(409, "AlreadyExists", f"{quoted} already exists")
        body["metadata"] |= {"namespace": namespace, "uid": "1"}
        if not is_dry:
            self.job_sets[namespace, name] = body
        return 201, body

    def _discover(self, path: str) -> dict[str, Any] | None:
        version = {"groupVersion": f"{GROUP}/v1alpha2", "version": "v1alpha2"}
        group = {"name": GROUP, "versions": [version], "preferredVersion": version}
        resource = {
            "name": "jobsets",
            "singularName": "jobset",
            "namespaced": True,
            "kind": "JobSet",
            "verbs": ["create", "delete", "get", "list", "patch"],
        }
        answers: dict[str, dict[str, Any]] = {
            "/version": {"major": "1", "minor": "32", "gitVersion": "v1.32.0"},
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": []},
            "/openapi/v3": {
                "paths": {
                    f"apis/{GROUP}/v1alpha2": {"serverRelativeURL": f"/openapi/v3/apis/{GROUP}"}
                }
            },
            f"/openapi/v3/apis/{GROUP}": _describe_operations(),
            "/apis": {
                "kind": "APIGroupList",
                "apiVersion": "v1",
                "groups": [group] if self.has_job_sets else [],
            },
        }
        if self.has_job_sets:
            answers[f"/apis/{GROUP}/v1alpha2"] = {
                "kind": "APIResourceList",
                "apiVersion": "v1",
                "groupVersion": f"{GROUP}/v1alpha2",
                "resources": [resource],
            }
        return answers.get(path)


def _describe_operations() -> dict[str, Any]:
    """Return the part of the OpenAPI document with which kubectl finds the supported parameters."""
    operation = {
        "x-kubernetes-group-version-kind": {
            "group": GROUP,
            "version": "v1alpha2",
            "kind": "JobSet",
        },
        "parameters": [
            {"name": name, "in": "query", "schema": {"type": "string"}}
            for name in ("dryRun", "fieldValidation")
        ],
        "responses": {},
    }
    path = f"/apis/{GROUP}/v1alpha2/namespaces/{{namespace}}/jobsets/{{name}}"
    return {
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": "v1"},
        "paths": {path: {"patch": operation, "post": operation}},
    }


def _fail(code: int, reason: str, message: str) -> tuple[int, dict[str, Any]]:
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
    return code, {**status, "reason": reason, "message": message, "code": code, "details": {}}


def find_problems(job_set: dict[str, Any]) -> list[str]:
    """Return what the webhooks of JobSet and Job would reject."""
    problems = []
    name = job_set["metadata"]["name"]
    spec = job_set["spec"]
    jobs = {job["name"]: job["template"]["spec"] for job in spec["replicatedJobs"]}
    for role, job in jobs.items():
        pod_name = f"{name}-{role}-0-{job['completions'] - 1}-abcde"
        if not _NAME.fullmatch(pod_name):
            problems.append(f"spec.replicatedJobs.name: {pod_name}: must be a DNS-1035 label")
        pod = job["template"]["spec"]
        if "podFailurePolicy" in job and pod.get("restartPolicy") != "Never":
            problems.append("restartPolicy: only Never is supported with podFailurePolicy")
        volumes = [volume["name"] for volume in pod.get("volumes", [])]
        for container in pod["containers"]:
            mounts = container.get("volumeMounts", [])
            paths = [mount["mountPath"] for mount in mounts]
            if len({*paths}) != len(paths):
                problems.append(f"volumeMounts: mountPath must be unique: {paths}")
            unknown = {mount["name"] for mount in mounts} - {*volumes}
            if unknown:
                problems.append(f"volumeMounts: {unknown} not found")
        names = {container["name"] for container in pod["containers"]}
        for rule in job.get("podFailurePolicy", {}).get("rules", []):
            if ("onExitCodes" in rule) == ("onPodConditions" in rule):
                problems.append("podFailurePolicy: exactly one of onExitCodes and onPodConditions")
            codes = rule.get("onExitCodes", {"values": [1], "operator": "In"})
            if codes["values"] != sorted({*codes["values"]}) or 0 in codes["values"]:
                problems.append(f"onExitCodes: {codes['values']}: must be ordered, without 0")
            if codes.get("containerName", "aligner") not in names:
                problems.append("onExitCodes.containerName: not found")
    targets = [*spec.get("successPolicy", {}).get("targetReplicatedJobs", [])]
    rules = spec.get("failurePolicy", {}).get("rules", [])
    for rule in rules:
        targets += rule.get("targetReplicatedJobs", [])
        if rule["action"] not in _ACTIONS or not _RULE_NAME.fullmatch(rule["name"]):
            problems.append(f"failurePolicy.rules: {rule}")
    if len({rule["name"] for rule in rules}) != len(rules):
        problems.append("failurePolicy.rules: names are not unique")
    problems += [f"{target}: no such replicatedJob" for target in targets if target not in jobs]
    return problems
