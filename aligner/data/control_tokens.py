"""Control tokens inside the text of a message, encoded as plain characters.

A user's text such as `What does <|im_end|> mean?` must not end the user's turn. `escape` marks the
control tokens in an untrusted text, which the chat template then renders like any other text.
`PlainEncoder` encodes marked control tokens as plain characters, and the control tokens that the
template itself writes as control tokens.
"""

import itertools
import json
import re
from collections.abc import Sequence
from functools import lru_cache

import tokenizers
from tokenizers import AddedToken

# Mark after the first character of a control token that is plain text. It is a Unicode
# noncharacter, which no text contains.
_BREAK = "\ufdd2"
# Substitute for a control token that the template wrote; see `PlainEncoder`.
_ANCHOR = "\ufdd3{}\ufdd4"
# Turns whose tokens are kept; a conversation rarely has more.
_CACHED_TURNS = 64
_LOOKS_LIKE_CONTROL = re.compile(r"<[|\uff5c].*[|\uff5c]>", re.DOTALL)


def find_control_tokens(tokenizer: tokenizers.Tokenizer) -> dict[str, AddedToken]:
    """Return the tokens that structure a conversation, by their text.

    These are the special tokens, and added tokens of the form `<|…|>`, which some models do not
    mark as special. Other added tokens, such as `<think>` and `<tool_call>`, also occur in ordinary
    instructions and are not control tokens.
    """
    return {
        token.content: token
        for token in tokenizer.get_added_tokens_decoder().values()
        if token.content.strip() and (token.special or _LOOKS_LIKE_CONTROL.fullmatch(token.content))
    }


def compile_control_pattern(texts: list[str]) -> re.Pattern[str] | None:
    """Return a pattern that matches any of the texts, longest first; None without texts."""
    if not texts:
        return None
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))


def escape(text: str, pattern: re.Pattern[str]) -> str:
    """Mark the control tokens in a text as plain characters."""
    return pattern.sub(lambda match: f"{match[0][0]}{_BREAK}{match[0][1:]}", text)


def is_escaped(text: str) -> bool:
    """Return whether a text contains control tokens that are marked as plain characters."""
    return _BREAK in text


def unescape(text: str) -> str:
    """Return a text without the marks of `escape`."""
    return text.replace(_BREAK, "")


class PlainEncoder:
    """Encodes texts with marked control tokens as plain characters.

    It uses a copy of the tokenizer without the control tokens. Control tokens that a template wrote
    are replaced by anchors: special tokens of the copy that split the text in the same way. After
    tokenization, the ids of the anchors are replaced by the ids of the control tokens.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._control_tokens = find_control_tokens(tokenizer)
        decoder = tokenizer.get_added_tokens_decoder()
        self._ids = {
            token.content: id
            for id, token in decoder.items()
            if token.content in self._control_tokens
        }
        self._control_ids = frozenset(self._ids.values())
        self._pattern = compile_control_pattern(list(self._control_tokens))

        content = json.loads(tokenizer.to_str())
        content["post_processor"] = None
        content["added_tokens"] = [
            token
            for token in content["added_tokens"]
            if token["content"] not in self._control_tokens
        ]
        self._plain_tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
        # Tokens with the same flags share an anchor. Only these flags affect the surrounding text.
        self._anchors = {
            text: _ANCHOR.format(f"{token.lstrip:d}{token.rstrip:d}{token.normalized:d}")
            for text, token in self._control_tokens.items()
        }
        anchors = {
            self._anchors[text]: AddedToken(
                self._anchors[text],
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=False,
                special=True,
            )
            for text, token in self._control_tokens.items()
        }
        self._plain_tokenizer.add_special_tokens(list(anchors.values()))
        self._anchor_ids = {self._plain_tokenizer.token_to_id(anchor) for anchor in anchors}
        # The copy lacks the control tokens, so the other added tokens have different ids in it; map
        # them to the original ids.
        self._original_ids = {
            self._plain_tokenizer.token_to_id(token.content): id
            for id, token in decoder.items()
            if token.content not in self._control_tokens
        }

    def encode(self, text: str) -> tuple[list[int], list[int]]:
        """Encode a text with marked control tokens.

        Returns:
            The token ids, and for each token the number of characters of the text up to its end.

        Raises:
            ValueError: The vocabulary contains a control token's text as an ordinary piece, so it
                cannot be encoded as plain characters.
        """
        plain: list[str] = []  # characters of the text with anchors and without marks
        ends: list[int] = [0]  # ends[n]: end in `text` of the first n plain characters
        template_tokens: list[str] = []  # control tokens that the template wrote

        def add(piece: str, start: int) -> None:
            for offset, character in enumerate(piece):
                if character != _BREAK:
                    plain.append(character)
                    ends.append(start + offset + 1)

        position = 0
        for match in self._pattern.finditer(text) if self._pattern else ():
            add(text[position : match.start()], position)
            anchor = self._anchors[match[0]]
            plain.extend(anchor)
            ends.extend([match.end()] * len(anchor))
            template_tokens.append(match[0])
            position = match.end()
        add(text[position:], position)

        encoding = self._plain_tokenizer.encode("".join(plain), add_special_tokens=False)
        remaining_tokens = iter(template_tokens)
        ids = []
        for token in encoding.ids:
            if token in self._anchor_ids:
                ids.append(self._ids[next(remaining_tokens)])
            elif token in self._original_ids:
                ids.append(self._original_ids[token])
            elif token in self._control_ids:
                raise ValueError("a control token in a message cannot be encoded as plain text")
            else:
                ids.append(token)
        return ids, [ends[end] for _, end in encoding.offsets]


class TurnEncoder:
    """Encodes conversations, and keeps the tokens of recent turns.

    Tokenizers split a text at its special tokens before anything else, so that the parts can be
    encoded one by one. A conversation that continues an earlier one, or the prompt of a
    conversation that was just encoded, therefore costs only its new parts.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pattern = compile_control_pattern(_find_separators(tokenizer))
        self._encode_turn = lru_cache(maxsize=_CACHED_TURNS)(self._encode)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without special tokens that are not in the text."""
        starts = [match.start() for match in self._pattern.finditer(text)] if self._pattern else []
        if not starts:
            return list(self._encode(text))
        tokens: list[int] = []
        for start, end in itertools.pairwise([0, *starts, len(text)]):
            if start < end:
                tokens += self._encode_turn(text[start:end])
        return tokens

    def _encode(self, text: str) -> Sequence[int]:
        # `encode` also computes offsets, which costs a third of its time.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids


def _find_separators(tokenizer: tokenizers.Tokenizer) -> list[str]:
    """Return the special tokens before which a text can be split without a change of its tokens.

    A separator must be found wherever its text occurs, and must not change the text around it.
    """
    added = tokenizer.get_added_tokens_decoder().values()
    # Whether such a token is found depends on the characters around it.
    if any(token.single_word for token in added):
        return []
    return [
        token.content
        for token in added
        if token.special
        and not (token.normalized or token.lstrip or token.rstrip)
        and not any(_may_hide(other.content, token.content) for other in added)
    ]


def _may_hide(other: str, separator: str) -> bool:
    """Return whether another token can contain the beginning of a separator, after its own first
    character or as a whole."""
    if other == separator:
        return False
    return separator in other or any(
        separator.startswith(other[start:]) for start in range(1, len(other))
    )
