"""Preparation and checks of model directories."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from aligner.config.compose import compose_config
from aligner.data.model_directory import prepare_model, read_shape
from aligner.data.tokenizer import CHARACTERS, Tokenizer
from aligner.errors import AlignerError, ConfigError
from aligner.models.shape import LayerShape, Rope
from aligner.models.weight_slices import weight_table
from aligner.paths import get_cache_directory
from aligner.schema import Config
from tests.small_disk import small_disk


def tiny(directory: Path, *overrides: str) -> Config:
    return compose_config(["experiment=tiny_ppo", f"run.dir={directory}", *overrides])


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    return prepare_model(tiny(tmp_path_factory.mktemp("run")))


@pytest.fixture
def copy(prepared, tmp_path) -> Path:
    return shutil.copytree(prepared, tmp_path / "model")


def from_directory(path: Path) -> Config:
    return compose_config(["experiment=tiny_ppo", "model.source=directory", f"model.path={path}"])


def test_random_weights_have_configured_shape_and_std(prepared):
    weights = load_file(prepared / "model.safetensors")
    table = weight_table(read_shape(prepared))
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == {
        spec.name: spec.shape for spec in table
    }
    assert all(tensor.dtype == torch.float32 for tensor in weights.values())
    assert torch.equal(weights["model.norm.weight"], torch.ones(64))
    for spec in table:
        if len(spec.shape) == 2:
            assert abs(float(weights[spec.name].mean())) < 0.005
            assert float(weights[spec.name].std()) == pytest.approx(0.05, rel=0.1)


def test_random_weights_depend_only_on_seed_and_name(prepared, tmp_path):
    small = load_file(prepared / "model.safetensors")
    deeper = (
        prepare_model(tiny(tmp_path / "deeper", "model.config.num_hidden_layers=5"))
        / "model.safetensors"
    )
    assert all(torch.equal(tensor, load_file(deeper)[name]) for name, tensor in small.items())
    other = load_file(prepare_model(tiny(tmp_path / "other", "seed=2")) / "model.safetensors")
    gate = "model.layers.0.mlp.gate_proj.weight"
    assert not torch.equal(small[gate], other[gate])
    assert not torch.equal(small[gate], small["model.layers.0.mlp.up_proj.weight"])


def test_transformers_loads_a_random_model_with_equal_weights(prepared):
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(prepared, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    weights = load_file(prepared / "model.safetensors")
    parameters = dict(model.named_parameters())
    assert parameters.keys() == weights.keys()
    assert all(torch.equal(parameters[name], tensor) for name, tensor in weights.items())


def test_character_tokenizer_round_trips_its_vocabulary(prepared):
    tokenizer = Tokenizer(prepared)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_ids) == (0, (1,))
    text = CHARACTERS[:62]
    assert tokenizer.encode(text).tolist() == list(range(2, 64))
    assert tokenizer.encode(text).dtype == torch.int64
    assert tokenizer.decode(tokenizer.encode(text)) == text
    for text in ["count:  3", " a", "(x_y) = 'z'", ""]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([2, 1, 3, 0]) == "01"


def test_characters_outside_vocabulary_are_reported(prepared):
    with pytest.raises(AlignerError, match=r"lacks the characters \['A', 'ß'\]"):
        Tokenizer(prepared).encode("a Aß")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.config.eos_token_id=0", "exactly one eos_token_id and a different pad_token_id"),
        ("model.config.eos_token_id=64", "eos_token_id=64"),
        ("model.config.vocab_size=5000", "at most"),
    ],
)
def test_invalid_character_vocabulary_leaves_no_files(tmp_path, override, message):
    with pytest.raises(ConfigError, match=message):
        prepare_model(tiny(tmp_path / "run", override))
    assert list((tmp_path / "run").iterdir()) == []


def test_existing_model_directory_is_not_rewritten(tmp_path):
    config = tiny(tmp_path)
    before = (prepare_model(config) / "model.safetensors").stat()
    after = (prepare_model(config) / "model.safetensors").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


PREPARE = (
    "import sys; from aligner.config.compose import compose_config; from"
    " aligner.data.model_directory import prepare_model;print('ready', flush=True);"
    " sys.stdin.readline(); prepare_model(compose_config(sys.argv[1:]))"
)


def preparing(*overrides: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PREPARE, *overrides],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def start(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.mark.slow
def test_concurrent_preparations_give_one_model(tmp_path, prepared):
    overrides = ["experiment=tiny_ppo", f"run.dir={tmp_path}"]
    processes = [preparing(*overrides) for _ in range(2)]
    try:
        for process in processes:
            start(process)
        assert [process.wait(timeout=60) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [path.name for path in tmp_path.iterdir()] == ["initial_model"]
    assert (
        load_file(tmp_path / "initial_model" / "model.safetensors").keys()
        == load_file(prepared / "model.safetensors").keys()
    )


@pytest.mark.slow
def test_killed_preparation_leaves_no_model_directory(tmp_path):
    # The model is large enough that the process is killed while it generates the weights.
    overrides = ["experiment=tiny_ppo", f"run.dir={tmp_path}"]
    process = preparing(
        *overrides, "model.config.hidden_size=1024", "model.config.num_hidden_layers=40"
    )
    try:
        start(process)
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob(".initial_model.*/tokenizer.json")):
            assert process.poll() is None and time.monotonic() < deadline, (
                "the preparation never began to write"
            )
            time.sleep(0.01)
    finally:
        process.kill()
        process.communicate()
    assert not (tmp_path / "initial_model").exists()
    assert read_shape(prepare_model(tiny(tmp_path))).hidden_size == 64


def test_full_disk_is_reported_and_leaves_no_files(tmp_path):
    with small_disk(tmp_path / "disk", "64k") as disk:
        config = compose_config(["experiment=tiny_ppo", f"run.dir={disk.directory / 'run'}"])
        with pytest.raises(OSError, match=r"No space left on device: '.*/model\.safetensors'"):
            prepare_model(config)
        assert not [path for path in disk.directory.rglob("*") if path.is_file()]


def test_complete_model_directory_is_used_in_place(copy):
    assert prepare_model(from_directory(copy)) == copy


def test_missing_directory_and_files_are_reported(tmp_path, copy):
    with pytest.raises(ConfigError, match="absent: no such model directory"):
        prepare_model(from_directory(tmp_path / "absent"))
    (copy / "tokenizer.json").unlink()
    (copy / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"missing: tokenizer\.json, \*\.safetensors"):
        prepare_model(from_directory(copy))


def test_all_wrong_weights_are_reported_at_once(copy):
    weights = load_file(copy / "model.safetensors")
    del weights["lm_head.weight"], weights["model.layers.2.mlp.up_proj.weight"]
    weights["model.norm.weight"] = torch.ones(32)
    weights["model.layers.4.input_layernorm.weight"] = torch.ones(64)
    save_file(weights, copy / "model.safetensors")
    with pytest.raises(ConfigError) as caught:
        prepare_model(from_directory(copy))
    for problem in (
        "lm_head.weight (64, 64) is missing",
        "layers.2.mlp.up_proj.weight (128, 64) is missing",
        "norm.weight has shape (32,), expected (64,)",
        "layers.4.input_layernorm.weight (64,) is not part of the model",
    ):
        assert problem in str(caught.value)


def test_sharded_weights_require_index_and_all_shards(copy):
    weights = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    index = {name: f"model-{part % 2}.safetensors" for part, name in enumerate(sorted(weights))}
    for file in ("model-0.safetensors", "model-1.safetensors"):
        save_file({name: weights[name] for name in weights if index[name] == file}, copy / file)
    with pytest.raises(
        ConfigError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"
    ):
        prepare_model(from_directory(copy))
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert prepare_model(from_directory(copy)) == copy
    (copy / "model-1.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-1\.safetensors cannot be read"):
        prepare_model(from_directory(copy))


def test_invalid_weights_architecture_or_tokenizer_is_refused(copy):
    original = (copy / "config.json").read_text()
    for change, message in [
        (
            {"architectures": ["BertForMaskedLM"]},
            "BertForMaskedLM is not supported; supported: LlamaForCausalLM",
        ),
        ({"vocab_size": 60}, "the tokenizer has 64 tokens, more than the model's vocab_size 60"),
    ]:
        (copy / "config.json").write_text(json.dumps(json.loads(original) | change))
        with pytest.raises(ConfigError, match=message):
            prepare_model(from_directory(copy))
    (copy / "config.json").write_text(original)
    content = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(ConfigError, match=r"model\.safetensors cannot be read"):
        prepare_model(from_directory(copy))


@pytest.mark.promise("weight-files-are-checked-by-validate")
def test_token_id_beyond_the_vocabulary_is_refused(copy):
    file = copy / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"]["a"] = 64  # the number of tokens is unchanged, but the ids have a gap
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="more than the model's vocab_size 64; for example 'a'"):
        prepare_model(from_directory(copy))


@pytest.mark.parametrize(
    "content", [b"{", b"version https://git-lfs.github.com/spec/v1\n", b"\xff\xfe", b"{}"]
)
def test_invalid_tokenizer_file_is_refused(copy, content):
    (copy / "tokenizer.json").write_bytes(content)
    for read in (lambda: prepare_model(from_directory(copy)), lambda: Tokenizer(copy)):
        with pytest.raises(ConfigError, match=r"tokenizer\.json: not a valid tokenizer file: "):
            read()


@pytest.mark.slow
def test_smollm2_is_converted_once_and_answers_correctly(tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    # `make` stores the fetched package in this directory.
    (tmp_path / "packages").symlink_to(get_cache_directory() / "packages")
    monkeypatch.setenv("ALIGNER_CACHE", str(tmp_path))
    config = compose_config(["experiment=smollm2_sentiment"])
    directory = prepare_model(config)
    assert tmp_path in directory.parents
    expected = {
        "layers": (LayerShape(Rope(100000.0)),) * 30,
        "tied_embeddings": True,
        "eos_token_ids": (2,),
        "pad_token_id": 0,
    }
    shape = read_shape(directory)
    assert {name: getattr(shape, name) for name in expected} == expected
    tokenizer = Tokenizer(directory)
    text = "The movie was great, naïve 3 times."
    assert tokenizer.decode(tokenizer.encode(text)) == text
    # A correct greedy answer also checks the values of the weights, not only names and shapes.
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory)
    prompt = tokenizer.encode(
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    answer = model.generate(
        prompt[None],
        attention_mask=torch.ones_like(prompt[None]),
        max_new_tokens=10,
        do_sample=False,
    )
    assert tokenizer.decode(answer[0, len(prompt) :]) == "The capital of France is Paris."
    modified = (directory / "model.safetensors").stat().st_mtime_ns
    assert prepare_model(config) == directory
    assert (directory / "model.safetensors").stat().st_mtime_ns == modified
