"""Secrets in addresses, removed from whatever is written or shown.

An address such as `postgresql://user:password@host/mlflow` is needed to reach a tracking server.
Nothing that outlives the process may contain it: no recipe in a checkpoint, no dry run, log or
error.
"""

import re
from collections.abc import Callable
from typing import Any, Final

# The host of a web address ends at a slash; `host:5000/path@1` is a port and a path. A password may
# contain a quote, an @ or a slash: it ends at the last @ before the path, or else at the last @
# behind a slash.
_WEB: Final = re.compile(
    r"""(?<=://)(?!\[)(?:[^\s/:'"<>?#]*:(?!\d+(?:[/?#]|$))"""
    r"""(?:[^\s/]*|[^\s@'"<>]*(?:@[^\s/@'"<>]*)*)|[^\s/:'"<>?#]+)@"""
)
# SQLAlchemy takes everything up to the @ for a password, whatever it holds (`_parse_url`, 2.0): a
# slash, a question mark, a blank. Blanks belong to a password only if the whole text is an address.
_SCHEME: Final = r"(?<![\w+])(?!(?:https?|s3|gs|hf|file|ray)://)(?P<scheme>[\w+]+://)"
_DATABASE: Final = re.compile(_SCHEME + r"[^:/\s@]*:[^@\s]*@(?:[^\s/@'\"<>]*@)*")
_DATABASE_ALONE: Final = re.compile("^" + _SCHEME + r"[^:/@]*:[^@]*@")
# The value of any other key may be a password: drivers have many names for one.
_QUERY: Final = re.compile(
    r"""(?<=[?&;])(?!(?:driver|charset|sslmode|mode|cache|uri|timeout|connect_timeout|versionId"""
    r"""|application_name|schema|page|region|endpoint_override)=)([\w.-]+)=[^\s&;'"<>]*"""
)
_WEB_ADDRESS: Final = re.compile(r"""(https?://[^\s'"<>]*)""")
# Of a link only these are secrets: a page's address needs its other values.
_SECRET_NAME: Final = re.compile(
    r"""(?<=[?&;])([\w.-]*(?:pass|pwd|token|secret|key|sig|cred|auth)[\w.-]*)=[^\s&;'"<>]*""", re.I
)
# Characters that a terminal interprets or shows in another order, in file names and errors.
_CONTROL: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def redact(text: str) -> str:
    """The text without users and passwords of addresses, and with control characters spelt out."""
    text = _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)
    if "://" not in text:
        return text
    text = _DATABASE.sub(r"\g<scheme>", _DATABASE_ALONE.sub(r"\g<scheme>", text))
    parts = _WEB_ADDRESS.split(_WEB.sub("", text))  # every second one is a link
    hidden = (_QUERY, _SECRET_NAME)
    return "".join(hidden[at % 2].sub(r"\1=***", part) for at, part in enumerate(parts))


def userinfo(uri: str) -> str:
    """`user:password` of an address; empty when it has none."""
    found = _DATABASE_ALONE.search(uri) or _WEB.search(uri)
    return re.sub(r"^[\w+]+://", "", found[0]).removesuffix("@") if found else ""


def redacted(tree: Any) -> Any:
    """Plain data with every text redacted, keys too."""
    return with_texts(tree, lambda _, text: redact(text))


def with_texts(tree: Any, change: Callable[[str, str], str], key: str = "") -> Any:
    """Plain data with every text, and every key, replaced by what `change` returns.

    Args:
        tree: what is below the dotted `key`; a list has the key of its values.
        change: takes the dotted key of a text, which is empty for a key itself, and the text.
    """
    if isinstance(tree, dict):
        return {
            with_texts(name, change): with_texts(value, change, f"{key}.{name}".lstrip("."))
            for name, value in tree.items()
        }
    if isinstance(tree, (list, tuple)):
        return [with_texts(value, change, key) for value in tree]
    return change(key, tree) if isinstance(tree, str) else tree
