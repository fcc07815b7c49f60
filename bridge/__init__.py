"""The algorithm of DraftBridge: text to target ids to draft ids and back, and the loop between them.

Nothing here knows of gRPC, of processes or of a tensor library beyond NumPy. Reading order, which is also the way that
a prompt takes::

    tokenizer_json -> token_table -> vocabulary (with seams, prefix_cache) -> templates -> translation -> tape
        -> sources (where candidates come from; with suffix, suffix_memory) -> planning (which of them, and how many)
        -> target_link, statistics -> loop -> text -> request -> generation

`ports` has the messages to draft and target as values, `models` what the bridge knows of a model, `errors` whatever can
fail. `noise` and `sampling` run beside the models.
"""
