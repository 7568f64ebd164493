"""A site's side: its images, keys and defence are those of its node config."""

from gradveil.engines.flower_site import client_app

app = client_app()
