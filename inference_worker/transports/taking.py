"""What sessions share that go and take their work, and are not sent it: from streams, sorted sets, tables, topics.

A reader takes turn after turn; what it has taken lies in `Hands` until it is handed up, settled or given back. Not
here: what a turn is, and how a delivery is given back, kept and settled; each session says that of its own.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

import structlog

from inference_worker.disposition import DeliveryLost, Disposition, Settled, Settlement
from inference_worker.errors import StoreUnavailable, TransportLost
from inference_worker.ports import Delivery
from inference_worker.timing import first_of
from inference_worker.transports.hands import Hands

log = structlog.get_logger(__name__)

REST_PAUSE_S: Final = 0.05
"""How often a reader that is to rest is woken: a call may come before the wait that it was to end."""


class Saying:
    """Warnings, each once for as long as its reason stays the same."""

    def __init__(self, **context: object) -> None:
        """`context` stands in each of them."""
        self._context = context
        self._said: dict[str, str] = {}

    def say(self, what: str, reason: str = "", **context: object) -> None:
        """Warn, once per change of reason."""
        if self._said.get(what) != reason:
            self._said[what] = reason
            log.warning(what, reason=reason, **self._context, **context)

    def well(self, what: str) -> None:
        """What was warned of is over."""
        self._said.pop(what, None)


async def nobody() -> None:
    """The reader waits for nothing but `turn` and what it is told."""


def nothing() -> None:
    """Nothing is left over once a session is over."""


class Taking:
    """The consuming half of one session. See `ports.Transport` for what its methods are called by."""

    def __init__(
        self,
        what: str,
        *,
        take_turn: Callable[[], Awaitable[None]],
        give_back: Callable[[Sequence[Delivery]], Awaitable[None]],
        stop_s: float,
        wake: Callable[[], Awaitable[None]] = nobody,
        on_lost: Callable[[], None] = nothing,
    ) -> None:
        """`take_turn` clears `turn`, sets `resting` where nothing is consumed, and waits long for nothing but `turn`
        and `lost`; where it waits for a server besides, `wake` ends that. `stop_s`: how long its end is waited for.
        `on_lost` is called once the session is over.
        """
        self._what = what
        self._take_turn = take_turn
        self._give_back = give_back
        self._stop_s = stop_s
        self._wake = wake
        self._on_lost = on_lost
        self.hands = Hands()
        self.something = asyncio.Event()
        """Set when a delivery can be handed up, perhaps."""
        self.turn = asyncio.Event()
        """Set when the reader has something to do before its time."""
        self.consumed = False
        """Whether anybody wants deliveries."""
        self.resting = asyncio.Event()
        """Set once the reader has seen that nothing is consumed."""
        self.look_at = 0.0
        """Loop time of the reader's next look that it takes without being told."""
        self.lost = asyncio.Event()
        self.lost_because = ""

    # ------------------------------------------------------------ the end

    def lose(self, why: str) -> bool:
        """The session is over, and with it the right to settle what came by it. False: it was over already."""
        if self.lost.is_set():
            return False
        self.lost_because = why
        self.lost.set()
        self.hands.lose_all()
        self._on_lost()
        self.something.set()
        self.turn.set()
        return True

    def alive(self) -> None:
        """Raises TransportLost once it is over."""
        if self.lost.is_set():
            raise TransportLost(self.lost_because)

    # ------------------------------------------------------------ consuming

    @asynccontextmanager
    async def consuming(self, limit: int) -> AsyncGenerator[None, None]:
        """Take up to `limit`; at the end, give back what was not received."""
        self.alive()
        self.hands.limit = limit
        self.consumed = True
        self.resting.clear()
        self.turn.set()
        try:
            yield
        finally:
            self.consumed = False
            self.hands.limit = 0
            await self._come_to_rest()
            await self._give_back(self.hands.take_back())

    async def set_limit(self, limit: int) -> None:
        """Take up to `limit` from now on."""
        self.alive()
        self.hands.limit = limit
        await self._give_back(self.hands.take_back())
        self.something.set()
        await self.wake()

    async def receive(self) -> Delivery:
        """The next delivery, as soon as there is one.

        Raises:
            TransportLost: the session is over.
        """
        while True:
            self.alive()
            if self.hands.free:
                delivery = self.hands.hand_up(asyncio.get_running_loop().time())
                if self.hands.wanted:
                    self.turn.set()
                return delivery
            self.something.clear()
            await self.something.wait()

    async def read(self) -> None:
        """Turn after turn, as long as the session lasts. Never dies silently."""
        try:
            while not self.lost.is_set():
                await self._take_turn()
        except TransportLost as exc:
            self.lose(str(exc))
        except Exception as exc:
            # A fault of ours must not leave a consumer that looks alive and receives nothing.
            log.exception("the reader failed", of=self._what)
            self.lose(f"the reader failed: {type(exc).__name__}")

    async def wake(self) -> None:
        """Have the reader begin its next turn now."""
        self.turn.set()
        await self._wake()

    async def look_in(self, seconds: float) -> None:
        """See to it that the next look is no later than that."""
        at = asyncio.get_running_loop().time() + seconds
        if at < self.look_at:
            self.look_at = at
            await self.wake()

    async def _come_to_rest(self) -> None:
        """Wait for the end of the reader's turn."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._stop_s
        while not (self.resting.is_set() or self.lost.is_set()):
            if loop.time() >= until:
                self.lose("the reader did not end")
            await self.wake()
            # Again, as the first one may have come before the wait that it was to end.
            await first_of(self.resting, self.lost, within_s=REST_PAUSE_S)

    # ------------------------------------------------------------ in our hands

    async def extend(self, delivery: Delivery, keep: Callable[[], Awaitable[None]]) -> None:
        """Keep a delivery that is ours.

        Raises:
            TransportLost: it is not, or cannot be kept.
        """
        self.alive()
        if self.hands.holds(delivery):
            try:
                await keep()
            except StoreUnavailable as exc:
                raise TransportLost(str(exc)) from exc
        if not self.hands.holds(delivery):
            raise TransportLost("the delivery is not ours any more")

    def dropped(self) -> None:
        """Some of what was in our hands turned out not to be ours: there is room."""
        self.something.set()
        self.turn.set()

    async def settle(
        self,
        delivery: Delivery,
        disposition: Disposition,
        ours: Callable[[Delivery, Disposition], Awaitable[Settlement]],
        late: Callable[[Disposition], Awaitable[Settlement]],
    ) -> Settlement:
        """Settle with `ours`, or, once the session is over, with `late`; what is settled makes room for the next."""
        if self.lost.is_set():
            return await late(disposition)
        self.hands.settling(delivery, True)
        if self.hands.free:
            self.something.set()
        try:
            settlement = await ours(delivery, disposition)
        finally:
            self.hands.settling(delivery, False)
        if isinstance(settlement, Settled | DeliveryLost):
            self.hands.let_go(delivery, asyncio.get_running_loop().time())
            self.something.set()
            if self.hands.wanted:
                self.turn.set()
        return settlement
