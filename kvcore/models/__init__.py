"""From a Hugging Face directory to facts, weights and text; no model code of our own.

`facts`, `config_json` and `families` import no torch, so that planning needs none.
"""
