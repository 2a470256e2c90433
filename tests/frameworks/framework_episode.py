"""Runs an episode of a real framework with a tiny model that has learned what the policy writes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import AddedToken, decoders, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from aligner.agents.agent_episodes import AgentEpisodes
from aligner.data.tokenizer import Tokenizer
from aligner.data.types import Completion, Prompt, Sample
from aligner.engines.embedded.embedded_engine import EmbeddedEngine
from aligner.engines.engine_loop import run_steps
from aligner.engines.engine_protocol import GenerationEngine, GenerationRequest, SamplingOptions
from aligner.models.model_source import directory_shape
from aligner.schema import EngineConfig
from aligner.schema.environment import EnvironmentConfig
from benchmarks.peer_environment import (
    installed_node_directory,
    installed_python,
    is_node_environment,
)
from benchmarks.runs import REPOSITORY
from tests.agents.scripted import Scripted
from tests.data.chat_models import SPECIAL, TEMPLATES, write_model
from tests.engines.engines import load_directory
from tests.frameworks.cases import QUESTION, Case

AGENTS = Path(__file__).parent / "agents"
CONTEXT = 8192
END = "<|end|>"
# With this string, which smolagents sets as stop string, a turn ends without an end-of-turn token.
CODE_END = "</code>"


@dataclass
class Outcome:
    """What an episode has left behind."""

    sample: Sample
    completions: list[Completion] = field(default_factory=list)
    """The engine's completions, in order."""
    report: dict[str, Any] | None = None
    """The agent's report; None if the agent failed."""

    @property
    def generated_turns(self) -> list[list[int]]:
        """The generated tokens in the sample and its branches, one list per turn."""
        turns = []
        for sequence in (self.sample, *self.sample.branches):
            mask = sequence.generated_mask
            marks = [True] * len(sequence.response) if mask is None else mask.tolist()
            # two turns always have an observation between them
            was_generated = False
            for token, is_generated in zip(sequence.response.tolist(), marks, strict=True):
                if is_generated and not was_generated:
                    turns.append([])
                if is_generated:
                    turns[-1].append(token)
                was_generated = is_generated
        return turns


def is_installed(environment: str) -> bool:
    """Return whether the separate environment of a framework exists."""
    if is_node_environment(environment):
        return installed_node_directory(environment) is not None
    return installed_python(environment) is not None


def build_agent_command(case: Case, directory: Path) -> list[str]:
    """Return the command that runs the agent of a case.

    Node looks for packages beside the program, so the programs are copied to `directory`.
    """
    program = f"{case.program or case.environment}_agent"
    if is_node_environment(case.environment):
        packages = installed_node_directory(case.environment)
        assert packages is not None
        for file in AGENTS.glob("*.mjs"):
            shutil.copy(file, directory)
        (directory / "node_modules").symlink_to(packages / "node_modules")
        command = ["node", str(directory / f"{program}.mjs")]
    else:
        python = installed_python(case.environment)
        command = [str(python), str(AGENTS / f"{program}.py")]
    return [*command, case.argument] if case.argument else command


def run_case(case: Case, directory: Path) -> Outcome:
    """Run the episode of a case with a real engine, and return what it has left behind.

    A first episode with scripted turns shows the tokens that the policy reads. A tiny model learns
    to write the turns after these tokens, and generates them in the second episode.
    """
    command = build_agent_command(case, directory)
    model = directory / "model"
    write_tokenizer(model)
    tokenizer = Tokenizer(model)
    turns = [_tokenize_turn(tokenizer, turn) for turn in case.turns]
    scripted = Scripted(lambda turn, tokens: turns[turn])
    scripted._tokenizer_directory = model
    scripted_outcome = _run_episode(scripted, tokenizer, case, command, directory / "scripted.json")
    count = len(scripted_outcome.completions)
    assert count == len(turns), f"the agent requested {count} of {len(turns)} turns; see its output"

    train(model, tokenizer, scripted_outcome.sample.sequences)
    engine = EmbeddedEngine(
        directory_shape(model, "model.path"),
        EngineConfig(exact=True, batch_size=2),
        0,
        2,
        None,
        tokenizer_directory=model,
    )
    load_directory(engine, model)
    return _run_episode(engine, tokenizer, case, command, directory / "report.json")


def _run_episode(
    engine: GenerationEngine, tokenizer: Tokenizer, case: Case, command: Sequence[str], log: Path
) -> Outcome:
    """Run one episode with an engine; the agent writes its report to the file `log`."""
    completions: list[Completion] = []
    generate = engine.generate

    async def record(*arguments: Any, **options: Any) -> Completion:
        completion = await generate(*arguments, **options)
        completions.append(completion)
        return completion

    engine.generate = record  # type: ignore[method-assign]
    settings = EnvironmentConfig(
        agent_command=list(command), max_turn_tokens=256, deadline_s=240.0, retries=0
    )
    task = {"mode": case.mode, "asked": QUESTION, "log": str(log)}
    request = GenerationRequest(Prompt(0, "task", tokenizer.encode("task"), task), 0)
    episodes = AgentEpisodes.create(engine, tokenizer, settings, 3, CONTEXT)
    sampling = SamplingOptions(100, greedy=True, stop_token_ids=tokenizer.eos_token_ids)
    try:
        samples = run_steps(episodes.start([request], sampling))
    finally:
        episodes.close()
    report = None
    with suppress(FileNotFoundError):
        report = json.loads(log.read_text())
    return Outcome(samples[0], completions, report)


def _tokenize_turn(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a turn, with the end-of-turn token unless a stop string ends it."""
    return tokenizer.encode(text if text.endswith(CODE_END) else text + END).tolist()


@cache
def _train_tokenizer() -> str:
    """Return a tokenizer for prompts of frameworks, in which English text has few tokens."""
    tokenizer = tokenizers.Tokenizer(tokenizer_models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    pages = sorted((REPOSITORY / "docs").glob("*.md"))
    tokenizer.train_from_iterator((page.read_text() for page in pages), trainer)
    return tokenizer.to_str()


def write_tokenizer(directory: Path) -> None:
    """Write a model directory without weights: tokenizer, chat template with tools, and config."""
    directory.mkdir()
    (directory / "tokenizer.json").write_text(_train_tokenizer())
    write_model(directory, TEMPLATES["qwen"], (END, "</s>"))


def train(directory: Path, tokenizer: Tokenizer, sequences: Sequence[Sample]) -> None:
    """Train a tiny model to generate the generated tokens of the sequences, and save it."""
    torch.manual_seed(11)
    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=tokenizer.vocab_size,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        eos_token_id=list(tokenizer.eos_token_ids),
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    examples = [(sequence.tokens[None], _build_labels(sequence)[None]) for sequence in sequences]
    for _ in range(300):
        losses = []
        for tokens, labels in examples:
            loss = model(input_ids=tokens, labels=labels).loss
            loss.backward()
            losses.append(loss.item())
        if max(losses) < 0.01:
            break
        optimizer.step()
        optimizer.zero_grad()
    else:
        raise AssertionError(f"the model has not learned the turns: losses {losses}")
    model.save_pretrained(directory)


def _build_labels(sequence: Sample) -> Tensor:
    """Return the tokens of a sequence, int64 [T], with -100 for all that were not generated."""
    labels = sequence.tokens.clone()
    labels[: sequence.prompt_length] = -100
    if sequence.generated_mask is not None:
        labels[sequence.prompt_length :][~sequence.generated_mask] = -100
    return labels
