"""A plain Flower app on handwritten digits."""
