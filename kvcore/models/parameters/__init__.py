"""The parameters of a model from its `config.json` alone: names, shapes, and the bytes that they take. No torch."""
