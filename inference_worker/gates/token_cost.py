"""About how many tokens a request costs, before it is sent. Pure.

A guess: four bytes of its body are a token, and it uses all the output that it allows itself. What it did use is known
when it has ended, and then corrects what was counted, where that still matters.
"""

from typing import Final

import msgspec

BYTES_A_TOKEN: Final = 4
MOST_TOKENS: Final = 10**9
"""More is no number of tokens, and would overflow what counts them."""


class _Asks(msgspec.Struct):
    max_completion_tokens: float | None = None
    max_tokens: float | None = None
    max_output_tokens: float | None = None


def estimated_tokens(payload: bytes) -> int:
    """At least 1."""
    try:
        asks = msgspec.json.decode(payload, type=_Asks)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        asks = _Asks()
    named = (asks.max_completion_tokens, asks.max_tokens, asks.max_output_tokens)
    output = next((number for number in named if number is not None and number > 0), 0)
    return max(int(min(len(payload) / BYTES_A_TOKEN + output, MOST_TOKENS)), 1)
