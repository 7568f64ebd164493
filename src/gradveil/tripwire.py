"""Checks of a received model for traps, for use in your own client; see `gradveil.engines.tripwire`."""

from gradveil.engines.tripwire import *  # noqa: F403 - exactly the same names
