"""A federated round: a client's local training, the server's sum, and the flat vectors between them."""
