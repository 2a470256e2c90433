"""What trackers have recorded, read back through their own readers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from aligner.paths import RunPaths

Steps = list[dict[str, float]]


def wandb_records(file: Path) -> list[Any]:
    """Every record of a `.wandb` file, from wandb's own reader."""
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
    """What `wandb sync wandb/offline-run-*` would upload, in the order of the steps' recording."""
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
    """A client of the run's own file store."""
    from mlflow.tracking import MlflowClient

    return MlflowClient(paths.mlflow.as_uri())


def mlflow_steps(paths: RunPaths) -> Steps:
    """Every recorded value; a step that was recorded twice is there twice."""
    client, run = mlflow_client(paths), paths.tracker_run("mlflow").read_text()
    found: list[tuple[int, str, float]] = []
    for key in client.get_run(run).data.metrics:
        found += [
            (metric.step, key, metric.value) for metric in client.get_metric_history(run, key)
        ]
    return _by_step(found)


def tensorboard_steps(paths: RunPaths) -> Steps:
    """What TensorBoard shows."""
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
    """The steps of all that was written for TensorBoard, whether it shows them or not."""
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
