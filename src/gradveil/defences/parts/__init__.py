"""Building blocks of defences: privacy accounting, image operations, policy search, certificates."""
