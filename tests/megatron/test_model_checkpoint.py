"""Model checkpoints: resume at the same and at other layouts, and refusal of invalid ones."""

from __future__ import annotations

import functools
import itertools
import json
import math
import shutil

import pytest
import torch

from aligner.data.checkpoint_files import CheckpointReader
from aligner.data.checksums import read_sealed, seal
from aligner.schema import ParallelConfig
from tests.megatron import checkpoint_jobs as jobs
from tests.megatron import families
from tests.rounds import covering, slow


def at(distributed=False, kind="adam", **layout):
    settings = {key: layout.pop(key) for key in ("frozen", "lora", "precision") if key in layout}
    return {"parallel": layout, "optimizer": {"distributed": distributed, "kind": kind}, **settings}


def ranks(settings):
    return ParallelConfig(**settings["parallel"]).ranks


def identity(value):
    if not isinstance(value, dict):
        return str(value)
    return "-".join(
        f"{key}{size}"
        for key, size in (value["parallel"] | value["optimizer"]).items()
        if size not in (False, "adam")
    )


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A function that returns a family's model directory and creates it once."""
    return functools.cache(
        lambda family: str(families.save(family, tmp_path_factory.mktemp(family)))
    )


TP2PP2, DP2 = at(tensor=2, pipeline=2), at(data=2)
ZERO = at(True, data=2)
FROZEN = {"frozen": ["model.embed_tokens.weight", "model.layers.[01].*"]}
LORA = {"lora": {"rank": 4, "alpha": 6.0}}


@pytest.mark.promise("checkpoint-resumes-at-another-layout")
@pytest.mark.parametrize(
    ("family", "saved", "read"),
    [
        ("llama2", TP2PP2, DP2),
        slow("llama2", DP2, TP2PP2),
        slow("llama3", ZERO, at(pipeline=2)),
        slow("llama3", at(tensor=2, sequence=True), ZERO),
        ("llama3", at(True, pipeline=2, virtual_pipeline=2, data=2), at(True, context=2)),
        slow("gpt2", ZERO, at(tensor=2)),
        slow("llama3", at(pipeline=3), at(pipeline=2, stage_layers=[3, 1])),
        # Two of the four tensor ranks have a copy of each KV head.
        slow("qwen2", at(True, tensor=4, data=2), at(pipeline=2)),
        slow("olmo2", ZERO, at(True, tensor=4, sequence=True)),
        slow("llama3", at(kind="muon", tensor=4, **LORA), at(kind="muon", tensor=2, **LORA)),
        slow("mixtral", at(True, data=4, expert=2), at(pipeline=2)),
        slow("mixtral", at(pipeline=2), at(True, data=2, expert=2)),
        ("glm4_moe", at(True, data=2, expert=2), at(pipeline=2)),
        slow("glm4_moe", at(kind="muon", pipeline=2), at(kind="muon", data=2)),
        slow("qwen3_moe-dense", at(True, pipeline=2, data=2, expert=2), at(data=2)),
        slow("llama2", at(pipeline=2, **FROZEN), {**ZERO, **FROZEN}),
        slow("llama3", at(tensor=2, **LORA), {**ZERO, **LORA}),
        ("llama3", at(kind="muon", tensor=2), at(kind="muon", pipeline=2)),
        slow("llama3", at(kind="muon", data=2, **LORA), at(kind="muon", tensor=2, **LORA)),
        slow(
            "mixtral", at(kind="muon", data=2, expert=2), at(kind="muon", tensor=2, sequence=True)
        ),
        slow("gpt2", at(kind="muon", pipeline=2), at(kind="muon", tensor=2, data=2)),
    ],
    ids=identity,
)
def test_resume_at_another_layout_equals_undisturbed_run(
    pool, model, tmp_path, family, saved, read
):
    expected = pool.run(
        jobs.save_and_continue, ranks(saved), model(family), saved, str(tmp_path / "policy")
    )[0]["losses"]
    assert len({round(loss, 4) for loss in expected}) == 5, "the losses move"
    for result in pool.run(
        jobs.load_and_continue, ranks(read), model(family), read, str(tmp_path / "policy")
    ):
        assert result["different"] == []
        assert result["losses"] == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.promise("checkpoint-resumes-at-another-layout")
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama3", at()),
        slow("llama3", TP2PP2),
        slow("llama3", at(True, pipeline=2, data=2)),
        ("llama3", {**ZERO, "precision": "bf16"}),
        slow("llama3", at(tensor=2, precision="bf16")),
        ("llama3", at(kind="muon", tensor=2, precision="bf16")),
        ("glm4_moe", at(True, data=2, expert=2, precision="bf16")),
        *covering(
            [(family, ZERO) for family in families.CONFIGS],
            (),
            lambda row: families.parts(row[0]),
        ),
    ],
    ids=identity,
)
def test_resume_at_same_layout_is_bit_identical(pool, model, tmp_path, family, settings):
    expected = pool.run(
        jobs.save_and_continue, ranks(settings), model(family), settings, str(tmp_path / "policy")
    )
    results = pool.run(
        jobs.load_and_continue, ranks(settings), model(family), settings, str(tmp_path / "policy")
    )
    for result, wanted in zip(results, expected, strict=True):
        assert result["different"] == []
        assert result["losses"] == wanted["losses"]
        for name, tensor in wanted["end"].items():
            assert torch.equal(tensor, result["end"][name]), name


