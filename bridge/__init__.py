"""Implements the algorithm of DraftBridge: translation between text and tokens, and the verification loop.

It imports no gRPC, no process management and no tensor library beyond NumPy. A prompt passes through its modules in
this order, which is also a good order to read them in::

    request      checks what a client asks for and renders the prompt
    text/        bytes and tokens: tokenizer_json -> token_table -> seams, prefix_cache -> vocabulary -> models
                 -> chat (templates), chat_reading (chats in ids), translation (draft and target ids), stream (text
                 to the client)
    tape         the committed tokens of a request: the only state that matters
    measuring/   what forwards cost and how often candidates are right: costs, chances, draft_estimates
    sources/     where candidates come from: source (the port), grammar, draft, source_set; prompt lookup:
                 token_lookup -> suffix; earlier outputs: ngrams -> learned
    planning/    chooses a source and a number of tokens: prediction -> estimates -> planner
    speculation  the sources, the planner and the present plan of one sequence: what its next pass gets
    target_link  sends offers to the target and checks its passes
    loop         the verification loop: take a pass, commit it, inform the sources, plan, send candidates
    guest        the same for engines that keep their own loop: guest_step, guest_sequence, and planning.batch for many
                 sequences
    generation   a request from beginning to end; statistics counts what happened

`ports` defines the messages to and from draft and target as values, `errors` what can fail in the algorithm, `threads`
the threads for slow work.
`sampling/` is for the model servers: parameters, noise and the choice of a token.
"""
