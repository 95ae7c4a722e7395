"""Settings of a method, searched by validation scores."""
