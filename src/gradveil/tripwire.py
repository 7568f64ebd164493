"""The public door to `gradveil.engines.tripwire`: checks with which a client looks at the model that it received."""

from gradveil.engines.tripwire import *  # noqa: F403 - the same names
