"""`kvcore diff`: one case or one model through two backends, and where their outputs part first."""
