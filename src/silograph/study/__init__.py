"""Many runs: cells, the file of their outcomes, and the processes that run them."""
