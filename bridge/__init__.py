"""The algorithm of DraftBridge: text to target ids to draft ids and back, and the loop between them.

Nothing here knows of gRPC, of processes or of a tensor library beyond NumPy. The rooms, in the order in which a prompt
passes through them, which is also a good order to read them in::

    request      what a client asks for, checked
    text/        bytes and tokens: tokenizer_json -> token_table -> seams, prefix_cache -> vocabulary -> models
                 -> chat (templates), translation (draft and target ids), stream (text to the client)
    tape         the committed tokens of a request: the only state that matters
    sources/     where candidates come from: source (the port), draft, suffix, chain
    planning/    which source to use, and for how many tokens: costs, chances -> estimates -> prediction -> planner
    target_link  what the target is told, and its passes checked
    loop         the verification loop: take a pass, commit it, tell the sources, plan, send candidates
    generation   a request from beginning to end; statistics counts what happened

`ports` has the messages to draft and target as values, `errors` everything that can fail. `sampling/` runs beside the
models: parameters, noise and the choice of a token.
"""
