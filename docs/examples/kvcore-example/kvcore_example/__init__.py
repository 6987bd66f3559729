"""A complete plugin of a third party: a backend with x-packed keys, a content and a retention."""
