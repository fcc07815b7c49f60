"""The command `draftbridge zoo`: measures all pairs of a zoo, predicts them, and reports both."""
