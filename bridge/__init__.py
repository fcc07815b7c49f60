"""The algorithm of DraftBridge: text to target ids to draft ids and back, and the loop between them.

Nothing here knows of gRPC, of processes or of a tensor library beyond NumPy. Reading order, which is also the way that
a prompt takes::

    tokenizer_json -> token_table -> vocabulary (with seams, prefix_cache) -> templates -> translation -> tape
        -> sources (where candidates come from) -> planning (which of them, and how many) -> target_link -> loop
        -> text -> generation      (noise and sampling run beside the models)
"""
