"""Holds the sequences of engines that keep their own loop: in the bridge, or in the engine's own process."""
