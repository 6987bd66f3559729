"""What is cached, by its content: keys of blocks, the index, and the prefixes of requests."""
