"""The six lanes: a request is reserved or overflow, and interactive, async or batch. Lower numbers go first. Pure."""

from collections.abc import Mapping
from typing import Final

TIERS: Final = ("interactive", "async", "batch")
RESERVED: Final = "reserved"
OVERFLOW: Final = "overflow"
CLASSIFICATION_LABEL: Final = "classification"
TIER_LABEL: Final = "tier"
"""Where no other label is configured."""

LANES: Final = tuple(f"{classification}-{tier}" for classification in (RESERVED, OVERFLOW) for tier in TIERS)


def lane_of(tier: str | None, classification: str | None) -> int:
    """The number of a lane, 0 to 5. What is not known to be reserved is overflow; a tier that is not known is batch."""
    place = TIERS.index(tier) if tier in TIERS else len(TIERS) - 1
    return place if classification == RESERVED else len(TIERS) + place


def lane_by_labels(labels: Mapping[str, str], tier_label: str = TIER_LABEL) -> int:
    """The lane of a request with these labels."""
    return lane_of(labels.get(tier_label), labels.get(CLASSIFICATION_LABEL))
