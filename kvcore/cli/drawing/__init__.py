"""The memory as a picture: a scene of areas in bytes, and its SVG and HTML."""
