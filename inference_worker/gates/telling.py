"""What a gate says of itself, handed on while it stands and not before or after.

So a gate that is to take the place of another can be made while the old one stands, and thrown away if another one
fails; and the old one may go on for those that it has let in without being heard as if it stood there still.
"""

from collections.abc import Callable
from dataclasses import replace

from inference_worker.gates.aimd import Aimd
from inference_worker.gates.making import Around, Owner
from inference_worker.gates.redis_gates import DrainLimit
from inference_worker.gates.saturation import Seen


class Telling:
    """Between one gate, those inside it included, and whoever listens."""

    def __init__(self, to: Around) -> None:
        """`to` has those who listen."""
        self._to = to
        self._made: list[Callable[[], None]] = []
        """What was said while it was made."""
        self._stands = False
        self._left = False

    @property
    def around(self) -> Around:
        """What the gate is to be made of."""
        return replace(self._to, seen=self._seen, lent=self._lent, watched=self._watched, windows=self._windows)

    def stand(self) -> None:
        """Hand on what was said by now, and all that is said from now on."""
        self._stands = True
        made, self._made = self._made, []
        for say in made:
            say()

    def leave(self) -> None:
        """It is not to be heard any more."""
        self._stands, self._left = False, True

    def _say(self, say: Callable[[], None]) -> None:
        if self._stands:
            say()
        elif not self._left:
            self._made.append(say)

    def _seen(self, owner: Owner, inference_pool: str, seen: Seen) -> None:
        self._say(lambda: self._to.seen(owner, inference_pool, seen))

    def _lent(self, owner: Owner, limit: DrainLimit) -> None:
        self._say(lambda: self._to.lent(owner, limit))

    def _watched(self, owner: Owner, inference_pool: str) -> None:
        self._say(lambda: self._to.watched(owner, inference_pool))

    def _windows(self, owner: Owner, windows: Aimd) -> None:
        self._say(lambda: self._to.windows(owner, windows))
