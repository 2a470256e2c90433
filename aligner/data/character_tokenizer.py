"""A tokenizer of single characters, for models that are initialised at random."""

from __future__ import annotations

import string

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from aligner.errors import ConfigError
from aligner.models.shape import ModelShape

# In the order in which a vocabulary takes them: a small one has digits, lowercase letters, space and common punctuation.
_COMMON = string.digits + string.ascii_lowercase + " .,:;!?'\"-+*/=()<>[]{}_@#&"
_ACCENTED = "".join(map(chr, range(0xC0, 0x180)))
CHARACTERS = "".join(dict.fromkeys(_COMMON + string.ascii_uppercase + string.punctuation + "\n" + _ACCENTED))


def character_tokenizer(shape: ModelShape) -> tokenizers.Tokenizer:
    """A tokenizer whose vocabulary is exactly the model's: <pad> and <eos> at the model's ids, `CHARACTERS` at the others.

    Decoding joins the characters with nothing between them. There is no unknown token: text with another character
    cannot be encoded. Raises ConfigError for special ids or a vocabulary size that this does not fit.
    """
    if len(shape.eos_token_ids) != 1 or shape.pad_token_id in shape.eos_token_ids:
        raise ConfigError(
            "model.config must give one eos_token_id and another pad_token_id, got"
            f" eos_token_id={list(shape.eos_token_ids)} and pad_token_id={shape.pad_token_id}"
        )
    special = {shape.pad_token_id: "<pad>", shape.eos_token_ids[0]: "<eos>"}
    largest = len(CHARACTERS) + len(special)
    if not max(special) < shape.vocab_size <= largest:
        raise ConfigError(
            f"model.config.vocab_size={shape.vocab_size}: a character tokenizer allows at most {largest} tokens, and more than"
            f" the largest special id, {max(special)}"
        )
    remaining = iter(CHARACTERS)
    vocabulary = {special.get(token) or next(remaining): token for token in range(shape.vocab_size)}
    # The unknown token is not in the vocabulary: that makes an unknown character an error instead of a token.
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(special.values()))
    return tokenizer


def lenient_tokenizer(shape: ModelShape, longest: int) -> tokenizers.Tokenizer:
    """`character_tokenizer` for any text, cut to its last `longest` characters: those that it does not know become `?`.

    For dry runs, whose texts were meant for another model.
    """
    tokenizer = character_tokenizer(shape)
    tokenizer.model.unk_token = "?"
    tokenizer.normalizer = normalizers.Replace(tokenizers.Regex(rf"(?m)\A.*(?=.{{{longest}}}\z)"), "")
    return tokenizer
