"""What an attention layer stores (content), for how long (retention) and how its bytes lie (layout).

Pure arithmetic: nothing in this room imports torch.
"""
