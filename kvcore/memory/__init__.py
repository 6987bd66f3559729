"""The physical half: the arena's bytes, the views of them, tables on the device, copies and zeroing."""
