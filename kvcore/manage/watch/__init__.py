"""What happens to blocks, for those who watch: events, contents that died, and the proof that nothing is lost."""
