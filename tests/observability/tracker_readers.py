"""Read the metrics that trackers have recorded, with the trackers' own readers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from aligner.paths import RunPaths

Steps = list[dict[str, float]]


def wandb_records(file: Path) -> list[Any]:
    """Return all records of a `.wandb` file."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    store, records = DataStore(), []
    store.open_for_scan(str(file))
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        records.append(record)
    return records


def wandb_steps(paths: RunPaths) -> Steps:
    """Return the steps that `wandb sync wandb/offline-run-*` would upload, in recorded order."""
    (file,) = paths.wandb.glob("offline-run-*/*.wandb")
    steps = []
    for record in wandb_records(file):
        if record.WhichOneof("record_type") == "history":
            row = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            metrics = {key: value for key, value in row.items() if not key.startswith("_")}
            steps.append({"step": row["_step"], **metrics})
    return steps


def mlflow_client(paths: RunPaths) -> Any:
    """Return a client of the run's file store."""
    from mlflow.tracking import MlflowClient

    return MlflowClient(paths.mlflow.as_uri())


def mlflow_steps(paths: RunPaths) -> Steps:
    """Return all recorded steps; assert that no metric of a step was recorded twice."""
    client, run = mlflow_client(paths), paths.tracker_run("mlflow").read_text()
    found: list[tuple[int, str, float]] = []
    for key in client.get_run(run).data.metrics:
        found += [
            (metric.step, key, metric.value) for metric in client.get_metric_history(run, key)
        ]
    return _by_step(found)


def tensorboard_steps(paths: RunPaths) -> Steps:
    """Return the steps that TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(paths.tensorboard))
    events.Reload()
    found = [
        (event.step, key, event.value)
        for key in events.Tags()["scalars"]
        for event in events.Scalars(key)
    ]
    return _by_step(found)


def tensorboard_writes(paths: RunPaths) -> list[int]:
    """Return the step numbers of all written events, including those that TensorBoard hides."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    files = sorted(paths.tensorboard.iterdir())
    return [
        event.step
        for file in files
        for event in LegacyEventFileLoader(str(file)).Load()
        if event.HasField("summary")
    ]


def _by_step(found: list[tuple[int, str, float]]) -> Steps:
    assert len({(step, key) for step, key, _ in found}) == len(found), "a step is there twice"
    return [
        {"step": step, **{key: value for at, key, value in found if at == step}}
        for step in sorted({at for at, _, _ in found})
    ]
