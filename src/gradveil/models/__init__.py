"""The model zoo, and loading of the user's own networks."""

from gradveil.models.base import Model, Normalisation, create_model, normalisation_of
from gradveil.models.weights import load_weights

__all__ = ["Model", "Normalisation", "create_model", "load_weights", "normalisation_of"]
