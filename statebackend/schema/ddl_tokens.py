"""The words of Spark's DDL: what `statebackend.schema.ddl` is made of."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

__all__ = ["Token", "Unparsed", "collation_name", "tokens_of", "unescaped"]

# `kind` is the token's group: name (in backquotes), text (in quotes), number, value,
# word or mark.
_TOKENS: Final = re.compile(
    r"""
    (?P<space>[\s\u00a0\u1680\u2000-\u200a\u2028\u202f\u205f\u3000]+ | --[^\r\n]*)
  | (?P<name>`(?:[^`]|``)*`)
  | (?P<text>'(?:[^'\\]|\\.|'')*' | "(?:[^"\\]|\\.|"")*" | r'[^']*' | r"[^"]*")
  | (?P<number>[0-9]+(?![\w]))
  | (?P<literal>(?:[0-9]+(?:[lsydf]|bd)|[0-9]+e[0-9]+(?:[df]|bd)?)(?!\w))
  | (?P<word>\w+)
  | (?P<mark>[<>(),:])
    """,
    re.VERBOSE | re.IGNORECASE | re.DOTALL | re.ASCII,
)
# Besides, where defaults may stand: numbers with a sign, a point or an exponent.
_VALUES: Final = re.compile(
    r"(?P<value>(?:[-+](?=[0-9.])[0-9]*|[0-9]+(?=\.)|(?=\.[0-9]))(?:\.[0-9]*)?(?:e[-+]?[0-9]+)?"
    r"|[0-9]+e[-+]?[0-9]+)(?!\w)",
    re.IGNORECASE | re.ASCII,
)
_COLLATION: Final = re.compile(
    r"(?P<utf8>utf8_(?:binary|lcase))(?P<trim>_rtrim)?"
    r"|(?P<base>unicode|(?P<language>[a-z]{2,3})(?P<script>_[a-z]{4})?(?P<region>_[a-z]{3})?)"
    r"(?P<how>(?:_c[is]|_a[is]|_rtrim)*)",
    re.IGNORECASE,
)
_ESCAPES: Final = {
    "0": "\0",
    "b": "\b",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "Z": "\x1a",
    "%": r"\%",
    "_": r"\_",
}
_ESCAPE: Final = re.compile(
    r"\\(?:u(?P<four>[0-9a-fA-F]{4})|U(?P<eight>[0-9a-fA-F]{8})|(?P<octal>[01][0-7]{2})|(?P<one>.))"
    r"""|(?P<twice>''|"")""",
    re.DOTALL,
)


class Token(NamedTuple):
    """One word, and where it begins. The last token is of kind `end`."""

    kind: str
    text: str
    at: int


class Unparsed(Exception):
    """Where a reading of the text came to an end, and what should have stood there."""

    def __init__(self, at: int, wanted: str) -> None:
        super().__init__(at, wanted)
        self.at = at
        self.wanted = wanted


def tokens_of(text: str, *, values: bool = False) -> list[Token]:
    """The words of a text, without spaces and comments.

    Args:
        values: numbers with a sign, a point or an exponent are words of kind `value`.

    Raises:
        Unparsed: a character that begins no word, or a comment without an end.
    """
    tokens: list[Token] = []
    at = 0
    while at < len(text):
        if text.startswith("/*", at):
            at = _comment_end(text, at)
            continue
        match = (_VALUES.match(text, at) if values else None) or _TOKENS.match(text, at)
        if match is None:
            raise Unparsed(at, "this character has no place in a schema")
        kind = str(match.lastgroup)
        if kind != "space":
            tokens.append(Token(kind, match.group(), at))
        at = match.end()
    tokens.append(Token("end", "", len(text)))
    return tokens


def _comment_end(text: str, start: int) -> int:
    """The end of a bracketed comment; they nest."""
    depth, at = 0, start
    while at < len(text):
        pair = text[at : at + 2]
        if pair in ("/*", "*/"):
            depth += 1 if pair == "/*" else -1
            at += 2
            if not depth:
                return at
        else:
            at += 1
    raise Unparsed(start, "this comment has no end")


def unescaped(quoted: str) -> str:
    """The content of a string literal, as Spark reads it.

    Raises:
        ValueError, OverflowError: an escape for a character beyond the last one of Unicode.
    """
    if quoted[0] in "rR":
        return quoted[2:-1]
    quote = quoted[0]

    def plain(match: re.Match[str]) -> str:
        if code := match["four"] or match["eight"]:
            return chr(int(code, 16))
        if match["octal"]:
            return chr(int(match["octal"], 8))
        if match["twice"]:
            return quote if match["twice"][0] == quote else match["twice"]
        return _ESCAPES.get(match["one"], match["one"])

    return _ESCAPE.sub(plain, quoted[1:-1])


def collation_name(name: str) -> str | None:
    """Spark's spelling of a collation's name; None if it cannot be one.

    Which languages there are, only Spark's ICU knows: any of two or three letters passes.
    """
    match = _COLLATION.fullmatch(name)
    if match is None:
        return None
    if match["utf8"]:
        return name.upper()
    how = match["how"].upper().split("_")[1:]
    if len({part.rstrip("IS") for part in how}) < len(how):
        return None  # said twice
    if match["language"]:
        script = (match["script"] or "").title()
        base = match["language"].lower() + script + (match["region"] or "").upper()
    else:
        base = "UNICODE"
    return "_".join([base, *(part for part in ("CI", "AI", "RTRIM") if part in how)])
