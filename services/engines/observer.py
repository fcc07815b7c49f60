"""What a scheduler reports of its work, so that engines need not know how it is counted."""


class SchedulerObserver:
    """Receives the figures of a scheduler, from its thread; failures from others, too. This one ignores them."""

    def on_start(self, token_count: int, cached_token_count: int) -> None:
        """Reports a sequence that got a slot, and how many of its tokens a cache held."""

    def on_forward(self, sequence_count: int, token_count: int, forward_ns: int) -> None:
        """Reports a forward of `token_count` tokens of `sequence_count` sequences."""

    def on_failure(self) -> None:
        """Reports a forward that failed, even for a single sequence."""

    def on_job(self, queue_ns: int) -> None:
        """Reports the end of a job, and how long it waited outside of its forwards."""


UNOBSERVED = SchedulerObserver()