# With four tensor ranks, one of the two ranks that have a copy of a KV head writes it.
@pytest.mark.parametrize(("family", "tensor", "bound"), [("llama2", 2, 1.1), ("qwen2", 4, 1.15)])
def test_ranks_write_each_element_once_in_equal_shares(
    pool, model, tmp_path, family, tensor, bound
):
    settings = at(True, tensor=tensor, data=4 // tensor)
    pool.run(jobs.save, 4, model(family), settings, str(tmp_path / "policy"), 1)
    manifest = CheckpointReader(tmp_path / "policy").manifest
    for name, entry in manifest.index.items():
        covered = sorted((piece.start, piece.stop) for piece in entry.pieces)
        if entry.pieces[0].axis is None:
            assert len(covered) == 1, name
        else:
            assert covered[0][0] == 0 and covered[-1][1] == entry.shape[entry.pieces[0].axis], name
            assert all(before[1] == after[0] for before, after in itertools.pairwise(covered)), name
    elements = sum(math.prod(entry.shape) for entry in manifest.index.values())
    payload = sum(record.size for record in manifest.files.values())
    assert 3 * 4 * elements < payload < 1.05 * 3 * 4 * elements
    assert max(record.size for record in manifest.files.values()) < bound * payload / 4


@pytest.fixture(scope="session")
def complete(pool, model, tmp_path_factory):
    """The directory of a complete checkpoint of two ranks."""
    directory = tmp_path_factory.mktemp("complete") / "policy"
    pool.run(jobs.save, 2, model("llama2"), at(tensor=2), str(directory), 1)
    return directory


def truncate(directory):
    file = directory / "rank_1.safetensors"
    file.write_bytes(file.read_bytes()[:-4])


def edit(directory, **entries):
    file = directory / "manifest.json"
    file.write_text(seal(json.dumps(read_sealed(file) | entries)))


def flip(file, place):
    content = bytearray(file.read_bytes())
    content[place] ^= 0x10
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("family", "harm", "told"),
    [
        ("llama2", shutil.rmtree, "not a complete checkpoint: the directory does not exist"),
        (
            "llama2",
            lambda path: (path / "manifest.json").unlink(),
            "manifest.json, which is written last, is missing",
        ),
        (
            "llama2",
            lambda path: (path / "rank_1.safetensors").unlink(),
            "incomplete: rank_1.safetensors is missing",
        ),
        ("llama2", truncate, "the checkpoint is incomplete: rank_1.safetensors has "),
        (
            "llama2",
            lambda path: flip(path / "rank_1.safetensors", -1),
            "is damaged: rank_1.safetensors is damaged: ",
        ),
        (
            "llama2",
            lambda path: flip(path / "rank_0.safetensors", 30),
            "is damaged: rank_0.safetensors is damaged: ",
        ),
        (
            "llama2",
            lambda path: flip(path / "manifest.json", -50),
            "manifest.json: damaged: the content does not match",
        ),
        (
            "llama2",
            lambda path: edit(path, files={}),
            "rank_0.safetensors contains tensors but is not listed in manifest.json",
        ),
        (
            "llama2",
            lambda path: edit(path, format=99),
            "checkpoint format 99 is not supported; this release of aligner reads format 4",
        ),
        (
            "llama2",
            lambda path: (path / "manifest.json").write_text(
                '{\n "format": 3,\n "aligner": "0.9"\n}'
            ),
            "checkpoint format 3 is not supported; this release of aligner reads format 4",
        ),
        (
            "llama2",
            lambda path: edit(path, extra=1),
            "not a model checkpoint; missing or unknown entries: extra",
        ),
        (
            "llama2",
            lambda path: edit(path, head="scalar"),
            "does not match the model: the head is scalar in the checkpoint, but vocabulary in the model",
        ),
        ("llama3", lambda path: None, "num_kv_heads is 4 in the checkpoint, but 2 in the model"),
        ("qwen2", lambda path: None, "qkv_bias is False in the checkpoint, but True in the model"),
    ],
)
def test_damaged_or_foreign_checkpoint_is_refused(
    pool, model, complete, tmp_path, family, harm, told
):
    shutil.copytree(complete, tmp_path / "policy")
    harm(tmp_path / "policy")
    message = pool.run(jobs.refusal, 1, model(family), at(), str(tmp_path / "policy"))[0]
    assert message.startswith(("AlignerError: ", "DamagedError: "))
    assert told in message
    assert str(tmp_path / "policy") in message


