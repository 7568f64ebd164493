"""Generators of likely images, the prior of generative attacks: built-in ones, their training, and the user's own."""

from gradveil.generators.base import Generator, Latent, load_generator
from gradveil.generators.principal import principal_components

__all__ = ["Generator", "Latent", "load_generator", "principal_components"]
