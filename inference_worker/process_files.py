"""The files that flags name, as they were at one moment: what is read of them is what was looked at.

A file that is replaced by another under its name, as a ConfigMap is by its links, has other contents; nothing else
counts, neither its times nor where it lies.
"""

import hashlib
from collections.abc import Callable, Iterable

ReadFile = Callable[[str], str]
"""The text of a file; raises OSError or ValueError."""


class Snapshot:
    """Reads each file once, and says the same of it ever after, that it cannot be read included."""

    def __init__(self, read_file: ReadFile, paths: Iterable[str] = ()) -> None:
        self._read_file = read_file
        self._found: dict[str, str | OSError | ValueError] = {}
        for path in paths:
            self._look(path)

    def __call__(self, path: str) -> str:
        """See `ReadFile`."""
        found = self._look(path)
        if isinstance(found, str):
            return found
        raise found

    @property
    def paths(self) -> tuple[str, ...]:
        """Of those that were asked for."""
        return tuple(self._found)

    @property
    def fingerprint(self) -> str:
        """The same for the same contents."""
        digest = hashlib.sha256()
        for path, found in sorted(self._found.items()):
            for part in (path, type(found).__name__, str(found)):
                # With their lengths, so that what is in one cannot be taken for a part of the next.
                said = part.encode(errors="surrogatepass")
                digest.update(b"%d:" % len(said) + said)
        return digest.hexdigest()

    def _look(self, path: str) -> str | OSError | ValueError:
        if path not in self._found:
            try:
                self._found[path] = self._read_file(path)
            except (OSError, ValueError) as exc:
                self._found[path] = exc
        return self._found[path]
