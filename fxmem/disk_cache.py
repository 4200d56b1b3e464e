"""Small files in the user's cache directory, kept from one process to the next.

In: a kind, a key, text. Out: that text again, or None. Nothing here ever raises: a directory that cannot be written, a
file cut short or changed and a concurrent writer all come out as "not there". Files are written aside and renamed, and
start with a digest of what follows. ``FXMEM_CACHE=0`` in the environment switches all of it off; ``FXMEM_CACHE_DIR``
names another directory.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import secrets
import tempfile
import zlib
from importlib.util import find_spec
from pathlib import Path

MOST_FILES = 200
"""Of one kind; the oldest go first."""


def directory() -> Path | None:
    """Return where the files are; None if switched off or there is no such place."""
    if os.environ.get("FXMEM_CACHE", "1").lower() in ("0", "off", "no", "false"):
        return None
    named = os.environ.get("FXMEM_CACHE_DIR")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "fxmem"
    except RuntimeError:  # no home
        return None


def digest(*texts: str) -> str:
    """Return a key for these texts."""
    result = hashlib.sha256()
    for text in texts:
        result.update(str(len(text)).encode() + b":" + text.encode())
    return result.hexdigest()


def digest_of_source(*modules: str) -> str:
    """Return a key for the source of these modules and packages, so that another version of the code finds nothing of
    this one's. Errors: ``ModuleNotFoundError`` if there is no such module."""
    origins = [_source_files(module) for module in modules]
    try:
        return digest(*(path.read_text(encoding="utf-8") for files in origins for path in files))
    except OSError:  # no source files, as in a frozen application: nothing stored fits for sure
        return secrets.token_hex()


def _source_files(module: str) -> list[Path]:
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"no module {module!r} to hash the source of")
    file = Path(spec.origin)
    return sorted(file.parent.glob("*.py")) if file.name == "__init__.py" else [file]


def read(kind: str, key: str) -> str | None:
    """Return what was written under this key, if it is there unharmed."""
    place = directory()
    if place is None:
        return None
    try:
        stored, _, packed = (place / f"{kind}-{key}.gz").read_bytes().partition(b"\n")
        if hashlib.sha256(packed).hexdigest().encode() != stored:
            return None
        return gzip.decompress(packed).decode()
    except (OSError, EOFError, UnicodeDecodeError, zlib.error):
        return None


def write(kind: str, key: str, text: str) -> None:
    """Store ``text`` under this key, if that can be done."""
    place = directory()
    if place is None:
        return
    packed = gzip.compress(text.encode(), compresslevel=3, mtime=0)
    temporary = None
    try:
        place.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=place)
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(packed).hexdigest().encode() + b"\n" + packed)
        os.replace(temporary, place / f"{kind}-{key}.gz")
        _prune(place, kind)
    except OSError:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _prune(place: Path, kind: str) -> None:
    files = sorted(place.glob(f"{kind}-*.gz"), key=lambda path: path.stat().st_mtime)
    for path in files[:-MOST_FILES]:
        path.unlink(missing_ok=True)
