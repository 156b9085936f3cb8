"""What runs on every host: supervisor, relay, engine kinds, and the controller's client of them."""
