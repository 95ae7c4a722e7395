"""A federation on machines of its own: server, silos, and what monitors them."""
