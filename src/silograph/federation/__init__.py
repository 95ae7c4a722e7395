"""The server's view of the clients: calls, reductions, and the engines that carry them."""
