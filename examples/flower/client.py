"""The client app of one site; its node config names the site's images, keys and defence."""

from gradveil.engines.warm_site import client_app

app = client_app()
