"""The algorithm of DraftBridge: text to target ids to draft ids and back, and the loop between them.

Nothing here knows of gRPC, of processes or of a tensor library beyond NumPy. Reading order, which is
also the way that a prompt takes::

    tokenizer_json -> token_table -> vocabulary (with prefix_cache) -> templates -> translation -> tape -> lead
        -> speculation -> text -> generation     (noise and sampling run beside the models, probes at their start)
"""
