"""A complete attention backend of a third party, as small as it can honestly be."""
