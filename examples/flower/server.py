"""The server app; it runs the rounds that the run config asks for."""

from gradveil.engines.flower import server_app

app = server_app()
