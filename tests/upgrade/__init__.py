"""The last release beside the present version, for tests of upgrades."""
