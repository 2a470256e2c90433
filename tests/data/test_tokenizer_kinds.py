"""Tokenizers of published kinds are loaded as AutoTokenizer loads them, or refused."""

from pathlib import Path

import pytest

from aligner.data.chat_template import ChatTemplate
from aligner.data.tokenizer_files import read_tokenizer_files
from tests.data.tokenizer_kinds import KINDS, TEXTS, write_kind

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 1+1?"},
    {"role": "assistant", "content": "2"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("name", KINDS)
def test_tokenizers_equal_those_of_auto_tokenizer(tmp_path: Path, name: str) -> None:
    from transformers import AutoTokenizer

    write_kind(tmp_path, KINDS[name]())
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    files = read_tokenizer_files(tmp_path)
    ours = files.tokenizer

    assert ours.get_vocab() == theirs.get_vocab()
    assert files.special_tokens == theirs.special_tokens_map
    for token in ("bos", "eos", "pad", "unk"):
        text = files.special_tokens.get(f"{token}_token")
        id = None if text is None else ours.token_to_id(text)
        assert id == getattr(theirs, f"{token}_token_id")

    special = [str(token) for token in theirs.added_tokens_encoder]
    texts = [*TEXTS, *(f"a {token} b{token}\n{token}" for token in special), "".join(special)]
    for text in texts:
        for adds in (False, True):
            ids = ours.encode(text, add_special_tokens=adds).ids
            assert ids == theirs(text, add_special_tokens=adds)["input_ids"], text
            for skips in (False, True):
                decoded = ours.decode(ids, skip_special_tokens=skips)
                expected = theirs.decode(
                    ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False
                )
                assert decoded == expected

    if theirs.chat_template is not None:
        template = ChatTemplate(tmp_path)
        for tools in (None, TOOLS):
            for add in (False, True):
                rendered = template.render(MESSAGES, tools, add_generation_prompt=add)
                assert rendered == theirs.apply_chat_template(
                    MESSAGES, tools=tools, tokenize=False, add_generation_prompt=add
                )