def test_mismatched_tensors_are_named_on_every_rank(pool, model, complete, tmp_path):
    shutil.copytree(complete, tmp_path / "policy")
    index = json.loads((complete / "manifest.json").read_text())["index"]
    extra = index.pop("model.norm.weight")
    index["model.layers.0.mlp.up_proj.weight"][1] = False
    edit(tmp_path / "policy", index={**index, "model.other.weight": extra})
    for message in pool.run(
        jobs.refusal, 2, model("llama2"), at(pipeline=2), str(tmp_path / "policy")
    ):
        assert "model.norm.weight (64,) is missing" in message
        assert "model.other.weight (64,) is not in the model" in message
        assert "model.layers.0.mlp.up_proj.weight was frozen and has no optimizer state" in message


def test_checkpoint_without_adapters_is_refused_for_lora(pool, model, complete, tmp_path):
    for message in pool.run(jobs.refusal, 2, model("llama2"), at(tensor=2, **LORA), str(complete)):
        assert (
            "the LoRA adapters are None in the checkpoint, but {'rank': 4, 'alpha': 6.0," in message
        )


def test_checkpoint_of_another_optimizer_kind_is_refused(pool, model, complete):
    for message in pool.run(
        jobs.refusal, 2, model("llama2"), at(kind="muon", tensor=2), str(complete)
    ):
        assert message.startswith("AlignerError: ")
        assert (
            f"{complete}: the checkpoint has the optimizer state of optimizer.kind=adam,"
            " which cannot be loaded with optimizer.kind=muon" in message
        )


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        ("full", "rank_1.safetensors: No space left on device"),
        ("memory", "rank_1.safetensors: MemoryError()"),
        ("nothing", "rank_1.safetensors contains tensors but is not listed in manifest.json"),
        ("short", "rank_1.safetensors has 8 bytes, expected 9"),
    ],
)
def test_failed_write_names_rank_and_leaves_no_checkpoint(pool, model, tmp_path, failure, told):
    for message in pool.run(
        jobs.failing_save, 2, model("llama2"), DP2, str(tmp_path / "policy"), 1, failure
    ):
        assert "could not be written" in message
        assert told in message
    assert not list(tmp_path.iterdir())


def test_superseded_trainer_completes_no_checkpoint(pool, model, tmp_path):
    for errors in pool.run(jobs.save_after_takeover, 2, model("llama2"), DP2, str(tmp_path)):
        assert len(errors) == 2 and all("attempt 1 (process " in error for error in errors), errors
    (left,) = (path.name for path in tmp_path.iterdir() if path.name != "claim")
    assert left.startswith("first.") and left.endswith(".tmp")
