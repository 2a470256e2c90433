"""Token ids and loss masks of SFT and DPO records equal those of TRL's own code."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aligner.data.examples import open_demonstrations, open_preferences
from aligner.data.tokenizer import Tokenizer
from aligner.schema import DataConfig
from tests.data.tokenizer_kinds import KINDS, write_kind
from tests.trl_source import needs_trl, trl_functions

BYTE_LEVEL = ("gpt2", "qwen", "llama3", "neox")
SENTENCEPIECE = ("llama2", "llama2 legacy", "mistral", "gemma", "phi3")
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
TURNS = (
    "{% for m in messages %}<{{ m.role }}>\n{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)
PAIRS = (
    ("2+2=", "four"),
    ("2+2=", " four"),
    ("2+2= ", "four"),
    ("2+2= ", "4"),
    ("The quick\n", "brown fox"),
    ("Answer:\n\n", "\nworld"),
    ("naïve café: ", "日本語 🙂"),
    ("naïve", "té"),
    ("Hello wor", "ld, this"),
    ("What is it?", "  two spaces "),
    ("question", "answer\n"),
)


@cache
def of_trl(trainer: str) -> dict[str, Callable[..., Any]]:
    """Return the functions `tokenize_fn` and `add_eos` of a TRL trainer, by name."""
    from transformers import ProcessorMixin

    logger = logging.getLogger("trl")
    logger.warning_once = lambda *texts: None  # type: ignore[attr-defined]
    helpers = trl_functions(
        "data_utils.py",
        "_tokenize",
        "common_prefix_length",
        "is_conversational",
        "is_conversational_from_value",
        json=json,
        logger=logger,
        ProcessorMixin=ProcessorMixin,
    )
    return trl_functions(
        f"trainer/{trainer}_trainer.py",
        "tokenize_fn",
        "add_eos",
        logger=logger,
        **helpers,
    )


pytestmark = needs_trl


@cache
def _templates() -> dict[str, str]:
    return {"inst": INST, "turns": TURNS}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Tokenizer, Any]]:
    """Return a function that loads a kind of tokenizer with aligner and with transformers."""

    @cache
    def made(kind: str, template: str) -> tuple[Tokenizer, Any]:
        from transformers import AutoTokenizer

        directory = tmp_path_factory.mktemp("model")
        write_kind(directory, KINDS[kind]())
        theirs = AutoTokenizer.from_pretrained(directory)
        theirs.chat_template = _templates()[template]
        # A replaced shape allows tokenizers of architectures that aligner does not train.
        shape = SimpleNamespace(
            eos_token_ids=(theirs.eos_token_id,), pad_token_id=0, vocab_size=len(theirs)
        )
        for file in ("chat_template.json", "chat_template.jinja"):
            (directory / file).unlink(missing_ok=True)
        (directory / "chat_template.jinja").write_text(_templates()[template])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("aligner.data.tokenizer.directory_shape", lambda *_: shape)
            tokenizer = Tokenizer(directory)
        assert tokenizer.chat_template  # loaded lazily: read it while the directory exists
        return tokenizer, theirs

    return made


def records(tmp_path: Path, rows: list[dict[str, Any]]) -> DataConfig:
    file = tmp_path / "records.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(path=str(file), shuffle=False, max_prompt_tokens=512, max_response_tokens=512)


def chat(prompt: str, response: str) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    return [{"role": "user", "content": prompt}], [{"role": "assistant", "content": response}]


@pytest.mark.promise("tokenization-equals-trl")
@pytest.mark.parametrize("kind", (*BYTE_LEVEL, *SENTENCEPIECE))
@pytest.mark.parametrize("template", [None, "inst", "turns"])
def test_sft_tokens_and_loss_masks_equal_trl(
    tmp_path: Path,
    model: Callable[[str, str], tuple[Tokenizer, Any]],
    kind: str,
    template: str | None,
) -> None:
    ours, theirs = model(kind, template or "turns")
    functions = of_trl("sft")
    rows, wanted = [], []
    for prompt, response in PAIRS:
        if template is None:
            rows.append({"prompt": prompt, "response": response})
            example: dict[str, Any] = {"prompt": prompt, "completion": response}
            example = functions["add_eos"](example, theirs.eos_token, "text")
        else:
            asked, said = chat(prompt, response)
            rows.append({"prompt": asked, "response": said})
            example = {"prompt": asked, "completion": said}
        wanted.append(
            functions["tokenize_fn"](example, theirs, "text", False, theirs.chat_template)
        )

    found = open_demonstrations(records(tmp_path, rows), ours, 1)
    for row, demonstration, theirs_of_row in zip(
        rows, found.take(0, len(rows)), wanted, strict=True
    ):
        assert demonstration.tokens.tolist() == theirs_of_row["input_ids"], row
        # No position predicts the first token, so its entry in TRL's mask has no effect.
        mask = demonstration.loss_mask.int().tolist()
        assert mask[1:] == theirs_of_row["completion_mask"][1:], row


@pytest.mark.promise("tokenization-equals-trl")
@pytest.mark.parametrize("kind", ("qwen", "llama3", "llama2", "llama2 legacy", "mistral"))
@pytest.mark.parametrize("template", [None, "inst"])
def test_dpo_tokens_and_boundaries_equal_trl(
    tmp_path: Path,
    model: Callable[[str, str], tuple[Tokenizer, Any]],
    kind: str,
    template: str | None,
) -> None:
    ours, theirs = model(kind, template or "turns")
    functions = of_trl("dpo")
    rows, wanted = [], []
    for prompt, chosen in PAIRS:
        row: dict[str, Any] = {"prompt": prompt, "chosen": chosen, "rejected": "5"}
        if template is not None:
            asked, good = chat(prompt, chosen)
            row = {"prompt": asked, "chosen": good, "rejected": chat(prompt, "5")[1]}
        rows.append(row)
        example = dict(row) if template else functions["add_eos"](dict(row), theirs.eos_token)
        wanted.append(functions["tokenize_fn"](example, theirs))

    rows = [row for row in rows if row["chosen"] != row["rejected"]]
    found = open_preferences(records(tmp_path, rows), ours, 1)
    for row, pair, theirs_of_row in zip(rows, found.take(0, len(rows)), wanted, strict=True):
        length = max(1, len(theirs_of_row["prompt_ids"]))
        assert pair.chosen.prompt_length == pair.rejected.prompt_length == length, row
        whole = theirs_of_row["prompt_ids"] + theirs_of_row["chosen_ids"]
        assert pair.chosen.tokens.tolist() == whole, row
        whole = theirs_of_row["prompt_ids"] + theirs_of_row["rejected_ids"]
        assert pair.rejected.tokens.tolist() == whole, row


@pytest.mark.parametrize("kind", ("llama2", "llama2 legacy", "mistral"))
def test_sentencepiece_response_has_no_extra_space(
    tmp_path: Path, model: Callable[[str, str], tuple[Tokenizer, Any]], kind: str
) -> None:
    ours, theirs = model(kind, "turns")
    data = records(tmp_path, [{"prompt": "2+2=", "response": "four"}])
    (found,) = open_demonstrations(data, ours, 1).take(0, 1)
    assert found.tokens[:-1].tolist() == theirs("2+2=four")["input_ids"]
    response = theirs.convert_ids_to_tokens(found.tokens[found.prompt_length :].tolist())
    assert not response[0].startswith("▁")


@pytest.mark.parametrize("kind", ("llama2", "mistral"))
def test_merge_across_prompt_boundary_is_reported(
    tmp_path: Path, model: Callable[[str, str], tuple[Tokenizer, Any]], kind: str
) -> None:
    ours, _ = model(kind, "turns")
    rows = [{"prompt": "The ", "response": "quick"}, {"prompt": "2+2=", "response": "4"}]
    found = open_demonstrations(records(tmp_path, rows), ours, 1)
    assert any("records.jsonl:1: tokens merge" in notice for notice in found.notices)
    first = found.take(0, 1)[0]
    assert "quick" in ours.decode(first.tokens[first.prompt_length :])


def test_text_after_prompt_tokens_has_no_extra_space(
    model: Callable[[str, str], tuple[Tokenizer, Any]],
) -> None:
    ours, theirs = model("llama2 legacy", "turns")
    for prompt, text in PAIRS:
        given = torch.tensor(theirs(prompt)["input_ids"])
        tokens = ours.encode_after(prompt, given, text)
        assert theirs.decode(torch.cat([given, tokens])[1:]) == prompt + text
