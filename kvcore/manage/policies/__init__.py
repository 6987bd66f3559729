"""Which cached block goes first."""
