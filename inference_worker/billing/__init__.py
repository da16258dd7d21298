"""Usage events, and the receiver that takes them."""
