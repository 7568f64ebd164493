"""What turns docs/, the docstrings and the command line into the documentation site: `make docs`."""
