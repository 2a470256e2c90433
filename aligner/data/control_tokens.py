"""Control tokens inside the text of a message, encoded as plain characters.

A user's text such as `What does <|im_end|> mean?` must not end the user's turn. `escape` marks the
control tokens in a text that is not trusted; the text then goes through the chat template like any
other. `PlainEncoder` encodes marked control tokens as plain characters, and the control tokens that
the template writes as themselves.
"""

import json
import re

import tokenizers
from tokenizers import AddedToken

_BREAK = "\ufdd2"
"""Follows the first character of a control token that is plain text; no character of any text."""
_ANCHOR = "\ufdd3{}\ufdd4"
_LOOKS_LIKE_CONTROL = re.compile(r"<[|\uff5c].*[|\uff5c]>", re.DOTALL)


def control_tokens(tokenizer: tokenizers.Tokenizer) -> dict[str, AddedToken]:
    """Return the tokens that structure a conversation, by their text: special tokens, and added
    tokens of the form `<|…|>`, which some models do not mark as special.

    Others, such as `<think>` and `<tool_call>`, occur in ordinary instructions.
    """
    return {
        token.content: token
        for token in tokenizer.get_added_tokens_decoder().values()
        if token.content.strip() and (token.special or _LOOKS_LIKE_CONTROL.fullmatch(token.content))
    }


def control_pattern(texts: list[str]) -> re.Pattern[str] | None:
    """Return a pattern that matches any of the texts, longest first; None without texts."""
    if not texts:
        return None
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))


def escape(text: str, pattern: re.Pattern[str]) -> str:
    """Mark the control tokens in a text as plain characters."""
    return pattern.sub(lambda found: f"{found[0][0]}{_BREAK}{found[0][1:]}", text)


def is_escaped(text: str) -> bool:
    """Return whether a text contains control tokens that are marked as plain characters."""
    return _BREAK in text


def without_marks(text: str) -> str:
    """Return a text as people read it."""
    return text.replace(_BREAK, "")


class PlainEncoder:
    """Encodes texts with marked control tokens, as the tokenizer encodes all others.

    Its tokenizer does not know the control tokens. Those that a template wrote are replaced by
    anchors, which have the same effect on the text around them, and whose ids are exchanged
    afterwards.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._known = control_tokens(tokenizer)
        decoder = tokenizer.get_added_tokens_decoder()
        self._ids = {
            token.content: id for id, token in decoder.items() if token.content in self._known
        }
        self._control_ids = frozenset(self._ids.values())
        self._pattern = control_pattern(list(self._known))

        content = json.loads(tokenizer.to_str())
        content["post_processor"] = None
        content["added_tokens"] = [
            token for token in content["added_tokens"] if token["content"] not in self._known
        ]
        self._plain = tokenizers.Tokenizer.from_str(json.dumps(content))
        self._anchors = {
            text: _ANCHOR.format(f"{token.lstrip:d}{token.rstrip:d}{token.normalized:d}")
            for text, token in self._known.items()
        }
        anchors = {
            self._anchors[text]: AddedToken(
                self._anchors[text],
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=False,
                special=True,
            )
            for text, token in self._known.items()
        }
        self._plain.add_special_tokens(list(anchors.values()))
        self._anchor_ids = {self._plain.token_to_id(anchor) for anchor in anchors}
        # Without the control tokens, other added tokens are numbered differently.
        self._numbers = {
            self._plain.token_to_id(token.content): id
            for id, token in decoder.items()
            if token.content not in self._known
        }

    def encode(self, text: str) -> tuple[list[int], list[int]]:
        """Return the token ids of a text, and the number of its characters up to each token's end.

        Raises:
            ValueError: The vocabulary contains a control token's text as an ordinary piece, so it
                cannot be encoded as plain characters.
        """
        plain: list[str] = []
        ends: list[int] = [0]
        written: list[str] = []

        def add(piece: str, start: int) -> None:
            for offset, character in enumerate(piece):
                if character != _BREAK:
                    plain.append(character)
                    ends.append(start + offset + 1)

        position = 0
        for found in self._pattern.finditer(text) if self._pattern else ():
            add(text[position : found.start()], position)
            anchor = self._anchors[found[0]]
            plain.extend(anchor)
            ends.extend([found.end()] * len(anchor))
            written.append(found[0])
            position = found.end()
        add(text[position:], position)

        encoding = self._plain.encode("".join(plain), add_special_tokens=False)
        tokens = iter(written)
        ids = []
        for token in encoding.ids:
            if token in self._anchor_ids:
                ids.append(self._ids[next(tokens)])
            elif token in self._numbers:
                ids.append(self._numbers[token])
            elif token in self._control_ids:
                raise ValueError("a control token in a message cannot be encoded as plain text")
            else:
                ids.append(token)
        return ids, [ends[end] for _, end in encoding.offsets]
