"""What is predicted: losses, the counts that clients may return, and scores made of them."""
