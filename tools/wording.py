"""What is said to who uses the command line, said to who uses the API: fields for options, calls for commands.

Errors are worded where they arise, once, for the command line. Must not know which errors there are.
"""

from __future__ import annotations

import re

READER = "Kvstore-Reader"
"""A header: `COMMAND_LINE` there asks for words as they are, since a command shows them to who called it."""
COMMAND_LINE = "command-line"

PHRASES = (
    ("is no file, no name, and begins", "is no name, and begins"),
    ("pass --text for a text; ", ""),
    ("pass --tokenizer, or token ids", "pass token ids"),
    ("or give the field with --set NAME=VALUE", "or give the field in config"),
    ("kvstore ls NAMESPACE", "GET /v1/prefixes"),
    ("--all", "everything"),
)
"""Where a word for a word would not do."""
CALLS = {
    "ls": "GET /v1/namespaces",
    "names": "GET /v1/names",
    "stats": "GET /v1/stats",
    "quota": "GET /v1/quotas",
    "explain": "POST /v1/explain",
    "verify": "POST /v1/verify",
}
_COMMAND = re.compile(rf"`?\bkvstore ({'|'.join(CALLS)})\b`?")
_OPTION = re.compile(r"(?<![\w-])--([a-z]+(?:-[a-z]+)*)")


def for_api(text: str) -> str:
    """A problem or a remedy, for who asked the API."""
    for said, instead in PHRASES:
        text = text.replace(said, instead)
    text = _COMMAND.sub(lambda found: CALLS[found[1]], text)
    return _OPTION.sub(lambda found: found[1].replace("-", "_"), text)
