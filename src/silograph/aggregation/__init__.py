"""What the server makes of the clients' replies."""
