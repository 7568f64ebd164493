"""Where clients run: the embedded simulation, in this process or on all cores; real sites, over Flower."""
