"""Who owns each block: pool, prefix cache and the manager that a scheduler calls. No torch, no tensors."""
