"""What is computed: configuration, weights by role, and the forward pass as a list of op calls."""
