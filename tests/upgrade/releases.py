"""Find the last release in the repository's history, and lay its sources out.

A release is a tag `v*`. Clones often come without tags, so `last_release.txt` names the last one, too; whoever tags a
release writes it there.
"""

import io
import os
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PINNED: Final = Path(__file__).with_name("last_release.txt")
GIT_S: Final = 60.0


class NoHistory(Exception):
    """The sources of the last release cannot be had here; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """A version, and the folder that has its package."""

    name: str
    folder: Path

    @property
    def environ(self) -> dict[str, str]:
        """What has Python import it, where `-P` keeps it from importing what lies in the working directory."""
        return {"PYTHONPATH": str(self.folder)}


def last_release(folder: Path) -> Release:
    """Lay out the newest release that lies behind what is checked out.

    Raises:
        NoHistory: this is no clone, or one without that commit.
    """
    name, commit = _tagged() or pinned()
    try:
        packed = _git("archive", "--format=tar", commit, "inference_worker")
    except subprocess.CalledProcessError as exc:
        raise NoHistory(f"{name} ({commit}) is not in this clone's history: {exc.stderr.decode().strip()}") from exc
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return Release(name=name, folder=folder)


def pinned() -> tuple[str, str]:
    """Version and commit of the last release, as the file says."""
    lines = [line for line in PINNED.read_text().splitlines() if line and not line.startswith("#")]
    name, commit = lines[-1].split()
    return name, commit


def _tagged() -> tuple[str, str] | None:
    """The newest tag behind this commit that is not this commit itself."""
    if not (ROOT / ".git").exists():
        raise NoHistory("this is no git clone")
    try:
        here = _git("rev-parse", "HEAD").decode().strip()
        tags = _git("tag", "--list", "v*", "--merged", "HEAD", "--sort=-version:refname").decode().split()
        for tag in tags:
            commit = _git("rev-list", "-n", "1", tag).decode().strip()
            if commit != here:
                return tag, commit
    except (subprocess.CalledProcessError, FileNotFoundError) as exc:
        raise NoHistory(f"git cannot be asked: {exc}") from exc
    return None


def _git(*arguments: str) -> bytes:
    environ = {**os.environ, "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"}
    # A clone of another owner, as CI mounts them, may be read all the same.
    command = ["git", "-c", f"safe.directory={ROOT}", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, check=True, timeout=GIT_S).stdout
